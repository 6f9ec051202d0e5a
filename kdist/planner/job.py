"""What is to be trained, whatever it is trained on."""

import dataclasses
import math

from kdist.planner.cost.setup import Gradients, InputWork
from kdist.planner.workload import Workload

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
# 500 × 375 pixels, the mean of ImageNet's JPEGs.
IMAGENET_MEGAPIXELS = 0.19
# Below this side an image is taken to lie in memory as an array, as Fashion-MNIST's do.
_SMALLEST_JPEG = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
        workload: of the model.
        examples: of an epoch.
        epochs: times through them, whatever the batch is.
        precision: a Keras dtype policy, one of `PRECISIONS`.
        optimizer: "sgd", "momentum", "adam" …, for the memory of its slots.
        jit_compile: whether XLA compiles the step.
        input_work: what the host has to do for one example. By default that of `default_input`.
        name: that the user gave the model; by default that of its workload.

    Raises:
        ValueError: a number is not above 0, `examples` is not a whole one, or the precision is not
            known.
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
                f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}, which are what "
                "scripts/train.py --precision takes"
            )

    @property
    def model(self) -> str:
        """What the model is called in plans and in the table of measured runs."""
        return self.name or self.workload.name

    @property
    def host_work(self) -> InputWork:
        """`input_work`, or what is taken in its place."""
        return self.input_work or default_input(self.workload)

    @property
    def gradients(self) -> Gradients:
        """What replicas exchange: float32 under Keras's mixed policies, too."""
        sizes = [size for _, size in self.workload.gradients_as_ready()]
        total = sum(sizes)
        return Gradients(
            bytes=4 * total,
            largest_share=max(sizes) / total if total else 0.0,
            tensors=2 * len(sizes),  # a kernel and a bias, or a scale and an offset
        )

    @property
    def trained_examples(self) -> float:
        """Of the whole run."""
        return self.examples * self.epochs


def default_input(workload: Workload) -> InputWork:
    """JPEGs as large as ImageNet's for a model of photographs; else arrays, which cost nothing."""
    shape = workload.input_shape
    if len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= _SMALLEST_JPEG:
        return InputWork(
            source_megapixels=IMAGENET_MEGAPIXELS,
            model_megapixels=shape[0] * shape[1] / 1e6,
            decoder="tf.data",
        )
    return InputWork(host_bytes=workload.input_bytes)
