"""Rules of what replicas divide, and sizes of the parts. Imports no TensorFlow.

The planner predicts from these rules what `kdist.training.sharding` does.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

# Parts consist of whole rows if at most one in this many rows of a part is padding. Embeddings
# need it, whose gradients are rows.
_ROWS_PER_PART = 8

# Number of gathered weights that a device holds at a time: one in use, and the next.
HELD = 2


@dataclasses.dataclass(frozen=True)
class PartSizes:
    """Sizes of the equal parts of a tensor, the last of which are padded.

    A part consists of rows (the first axis), or of elements if there are too few rows. It has as
    many axes as the tensor, by which an optimizer may distinguish matrices from vectors.

    Args:
        shape: shape of the tensor.
        count: number of parts.
    """

    shape: tuple[int, ...]
    count: int

    @property
    def is_by_rows(self) -> bool:
        """True if each part consists of whole rows."""
        rows = self.shape[0]
        return rows % self.count == 0 or rows >= _ROWS_PER_PART * self.count

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each part."""
        rows, *others = self._shape_of_rows
        return (-(-rows // self.count), *others)

    @property
    def _shape_of_rows(self):
        if self.is_by_rows:
            return self.shape
        return (math.prod(self.shape), *[1] * (len(self.shape) - 1))


def is_large(shape: Sequence[int], number_bytes: int, count: int, min_shard_bytes: int) -> bool:
    """Returns True if the state of a weight is divided among `count` replicas.

    Args:
        shape: shape of the weight.
        number_bytes: bytes of one of its numbers.
        count: number of replicas.
        min_shard_bytes: that of the layout.
    """
    size = math.prod(shape)
    return size * number_bytes >= min_shard_bytes and size >= count


def is_kept(shape: Sequence[int]) -> bool:
    """Returns True for vectors, such as biases and scales, which are gathered at once and kept.

    oneDNN merges an operation with the addition of a bias, and the gradients of a kernel and of a
    bias, without regard to what waits for one of them. The graph would then have a cycle.
    """
    return len(shape) < 2


def gathered_bytes(weights: Iterable[tuple[Sequence[int], int]]) -> int:
    """Returns the bytes of divided weights that a step gathers and holds at a time.

    These are all vectors, and the two largest of the others. Processes of one device may hold 2 MiB
    of small weights instead.

    Args:
        weights: shape and bytes per number of each divided weight.
    """
    kept, others = 0, []
    for shape, number_bytes in weights:
        size = math.prod(shape) * number_bytes
        if is_kept(shape):
            kept += size
        else:
            others.append(size)
    return kept + sum(sorted(others)[-HELD:])
