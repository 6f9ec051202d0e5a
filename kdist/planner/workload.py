"""What one training step of a model has to do, layer by layer, in numbers that hold on any device.

    >>> fc = LayerWork("fc", "matmul", forward_flops=20e6, backward_flops=40e6, parameters=10e6,
    ...                trainable_parameters=10e6, kept_bytes=4096, moved_bytes=9e4, spatial=False)
    >>> work = Workload("one", (3,), layers=(fc,), input_bytes=12, peaks=((9000, 0),))
    >>> work.training_flops
    60000000.0
    >>> work.gradient_bytes, work.activation_bytes, work.step_bytes(local_batch=32)
    (40000000.0, 4096, 288000)

Read from a model by `kdist.planner.read_workload`; nothing here imports TensorFlow.
"""

import dataclasses
import json
import os
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """One layer's part of a training step; all but the parameters for one example.

    Attributes:
        name: the layer's, or "" for what stands outside of any.
        kind: what most of its arithmetic is: "convolution", "depthwise", "matmul" or "elementwise".
        forward_flops: floating-point operations of the forward pass; a multiplication and an
            addition are two.
        backward_flops: those of the gradients of its inputs and weights.
        parameters: numbers in its weights, those that are not trained included.
        trainable_parameters: those that get a gradient.
        kept_bytes: outputs that the forward pass leaves for the backward pass.
        moved_bytes: read and written by the operations of both passes, weights left out.
        spatial: whether its outputs have the extent of an image, so that all but the parameters
            grows with the image's area.
        kernel_bytes: buffers of the CPU's kernel of its filters' gradient, whatever the batch is.
    """

    name: str
    kind: str
    forward_flops: float
    backward_flops: float
    parameters: float
    trainable_parameters: float
    kept_bytes: float
    moved_bytes: float
    spatial: bool
    kernel_bytes: float = 0.0

    def at_area(self, ratio: float) -> "LayerWork":
        """The same layer on images of `ratio` times the area."""
        if not self.spatial:
            return self
        return dataclasses.replace(
            self,
            forward_flops=self.forward_flops * ratio,
            backward_flops=self.backward_flops * ratio,
            kept_bytes=self.kept_bytes * ratio,
            moved_bytes=self.moved_bytes * ratio,
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step of one model.

    Attributes:
        name: the model's.
        input_shape: of one example of the first input, without the batch.
        layers: in the order in which the forward pass comes to them.
        input_bytes: of all inputs of one example, as the model takes them.
        peaks: when most is alive of what the operations of a step put out, each time as bytes for
            each example and bytes whatever the batch is, two operations running at a time; weights
            left out. Which time it is depends
            on the batch: the first gradients take the place of the last activations.
        peaks_applied: the same where each gradient is applied, and its memory free again, as soon
            as it is there; empty where it was not read.
        precision: the dtype policy that the model was built under. Under another one, bytes are not
            in proportion: layers that stay float32 keep a copy of what they cast.
        uncounted: kinds of operations of which neither arithmetic nor memory is known, such as
            loops; with any of them all figures are too small.
        resizable: whether another size of its images, channels last, means other sizes of the same
            layers: no layer has weights or scores for each place.
    """

    name: str
    input_shape: tuple[int, ...]
    layers: tuple[LayerWork, ...]
    input_bytes: float
    peaks: tuple[tuple[float, float], ...]
    precision: str = "float32"
    uncounted: tuple[str, ...] = ()
    resizable: bool = True
    peaks_applied: tuple[tuple[float, float], ...] = ()

    @property
    def parameters(self) -> float:
        """Numbers in all weights."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def trainable_parameters(self) -> float:
        """Numbers in the weights that are trained."""
        return sum(layer.trainable_parameters for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of the forward pass for one example."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def training_flops(self) -> float:
        """Floating-point operations of forward and backward pass for one example."""
        return self.forward_flops + sum(layer.backward_flops for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        """What one example's forward pass leaves for its backward pass."""
        return sum(layer.kept_bytes for layer in self.layers)

    def step_bytes(self, local_batch: int, gradients_stay: bool = True) -> float:
        """The most that is alive at once within a step of `local_batch` examples.

        Activations and gradients; weights, slots and buffers of single operations come on top.

        Args:
            local_batch: examples of one replica.
            gradients_stay: all gradients are there before the first is applied, as where replicas
                exchange them; else each is applied, and gone, as soon as it is there.
        """
        peaks = self.peaks if gradients_stay or not self.peaks_applied else self.peaks_applied
        return max(each * local_batch + always for each, always in peaks)

    @property
    def gradient_bytes(self) -> float:
        """What replicas exchange in an update.

        Under Keras's mixed policies variables and so their gradients stay float32; only the pure
        policies ("float16", "bfloat16") halve them.
        """
        return self.trainable_parameters * (2 if self.precision in ("float16", "bfloat16") else 4)

    def gradients_as_ready(self) -> list[tuple[str, float]]:
        """Layers and their trainable numbers in the order in which the backward pass gets there."""
        return [
            (layer.name, layer.trainable_parameters)
            for layer in reversed(self.layers)
            if layer.trainable_parameters
        ]

    def at_input_shape(self, shape: Sequence[int]) -> "Workload":
        """The same model on images of another height and width.

        Layers on images grow with the area, but for the rounding of odd sizes; what comes after
        pooling over the whole image does not. Memory is taken for that of images alone.

        Raises:
            ValueError: `shape` differs in more than height and width, is not of sizes from 1 on, or
                the model is more than convolutions and what goes pixel by pixel.
        """
        shape = tuple(shape)
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"a shape is of whole numbers from 1 on, not {shape}")
        if shape == self.input_shape:
            return self
        if len(shape) != 3 or len(self.input_shape) != 3 or shape[2] != self.input_shape[2]:
            raise ValueError(
                f"{self.name} is known for inputs of shape {self.input_shape}; only height and "
                f"width of an image can be changed, not to {shape}: read the model itself with "
                "kdist.planner.read_workload(model)"
            )
        if not self.resizable:
            raise ValueError(
                f"what {self.name} does depends on the size of its inputs, {self.input_shape}, in "
                f"more ways than their area; build it for {shape} and read it with "
                "kdist.planner.read_workload(model)"
            )
        ratio = shape[0] * shape[1] / (self.input_shape[0] * self.input_shape[1])
        return dataclasses.replace(
            self,
            input_shape=shape,
            layers=tuple(layer.at_area(ratio) for layer in self.layers),
            input_bytes=self.input_bytes * ratio,
            peaks=_scaled(self.peaks, ratio),
            peaks_applied=_scaled(self.peaks_applied, ratio),
        )

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str | os.PathLike = "this text") -> "Workload":
        """The workload that `to_json` wrote.

        Args:
            text: as `to_json` gives it.
            source: what an error names.

        Raises:
            ValueError: `text` is no workload.
        """
        try:
            fields = json.loads(text)
            layers = tuple(LayerWork(**layer) for layer in fields.pop("layers"))
            fields |= {name: tuple(fields[name]) for name in ("input_shape", "uncounted")}
            fields["peaks"] = _pairs(fields["peaks"])
            fields["peaks_applied"] = _pairs(fields.get("peaks_applied", ()))
            return cls(layers=layers, **fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{source} holds no workload ({error!r}); write it with Workload.to_json()"
            ) from error


def _pairs(values):
    """As `Workload.peaks`, of what JSON made of it."""
    return tuple((each, always) for each, always in values)


def _scaled(peaks, ratio):
    return tuple((each * ratio, always) for each, always in peaks)
