"""How many examples stand behind one optimizer update, and on how many replicas.

    >>> batch = Batch(local=16, replicas=4, accumulate=2)
    >>> batch.global_size
    128
    >>> batch.steps_per_epoch(60_000)
    468

Everything else in kdist that needs a product of batch sizes asks this class: it is the only
place that multiplies.
"""

import dataclasses
import operator


@dataclasses.dataclass(frozen=True)
class Batch:
    """The sizes of a batch, in examples.

    Attributes:
        local: examples that one replica takes in one micro-step.
        replicas: copies of the model that compute gradients side by side. Defaults to 1.
        accumulate: micro-steps whose gradients are added before one update. Defaults to 1.

    Raises:
        TypeError: a size is not a whole number.
        ValueError: a size is smaller than 1.
    """

    local: int
    replicas: int = 1
    accumulate: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _positive(field.name, getattr(self, field.name)))

    @classmethod
    def from_global(cls, global_size: int, *, replicas: int = 1, accumulate: int = 1) -> "Batch":
        """The batch of `global_size` examples that `replicas` × `accumulate` share evenly.

        Raises:
            ValueError: `global_size` is no multiple of `replicas` × `accumulate`; the message
                names the nearest sizes that are.
        """
        global_size = _positive("global_size", global_size)
        shares = cls(1, replicas, accumulate).global_size
        local, left_over = divmod(global_size, shares)
        if left_over:
            lower, upper = local * shares, (local + 1) * shares
            nearest = f"{lower} or {upper}" if lower else f"{upper}"
            raise ValueError(
                f"a global batch of {global_size} cannot be shared evenly by {replicas} replicas × "
                f"{accumulate} micro-steps; take {nearest}"
            )
        return cls(local, replicas, accumulate)

    @property
    def micro_size(self) -> int:
        """Examples that all replicas together take in one micro-step: local × replicas."""
        return self.local * self.replicas

    @property
    def global_size(self) -> int:
        """Examples behind one optimizer update: local × replicas × accumulate."""
        return self.micro_size * self.accumulate

    def steps_per_epoch(self, num_examples: int) -> int:
        """Full global batches in `num_examples`; the remainder is left out, as training does.

        Raises:
            ValueError: there are fewer examples than one global batch takes.
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
                f"{num_examples} examples there are; {remedy}"
            )
        return steps

    def steps_to_see_all(self, num_examples: int) -> int:
        """Global batches that hold every one of `num_examples`, the last one padded."""
        return -(-num_examples // self.global_size)

    def __str__(self):
        micro_steps = f" × {self.accumulate} micro-steps" if self.accumulate > 1 else ""
        return f"{self.local} local × {self.replicas} replicas{micro_steps}"


def _positive(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Batch: {name} must be a whole number, got {value!r}") from None
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"Batch: {name} must be at least 1, got {value!r}")
    return number
