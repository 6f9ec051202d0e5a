"""Models, sizes, and variants of the rows. Imports nothing that a rival's environment may lack."""

import dataclasses
import json
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a model and of its batch.

    Attributes:
        batch: examples per step.
        shape: shape of one example, (H, W, C) for images and (T,) for tokens.
        classes: number of classes.
        vocabulary: number of distinct tokens.
        width: features per token, of transformers.
        depth: number of blocks, of transformers.
        patch: pixels per side of a patch, of vision transformers.
    """

    batch: int
    shape: Sequence[int]
    classes: int = 1000
    vocabulary: int = 30_000
    width: int = 768
    depth: int = 12
    patch: int = 16

    @property
    def heads(self) -> int:
        """Attention heads, each with 64 features as in BERT and ViT-B, and at least one."""
        return max(1, self.width // 64)


SIZES = {
    "resnet50": Size(128, (224, 224, 3)),
    "transformer": Size(32, (512,)),
    "vit_b16": Size(64, (224, 224, 3)),
    "mobilenet_v2": Size(128, (224, 224, 3)),
    "pooling": Size(128, (224, 224, 3)),  # hardly computes, so that a step copies its batch
}
TINY_SIZES = {
    "resnet50": Size(2, (32, 32, 3), 10),
    "transformer": Size(2, (16,), 10, 100, 16, 2),
    "vit_b16": Size(2, (32, 32, 3), 10, 100, 16, 2),
    "mobilenet_v2": Size(2, (32, 32, 3), 10),
    "pooling": Size(2, (32, 32, 3), 10),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train a model.

    Attributes:
        precision: "float32", "tf32", or "bfloat16" (mixed precision).
        compiled: XLA, or `torch.compile`.
        steps_per_call: steps in one call from Python.
        reads: whether each step decodes and augments JPEG images. Otherwise batches repeat.
        telemetry: whether kdist records the run.
        prefetches: whether the next batch is copied to the GPU during a step, by `tf.data`.
    """

    precision: str
    compiled: bool = False
    steps_per_call: int = 1
    reads: bool = False
    telemetry: bool = False
    prefetches: bool = False

    def __str__(self):
        words = [self.precision]
        words += ["compiled"] * self.compiled
        words += [f"{self.steps_per_call} steps per call"] * (self.steps_per_call > 1)
        words += ["input pipeline"] * self.reads
        words += ["telemetry"] * self.telemetry
        words += ["prefetched to the GPU"] * self.prefetches
        return ", ".join(words)


FLOAT32, TF32 = Variant("float32"), Variant("tf32")
BFLOAT16, COMPILED = Variant("bfloat16"), Variant("bfloat16", True)
GROUPED = Variant("bfloat16", True, 10)

# The most telling first, since a time limit may end the process.
_RIVALS = (COMPILED, TF32, BFLOAT16)
VARIANTS = {
    "kdist": (
        COMPILED,
        Variant("bfloat16", True, prefetches=True),
        TF32,
        BFLOAT16,
        GROUPED,
        FLOAT32,
        Variant("tf32", True),
        Variant("bfloat16", reads=True),
        Variant("bfloat16", telemetry=True),
    ),
    "keras": _RIVALS,
    "torch": _RIVALS,
    "jax": (COMPILED, Variant("tf32", True)),  # Keras compiles every step on JAX.
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process measures.

    Attributes:
        library: "kdist", "keras", "torch", or "jax" (Keras on JAX).
        model: a name in `SIZES`.
        tiny: measure small sizes on the CPU; the figures mean nothing.
        only: index of the one variant to measure, in `VARIANTS`; None measures all.
        most: largest number of variants to measure, the most telling ones; None measures all.
        profile: print the kernels that take longest instead of speed.
    """

    library: str
    model: str
    tiny: bool = False
    only: int | None = None
    most: int | None = None
    profile: bool = False

    @property
    def size(self) -> Size:
        """Size of the model and of its batch."""
        return (TINY_SIZES if self.tiny else SIZES)[self.model]

    @property
    def seconds(self) -> float:
        """Approximate duration of the timed steps of one row."""
        return 0.2 if self.tiny else 3.0

    @property
    def variants(self) -> Sequence[Variant]:
        """Variants to measure. Tokens need no input pipeline."""
        chosen = VARIANTS[self.library]
        if self.only is not None:
            chosen = chosen[self.only : self.only + 1]
        chosen = [each for each in chosen if len(self.size.shape) == 3 or not each.reads]
        return chosen[: self.most]

    def to_json(self) -> str:
        """Returns the task as a command line argument."""
        return json.dumps(dataclasses.asdict(self))


def read_task() -> Task:
    """Returns the task on the command line."""
    return Task(**json.loads(sys.argv[1]))


def print_row(**values):
    """Prints a row at once, so that it is kept if this process is killed."""
    print(json.dumps({"row": values}), flush=True)


def print_training(task: Task, variant: Variant, milliseconds: float, **more):
    """Prints the row of a training that took so many milliseconds per step."""
    print_row(
        library=task.library,
        model=task.model,
        variant=str(variant),
        precision=variant.precision,
        batch=task.size.batch,
        ms_per_step=milliseconds,
        **more,
    )


def print_failure(task: Task, variant: Variant, error: Exception):
    """Prints the row of a training that failed, so that later variants still run."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    row = {"library": task.library, "model": task.model, "variant": str(variant)}
    print_row(**row, error=text)
