"""How long a batch takes a device, by its size.

    curve = LatencyCurve([1, 8, 32], [0.004, 0.006, 0.012])
    curve.seconds(5)            # 0.006: five rows are padded to eight
    curve.capacity(32)          # 2,667 rows a second

A server pads batches to a few sizes, as each size is a graph of its own for XLA and for GPUs'
kernels; so the curve is a staircase.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class LatencyCurve:
    """Seconds of a batch.

    Attributes:
        sizes: of batches, in rows, ascending; smaller ones are padded to the next.
        batch_seconds: of a batch of each size.

    Raises:
        ValueError: sizes that do not ascend from 1 on, another number of times than of sizes, or
            times that are not above zero.
    """

    sizes: Sequence[int]
    batch_seconds: Sequence[float]

    def __post_init__(self):
        sizes, seconds = list(self.sizes), list(self.batch_seconds)
        if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(f"sizes of batches {sizes}: give them from 1 on, each once, ascending")
        if len(seconds) != len(sizes):
            raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times: give one for each size")
        if not all(np.isfinite(seconds)) or min(seconds) <= 0:
            raise ValueError(f"times of batches {seconds}: each has to be above zero")

    @property
    def largest(self) -> int:
        """The most rows of a batch."""
        return self.sizes[-1]

    def seconds(self, rows: int) -> float:
        """Of a batch of so many rows, up to `largest`, padded to the next size.

        Raises:
            ValueError: more rows.
        """
        if not 1 <= rows <= self.largest:
            raise ValueError(f"a batch of {rows} rows: the curve is for 1 to {self.largest}")
        return self.batch_seconds[int(np.searchsorted(self.sizes, rows))]

    def table(self) -> np.ndarray:
        """Seconds by rows, from 0 (which takes none) to `largest`: shape (largest + 1,)."""
        places = np.searchsorted(self.sizes, np.arange(1, self.largest + 1))
        return np.concatenate([[0.0], np.asarray(self.batch_seconds)[places]])

    def capacity(self, max_batch: int) -> float:
        """The most rows a second that batches of up to `max_batch` rows can serve."""
        rows = np.arange(1, min(max_batch, self.largest) + 1)
        return float(np.max(rows / self.table()[rows]))
