"""How long a batch takes a device, by its size.

    curve = LatencyCurve([1, 8, 32], [0.004, 0.006, 0.012])
    curve.seconds(5)            # 0.006: five rows are padded to eight
    curve.capacity(32)          # 2,667 rows a second

A server pads batches to a few sizes, as each size is a graph of its own for XLA and for GPUs'
kernels; so the curve is a staircase.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

# A batch that took more than so many times as long was compiled, or the process stood still.
MOST_TIMES_SLOWER = 4.0


@dataclasses.dataclass(frozen=True)
class LatencyCurve:
    """Seconds of a batch.

    Attributes:
        sizes: of batches, in rows, ascending; smaller ones are padded to the next.
        batch_seconds: of a batch of each size, on average.
        spread: what single batches took, as shares of these; 1 on average, each as likely. Defaults
            to batches that all take the same.

    Raises:
        ValueError: sizes that do not ascend from 1 on, another number of times than of sizes, or
            times or shares that are not above zero.
    """

    sizes: Sequence[int]
    batch_seconds: Sequence[float]
    spread: Sequence[float] = (1.0,)

    def __post_init__(self):
        sizes, seconds = list(self.sizes), list(self.batch_seconds)
        if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(f"sizes of batches {sizes}: give them from 1 on, each once, ascending")
        if len(seconds) != len(sizes):
            raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times: give one for each size")
        if not all(np.isfinite(seconds)) or min(seconds) <= 0:
            raise ValueError(f"times of batches {seconds}: each has to be above zero")
        if not len(self.spread) or min(self.spread) <= 0:
            raise ValueError(f"spread={list(self.spread)}: shares above zero, one at least")

    @classmethod
    def of_times(cls, times: Mapping[int, Sequence[float]]) -> "LatencyCurve":
        """From what batches of each size took, in seconds.

        A larger batch counts as no faster than a smaller one. The spread is that of all sizes
        together, so that a few times of each are enough.
        """
        if not times:
            return cls([], [])
        medians = np.maximum.accumulate([statistics.median(each) for each in times.values()])
        shares = np.concatenate(
            [np.divide(each, median) for each, median in zip(times.values(), medians, strict=True)]
        )
        shares = np.minimum(shares, MOST_TIMES_SLOWER)
        seconds = medians * shares.mean()
        return cls(list(times), seconds.tolist(), (shares / shares.mean()).tolist())

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
