"""Workload of one training step, layer by layer, in numbers that hold on any device.

    >>> fc = LayerWork("fc", "matmul", forward_flops=20e6, backward_flops=40e6, parameters=10e6,
    ...                trainable_parameters=10e6, kept_bytes=4096, moved_bytes=9e4, spatial=False)
    >>> work = Workload("one", (3,), layers=(fc,), input_bytes=12, peaks=((9000, 0),))
    >>> work.training_flops
    60000000.0
    >>> work.gradient_bytes, work.activation_bytes, work.step_bytes(local_batch=32)
    (40000000.0, 4096, 288000)

`kdist.planner.read_workload` reads it from a model. Workloads of models known by name are stored,
so that planning by name needs no TensorFlow. They cover keras.applications, kdist's own builders,
and the models of published benchmarks; `tools/known_workloads.py` builds them.
"""

import dataclasses
import difflib
import functools
import gzip
import json
import os
import re
from collections.abc import Sequence
from importlib import resources

from kdist.json_text import parse_json

# Stored workloads.
WORKLOADS_DIRECTORY = resources.files(__package__).joinpath("models")
_SUFFIX = ".json.gz"
# Other names of the same network, as keys.
_ALIASES = {
    "bertlarge": "bertlargeseq512",
    "efficientdet": "efficientdetd0",
    "electrabase": "electrabaseseq512",
    "maskrcnn": "maskrcnnr50",
    "mobilenetv1": "mobilenet",
    "resnet50v1": "resnet50",
    "resnext101": "resnext10132x4d",
    "unet": "unetmedical",
}
# Words about a training rather than a model. Workloads with such a word in their names are found
# first.
_REMARKS = re.compile(r"\b(pre-?train(ing|ed)?|fine-?tun(e|ed|ing)|squad|training)\b")
_PIXELS = re.compile(r"\b(\d+) ?px\b")


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """Work of one layer in a training step; everything but the parameters is per example.

    Example:

        kdist.planner.known_workload("resnet50").layers[1].forward_flops

    Attributes:
        name: Name of the layer; `""` for operations outside of any layer.
        kind: Kind of most of its arithmetic: `"convolution"`, `"depthwise"`, `"matmul"`, or
            `"elementwise"`.
        forward_flops: Floating-point operations of the forward pass; a multiplication and an
            addition are two.
        backward_flops: Floating-point operations of the gradients of its inputs and weights.
        parameters: Numbers in all its weights.
        trainable_parameters: Numbers in its trainable weights.
        kept_bytes: Outputs of the forward pass that the backward pass reads.
        moved_bytes: Bytes read and written by the operations of both passes, without weights.
        spatial: Whether its outputs have the extent of an image, so that everything but the
            parameters grows with the image's area.
        kernel_bytes: Buffers of the CPU's kernel for its filters' gradient, for any batch.
        crossing_bytes: Bytes that layers up to this one produce in the forward pass and later ones
            read: what a pipeline cut after this layer sends. `None` where a model cannot be cut.
        weight_shapes: Shapes of its trainable weights; empty if unknown.
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
    crossing_bytes: float | None = None
    weight_shapes: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), hash=False)

    @property
    def is_table(self) -> bool:
        """True for an embedding: it looks up rows, and its gradient needs no arithmetic."""
        return self.kind == "elementwise" and not self.backward_flops

    @property
    def trained_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of its trainable weights; of one matrix if they are unknown."""
        if self.weight_shapes or not self.trainable_parameters:
            return self.weight_shapes
        return ((int(self.trainable_parameters), 1),)

    def at_area(self, ratio: float) -> "LayerWork":
        """Returns the same layer on images of `ratio` times the area."""
        if not self.spatial:
            return self
        return dataclasses.replace(
            self,
            forward_flops=self.forward_flops * ratio,
            backward_flops=self.backward_flops * ratio,
            kept_bytes=self.kept_bytes * ratio,
            moved_bytes=self.moved_bytes * ratio,
            crossing_bytes=None if self.crossing_bytes is None else self.crossing_bytes * ratio,
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """Work of a training step of one model.

    Example:

        work = kdist.planner.known_workload("resnet50")
        work.training_flops, work.gradient_bytes, work.step_bytes(local_batch=32)

    Args:
        name: Name of the model.
        input_shape: Shape of one example of the first input, without the batch.
        layers: Layers in the order of the forward pass.
        input_bytes: Bytes of all inputs of one example.
        peaks: Moments at which the outputs of a step's operations need the most memory, each as
            bytes per example and bytes for any batch, without weights. Two operations run at a
            time. The batch decides which moment counts: the first gradients replace the last
            activations.
        peaks_applied: The same if each gradient is applied and freed as soon as it is computed;
            empty if unknown.
        precision: Dtype policy of the model. Under another one bytes are not proportional: layers
            that stay float32 keep a copy of what they cast. Defaults to `"float32"`.
        uncounted: Kinds of operations with unknown arithmetic or memory, such as loops. With any of
            them all numbers are too small.
        resizable: Whether images of another size, channels last, only change the sizes of layers:
            no layer has weights or scores for each position. Defaults to `True`.
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
        """Numbers in the trainable weights."""
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
        """Bytes that the forward pass of one example keeps for its backward pass."""
        return sum(layer.kept_bytes for layer in self.layers)

    def step_bytes(self, local_batch: int, gradients_stay: bool = True) -> float:
        """Returns the peak memory of activations and gradients in a step.

        Weights, slots, and buffers of single operations are extra.

        Args:
            local_batch: Examples of one replica.
            gradients_stay: Whether all gradients are computed before the first is applied, as for
                an exchange between replicas. Otherwise each is applied and freed immediately.
                Defaults to `True`.
        """
        peaks = self.peaks if gradients_stay or not self.peaks_applied else self.peaks_applied
        return max(each * local_batch + always for each, always in peaks)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients that replicas exchange in an update.

        Under Keras's mixed policies variables and their gradients stay float32; only the pure
        policies (`"float16"`, `"bfloat16"`) halve them.
        """
        return self.trainable_parameters * (2 if self.precision in ("float16", "bfloat16") else 4)

    def gradients_as_ready(self) -> list[tuple[str, float]]:
        """Returns layers and their trainable numbers in the order of the backward pass."""
        return [
            (layer.name, layer.trainable_parameters)
            for layer in reversed(self.layers)
            if layer.trainable_parameters
        ]

    def at_input_shape(self, shape: Sequence[int]) -> "Workload":
        """Returns the same model on images of another height and width.

        Layers on images grow with the area, up to the rounding of odd sizes; layers after pooling
        over the whole image do not. All memory is assumed to belong to layers on images.

        Args:
            shape: Height, width, and channels.

        Raises:
            ValueError: If `shape` differs in more than height and width, has sizes below 1, or the
                model has more than convolutions and pixel-wise operations.
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
                f"the work of {self.name} depends on more than the area of its inputs, "
                f"{self.input_shape}; build it for {shape} and read it with "
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
        """Returns the workload as JSON, for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str | os.PathLike = "this text") -> "Workload":
        """Returns the workload that `to_json` wrote; `source` names it in error messages.

        Raises:
            ValueError: If `text` is no workload.
        """
        try:
            fields = parse_json(text)
            layers = tuple(_layer(layer) for layer in fields.pop("layers"))
            fields |= {name: tuple(fields[name]) for name in ("input_shape", "uncounted")}
            fields["peaks"] = _pairs(fields["peaks"])
            fields["peaks_applied"] = _pairs(fields.get("peaks_applied", ()))
            return cls(layers=layers, **fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{source} holds no workload ({error!r}); write it with Workload.to_json()"
            ) from error


