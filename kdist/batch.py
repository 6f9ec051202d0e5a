"""Batch sizes: local, per micro-step, and global.

All code in kdist that needs a product of batch sizes uses this class.
"""

import dataclasses
import operator


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sizes of a batch, in examples.

    One optimizer update is computed from `local` × `replicas` × `accumulate` examples.

    Args:
        local: examples per replica and micro-step.
        replicas: number of copies of the model that compute gradients. Defaults to 1.
        accumulate: number of micro-steps whose gradients are added per update. Defaults to 1.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is less than 1.

    Example:

    >>> batch = Batch(local=16, replicas=4, accumulate=2)
    >>> batch.global_size
    128
    >>> batch.steps_per_epoch(60_000)
    468
    >>> print(batch)
    16 local × 4 replicas × 2 micro-steps
    """

    local: int
    replicas: int = 1
    accumulate: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _positive(field.name, getattr(self, field.name)))

    @classmethod
    def from_global(cls, global_size: int, *, replicas: int = 1, accumulate: int = 1) -> "Batch":
        """Divides a global batch evenly among replicas and micro-steps.

        Args:
            global_size: examples per optimizer update.
            replicas: number of replicas. Defaults to 1.
            accumulate: number of micro-steps per update. Defaults to 1.

        Returns:
            A `Batch` with this `global_size`.

        Raises:
            ValueError: `global_size` is not a multiple of `replicas` × `accumulate`; the message
                names the nearest sizes that are.

        Example:

        >>> Batch.from_global(128, replicas=4)
        Batch(local=32, replicas=4, accumulate=1)
        """
        global_size = _positive("global_size", global_size)
        parts = cls(1, replicas, accumulate).global_size
        local, remainder = divmod(global_size, parts)
        if remainder:
            lower, upper = local * parts, (local + 1) * parts
            nearest = f"{lower} or {upper}" if lower else f"{upper}"
            raise ValueError(
                f"a global batch of {global_size} is not divisible by {replicas} replicas × "
                f"{accumulate} micro-steps; use {nearest}"
            )
        return cls(local, replicas, accumulate)

    @property
    def micro_size(self) -> int:
        """Examples per micro-step of all replicas: local × replicas."""
        return self.local * self.replicas

    @property
    def global_size(self) -> int:
        """Examples per optimizer update: local × replicas × accumulate."""
        return self.micro_size * self.accumulate

    def steps_per_epoch(self, num_examples: int) -> int:
        """Returns the number of full global batches in `num_examples`.

        Raises:
            ValueError: `num_examples` is less than one global batch.
        """
        steps = num_examples // self.global_size
        if steps < 1:
            largest = num_examples // Batch(1, self.replicas, self.accumulate).global_size
            remedy = (
                f"lower the local batch (--local_batch_size) to {largest} or less"
                if largest
                else "use more examples, or fewer replicas or accumulated micro-steps"
            )
            raise ValueError(
                f"a global batch of {self.global_size} examples ({self}) is larger than the "
                f"dataset of {num_examples} examples; {remedy}"
            )
        return steps

    def steps_to_see_all(self, num_examples: int) -> int:
        """Returns the number of global batches that hold all examples, the last one padded.

        Example:

        >>> Batch(local=100).steps_to_see_all(250)
        3
        """
        return -(-num_examples // self.global_size)

    def __str__(self):
        micro_steps = f" × {self.accumulate} micro-steps" if self.accumulate > 1 else ""
        return f"{self.local} local × {self.replicas} replicas{micro_steps}"


def _positive(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Batch: {name} must be an integer, got {value!r}") from None
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"Batch: {name} must be at least 1, got {value!r}")
    return number
