"""Time that a device takes for a batch, by the size of the batch.

    curve = LatencyCurve([1, 8, 32], [0.004, 0.006, 0.012])
    curve.seconds(5)            # 0.006: five rows are padded to eight
    curve.capacity(32)          # 2,667 rows per second

The server pads batches to a few sizes, as XLA and GPU kernels compile a graph for each size. The
curve is therefore a staircase.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.core.requests import Arrays

# A batch with a larger slowdown was compiled, or the process was suspended.
MAX_SLOWDOWN = 4.0
# More repetitions per size gain no precision; fewer are made if batches take long.
_MAX_REPETITIONS = 200


@dataclasses.dataclass(frozen=True)
class LatencyCurve:
    """Compute time of batches by their size.

    Example:

        >>> curve = LatencyCurve([1, 8, 32], [0.004, 0.006, 0.012])
        >>> curve.seconds(5)  # five rows are padded to eight
        0.006
        >>> round(curve.capacity(32))  # rows per second
        2667

    Attributes:
        sizes: batch sizes in rows, ascending; smaller batches are padded to the next size.
        batch_seconds: mean seconds of a batch of each size.
        spread: equally likely ratios of single batch times to the mean, with a mean of 1. Defaults
            to constant batch times.

    Raises:
        ValueError: the sizes do not ascend from 1 or more, their number differs from that of the
            times, or times or ratios are not positive.
    """

    sizes: Sequence[int]
    batch_seconds: Sequence[float]
    spread: Sequence[float] = (1.0,)

    def __post_init__(self):
        sizes, seconds = list(self.sizes), list(self.batch_seconds)
        if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(f"sizes of batches {sizes}: give distinct sizes from 1 on, ascending")
        if len(seconds) != len(sizes):
            raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times: give one for each size")
        if not all(np.isfinite(seconds)) or min(seconds) <= 0:
            raise ValueError(f"times of batches {seconds}: each must be above zero")
        if not len(self.spread) or min(self.spread) <= 0:
            raise ValueError(
                f"spread={list(self.spread)}: give at least one ratio, each above zero"
            )

    @classmethod
    def of_times(cls, times: Mapping[int, Sequence[float]]) -> "LatencyCurve":
        """Returns the curve of measured times: {size: seconds of each batch}.

        A larger batch counts as no faster than a smaller one. All sizes share one spread, so that
        a few times per size are enough.
        """
        if not times:
            return cls([], [])
        medians = np.maximum.accumulate([statistics.median(each) for each in times.values()])
        ratios = np.concatenate(
            [np.divide(each, median) for each, median in zip(times.values(), medians, strict=True)]
        )
        ratios = np.minimum(ratios, MAX_SLOWDOWN)
        seconds = medians * ratios.mean()
        return cls(list(times), seconds.tolist(), (ratios / ratios.mean()).tolist())

    @property
    def largest(self) -> int:
        """Rows of the largest batch."""
        return self.sizes[-1]

    def seconds(self, rows: int) -> float:
        """Returns the mean seconds of a batch, padded to the next size.

        Raises:
            ValueError: the batch is empty or larger than `largest`.
        """
        if not 1 <= rows <= self.largest:
            raise ValueError(f"a batch of {rows} rows: the curve covers 1 to {self.largest}")
        return self.batch_seconds[int(np.searchsorted(self.sizes, rows))]

    def table(self) -> np.ndarray:
        """Returns the seconds of batches from 0 rows to `largest`, of shape `(largest + 1,)`."""
        places = np.searchsorted(self.sizes, np.arange(1, self.largest + 1))
        return np.concatenate([[0.0], np.asarray(self.batch_seconds)[places]])

    def capacity(self, max_batch: int) -> float:
        """Returns the highest throughput of batches up to `max_batch` rows, in rows per second."""
        rows = np.arange(1, min(max_batch, self.largest) + 1)
        return float(np.max(rows / self.table()[rows]))


def measure_curve(
    compute: Callable[[Arrays], Arrays],
    example: Arrays,
    sizes: Sequence[int],
    seconds: float = 4.0,
) -> LatencyCurve:
    """Returns the measured latency curve of a model, for ascending batch sizes.

    Each size is called twice before it is timed, as the first calls may compile it. The sizes take
    turns, so that a slow phase of the machine affects all of them. Batches hold copies of the first
    row of `example`. The total time is `seconds` after the first calls, but each size is timed at
    least three times.
    """
    batches = {size: repeat_first_row(example, size) for size in sizes}
    for batch in [*batches.values(), *batches.values()]:
        compute(batch)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    end = time.perf_counter() + seconds
    while needs_repetition(times, end):
        for size, batch in batches.items():
            began = time.perf_counter()
            compute(batch)
            times[size].append(time.perf_counter() - began)
    return LatencyCurve.of_times(times)


def needs_repetition(times: Mapping[int, Sequence[float]], end: float) -> bool:
    """Returns whether to repeat a measurement, until `time.perf_counter()` reaches `end`."""
    done = min(map(len, times.values()), default=_MAX_REPETITIONS)
    return done < 3 or (done < _MAX_REPETITIONS and time.perf_counter() < end)


def repeat_first_row(example: Arrays, size: int) -> Arrays:
    """Returns a batch of copies of the first row."""
    return {name: np.repeat(array[:1], size, axis=0) for name, array in example.items()}
