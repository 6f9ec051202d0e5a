"""Job: a training, independent of the machine that runs it."""

import dataclasses
import math

from kdist.planner.cost.setup import Gradients, InputWork
from kdist.planner.workload.layers import Workload

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
# 500 × 375 pixels, the mean of ImageNet's JPEGs.
IMAGENET_MEGAPIXELS = 0.19
# Smaller images are assumed to lie in memory as arrays, such as those of Fashion-MNIST.
_SMALLEST_JPEG = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """A training to plan.

    Example:

        job = kdist.planner.Job(
            kdist.planner.known_workload("resnet50"), examples=1_281_167, epochs=90
        )

    Args:
        workload: `Workload` of the model.
        examples: Examples per epoch.
        epochs: Number of epochs, whatever the batch is. Defaults to 1.
        precision: Keras dtype policy, one of `PRECISIONS`. Defaults to `"float32"`.
        optimizer: `"sgd"`, `"momentum"`, the default, `"adam"`, …, for the memory of its slots.
        jit_compile: Whether XLA compiles the step. Defaults to `False`.
        input_work: Work of the host for one example. Defaults to `default_input(workload)`.
        name: The user's name of the model. Defaults to that of its workload.

    Raises:
        ValueError: If a number is not above 0, `examples` is not a whole number, or the precision
            is unknown.
    """

    workload: Workload
    examples: int
    epochs: float = 1.0
    precision: str = "float32"
    optimizer: str = "momentum"
    jit_compile: bool = False
    input_work: InputWork | None = None
    name: str = ""

    def __post_init__(self):
        for name in ("examples", "epochs"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} has to be above 0, not {value}")
        if self.examples != int(self.examples):
            raise ValueError(f"examples is a whole number, not {self.examples}")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}, the values of "
                "kdist train --precision"
            )

    @property
    def model(self) -> str:
        """Name of the model in plans and in the table of measured runs."""
        return self.name or self.workload.name

    @property
    def host_work(self) -> InputWork:
        """Work of the host for one example: `input_work` or its default."""
        return self.input_work or default_input(self.workload)

    @property
    def gradients(self) -> Gradients:
        """Gradients that replicas exchange; float32 also under Keras's mixed policies."""
        sizes = [size for _, size in self.workload.gradients_as_ready()]
        total = sum(sizes)
        return Gradients(
            bytes=4 * total,
            largest_share=max(sizes) / total if total else 0.0,
            tensors=2 * len(sizes),  # a kernel and a bias, or a scale and an offset
        )

    @property
    def trained_examples(self) -> float:
        """Examples of the whole run."""
        return self.examples * self.epochs


def default_input(workload: Workload) -> InputWork:
    """Returns JPEGs of ImageNet's size for a model of photographs, else arrays in memory."""
    shape = workload.input_shape
    if len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= _SMALLEST_JPEG:
        return InputWork(
            source_megapixels=IMAGENET_MEGAPIXELS,
            model_megapixels=shape[0] * shape[1] / 1e6,
            decoder="tf.data",
        )
    return InputWork(host_bytes=workload.input_bytes)
