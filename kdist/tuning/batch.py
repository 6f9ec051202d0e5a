"""Finds the largest local batch that fits, and the smallest one that is nearly as fast.

    search = BatchSearch(first=64, limit_bytes=16e9, max_batch=4096)
    while (local_batch := search.next_batch()) is not None:
        search.add(measure(local_batch))  # returns a `BatchTrial`
    search.largest, search.knee()

Memory and the time of a step are both nearly linear in the batch, so that few trials suffice.
Imports no TensorFlow.
"""

import dataclasses

import numpy as np

MAX_TRIALS = 5
# Fraction of the memory that a batch may use. Later steps may need a little more than the first.
_USABLE = 0.95
# A predicted batch is tried only up to this many times the largest one that has been tried.
_MAX_GROWTH, _FIRST_GROWTH = 16, 4
# The search ends if the largest batch could be larger by less than this ratio.
_CLOSE = 1.15
# Batches are multiples of it, which suits the tiles of GPUs and vector units.
_MULTIPLE = 8
_NEARLY_AS_FAST = 0.9


@dataclasses.dataclass(frozen=True)
class BatchTrial:
    """Measurement of one local batch."""

    local_batch: int  # examples per replica and step
    fits: bool
    step_seconds: float = float("nan")
    memory_bytes: float = float("nan")  # of one device, or of the process on CPUs
    reason: str = ""  # why it does not fit


class BatchSearch:
    """Search for the largest local batch, by at most five trials.

    Args:
        first: local batch to try first.
        limit_bytes: memory of one device, or that the process may use on CPUs; None if unknown.
        max_batch: largest batch to try.

    Attributes:
        max_batch: as given; may be changed when the number of examples is known.
        trials: trials so far, in order.
    """

    def __init__(self, first: int, limit_bytes: float | None, max_batch: int):
        self._first = min(first, max_batch)
        self._limit, self.max_batch = limit_bytes, max_batch
        self.trials: list[BatchTrial] = []

    def add(self, trial: BatchTrial):
        """Adds the trial of the batch that `next_batch` returned."""
        self.trials.append(trial)

    @property
    def fitting(self) -> list[BatchTrial]:
        """Trials that fit, by ascending batch."""
        fitting = [trial for trial in self.trials if trial.fits]
        return sorted(fitting, key=lambda trial: trial.local_batch)

    @property
    def largest(self) -> int | None:
        """Largest local batch that fits; None if none does."""
        return self.fitting[-1].local_batch if self.fitting else None

    @property
    def is_limited(self) -> bool:
        """True if a larger batch was too large, or would be; False if none was tried."""
        return any(not trial.fits for trial in self.trials) or (
            self._predicted() < _CLOSE * (self.largest or 0)
        )

    def next_batch(self) -> int | None:
        """Returns the next local batch to try; None if the search has ended."""
        if not self.trials:
            return self._first
        if len(self.trials) == MAX_TRIALS:
            return None
        too_large = min((each.local_batch for each in self.trials if not each.fits), default=0)
        if self.largest is None:
            return None if too_large == 1 else max(1, too_large // _FIRST_GROWTH)
        growth = _FIRST_GROWTH if len(self.fitting) == 1 else _MAX_GROWTH
        target = min(growth * self.largest, self._predicted(), self.max_batch)
        if too_large:
            target = min(target, (self.largest + too_large) / 2)
        batch = self.max_batch if target >= self.max_batch else _rounded(target)
        is_worth_it = batch >= _CLOSE * self.largest or batch == self.max_batch > self.largest
        return batch if is_worth_it else None

    def _predicted(self):
        """Returns the batch that would use the usable memory, by the line through the trials."""
        if self._limit is None or len(self.fitting) < 2:
            return float("inf")
        sizes = [trial.local_batch for trial in self.fitting]
        slope, constant = np.polyfit(sizes, [trial.memory_bytes for trial in self.fitting], 1)
        return (_USABLE * self._limit - constant) / slope if slope > 0 else float("inf")

    def knee(self) -> int | None:
        """Returns the smallest batch with 90 % of the highest rate; None if nothing fits.

        A step takes `c + a * batch` seconds, as the number of its launches does not depend on the
        batch. The highest rate is then `1 / a` examples per second, and a batch of `9 * c / a` has
        nine tenths of it. The result is at most the largest batch that fits.
        """
        fitting = self.fitting
        if len(fitting) < 2:
            return self.largest
        sizes = np.array([trial.local_batch for trial in fitting], float)
        seconds = np.array([trial.step_seconds for trial in fitting])
        # Relative errors count, since short steps are measured as exactly as long ones.
        slope, constant = np.polyfit(sizes, seconds, 1, w=1 / seconds)
        if slope <= 0:
            return self.largest
        knee = _NEARLY_AS_FAST / (1 - _NEARLY_AS_FAST) * max(constant, 0.0) / slope
        knee = max(knee, 1.0)
        rounded = knee if knee < _MULTIPLE else _MULTIPLE * np.ceil(knee / _MULTIPLE)
        return int(min(np.ceil(rounded), fitting[-1].local_batch))


def _rounded(batch):
    batch = int(batch)
    return batch if batch < _MULTIPLE else batch // _MULTIPLE * _MULTIPLE
