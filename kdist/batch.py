"""Batch sizes: local, per micro-step, and global.

All code in kdist that needs a product of batch sizes uses this class.
"""

import dataclasses
import operator


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sizes of a batch, in examples.

    One optimizer update is computed from `local` × `replicas` × `accumulate` examples, or from
    `total` examples if these cannot be divided evenly.

    Args:
        local: examples per replica and micro-step; the largest number of them with `total`.
        replicas: number of copies of the model that compute gradients. Defaults to 1.
        accumulate: number of micro-steps whose gradients are added per update. Defaults to 1.
        total: examples per update, if some replicas have one less in a micro-step than others.
            Defaults to None, for `local` × `replicas` × `accumulate`.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is less than 1, or `total` is larger than `local` × `replicas` ×
            `accumulate`.

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
    total: int | None = None

    def __post_init__(self):
        for name, value in list(vars(self).items()):  # asdict copies values, which takes longer
            if value is not None or name != "total":
                object.__setattr__(self, name, _positive(name, value))
        if self.total is not None and self.total > self.micro_size * self.accumulate:
            raise ValueError(
                f"Batch: total={self.total} is more than {self.local} local × {self.replicas} "
                f"replicas × {self.accumulate} micro-steps; raise one of them"
            )

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

    def on_replicas(self, replicas: int) -> "Batch":
        """Divides the same global batch among another number of replicas.

        Training then ends with the same weights, up to rounding. No replica gets more examples in a
        micro-step than `local`, so that memory suffices: fewer replicas take more micro-steps.

        Args:
            replicas: number of replicas.

        Returns:
            A `Batch` with this `global_size`. Replicas differ by at most one example in a
            micro-step.

        Raises:
            TypeError: `replicas` is not an integer.
            ValueError: `replicas` is less than 1.

        Example:

        >>> print(Batch(local=8, replicas=4).on_replicas(2))
        8 local × 2 replicas × 2 micro-steps
        >>> print(Batch(local=8, replicas=4).on_replicas(3))
        up to 6 local × 3 replicas × 2 micro-steps = 32
        """
        total, replicas = self.global_size, _positive("replicas", replicas)
        accumulate = -(-total // (self.local * replicas))
        local = -(-total // (accumulate * replicas))
        is_even = total == local * replicas * accumulate
        return Batch(local, replicas, accumulate, None if is_even else total)

    @property
    def micro_size(self) -> int:
        """Examples per micro-step of all replicas, at most: local × replicas."""
        return self.local * self.replicas

    @property
    def global_size(self) -> int:
        """Examples per optimizer update: `total`, or local × replicas × accumulate."""
        return self.total or self.micro_size * self.accumulate

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
        text = f"{self.local} local × {self.replicas} replicas{micro_steps}"
        return text if self.total is None else f"up to {text} = {self.total}"

    def __repr__(self):
        total = "" if self.total is None else f", total={self.total}"
        return (
            f"Batch(local={self.local}, replicas={self.replicas}, accumulate={self.accumulate}"
            f"{total})"
        )


def check_batch(batch: Batch):
    """Raises a TypeError if `batch` is not a `Batch`, such as a number of examples."""
    if not isinstance(batch, Batch):
        size = batch if isinstance(batch, int) else 64
        raise TypeError(
            f"batch={batch!r} is not a kdist.Batch; pass kdist.Batch.from_global({size}, "
            "replicas=strategy.num_replicas_in_sync)"
        )


def _positive(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Batch: {name} must be an integer, got {value!r}") from None
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"Batch: {name} must be at least 1, got {value!r}")
    return number