def _layer(fields):
    """Returns a layer with tuples of shapes; JSON has lists, and files of kdist 0.1 have none."""
    shapes = tuple(map(tuple, fields.get("weight_shapes", ())))
    return LayerWork(**{**fields, "weight_shapes": shapes})


def _pairs(values):
    """Returns peaks as tuples; JSON has lists."""
    return tuple((each, always) for each, always in values)


def _scaled(peaks, ratio):
    return tuple((each * ratio, always) for each, always in peaks)


def known_workloads() -> tuple[str, ...]:
    """Returns the names of kdist's stored workloads, sorted.

    Example:

        >>> "resnet50" in known_workloads()
        True

    Returns:
        Names for `known_workload` and `kdist.plan`.
    """
    return tuple(_files())


@functools.lru_cache(maxsize=256)
def known_workload(name: str) -> Workload:
    """Returns the workload of a model known by name, in float32.

    Case, spaces, and punctuation do not count, nor words about the training (`"fine-tune"`,
    `"pretrain"`, `"SQuAD"`). `"256px"` means images of 256 × 256 pixels. Without it, images have
    the builder's default size.

    Example:

        >>> known_workload("DenseNet-201 256px").input_shape
        (256, 256, 3)

    Args:
        name: Such as `"resnet50"`, `"ResNet-50 v1.5"`, `"mobilenet_v2"`, or `"BERT-large seq128"`.

    Returns:
        The `Workload`.

    Raises:
        ValueError: If no model has this name, or its images cannot have this size.
    """
    lowered = str(name).lower()
    pixels = _PIXELS.search(lowered)
    plain = _PIXELS.sub(" ", lowered)
    keys = {_key(stem): stem for stem in _files()}
    tried = [_key(plain), _key(_REMARKS.sub(" ", plain))]
    stem = next((keys[key] for key in (_ALIASES.get(k, k) for k in tried) if key in keys), None)
    if stem is None:
        close = difflib.get_close_matches(tried[-1], keys, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(keys[key] for key in close)}?" if close else "."
        raise ValueError(
            f"no model is known by the name {name!r}{hint} There are {', '.join(_files())}; read "
            "any other with kdist.planner.read_workload(model)"
        )
    work = _load(stem)
    if pixels is None:
        return work
    size = int(pixels[1])
    return work.at_input_shape((size, size, *work.input_shape[2:]))


@functools.cache
def _files():
    """Returns the files of stored workloads by name, sorted."""
    files = {path.name.removesuffix(_SUFFIX): path for path in WORKLOADS_DIRECTORY.iterdir()}
    return dict(sorted(files.items()))


@functools.cache
def _load(stem):
    path = _files()[stem]
    return Workload.from_json(gzip.decompress(path.read_bytes()).decode(), path.name)


def _key(name):
    return re.sub(r"[^a-z0-9]", "", name)
