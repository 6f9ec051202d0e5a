"""Finds fast settings of a training, by measurements in turns with its present settings.

    knobs = [Knob("precision", "float32", ("mixed_bfloat16",), "the precision"), ...]
    search = SpeedSearch(knobs, measure, seconds=300)
    result = search.run()  # calls measure({"precision": "mixed_bfloat16"}) and measure({})
    result.settings, result.gain, result.interval

The speed of a shared machine drifts by tens of percent within minutes. Each measurement of a
candidate is therefore paired with one of the present settings right before or after it, and only
the ratio of both counts. Candidates change one knob first. Successive halving drops the slower half
of the values of each knob and measures the others more often. What is left is combined.
Imports no TensorFlow.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Settings = Mapping[str, Any]

# Pairs of measurements of a candidate in the first round, which doubles with every round. Also the
# smallest number that counts: a candidate that has begun gets them even if the time is over.
_FIRST_PAIRS = 3
# Pairs of the last measurement, whose result is reported; at least those of an interval.
_LAST_PAIRS, _MIN_INTERVAL_PAIRS = 12, 5
# Knobs that are faster by less than this ratio keep their value: noise is of this size.
_MIN_GAIN = 1.02
# Fractions of the time after which no single change, and no combination, is started.
_SINGLES_END, _COMBINATIONS_END = 0.6, 0.85
_CONFIDENCE, _RESAMPLES = 0.95, 2000
# Failure of a candidate whose turn did not come.
TIME_OVER = "the time was over"


class MeasurementError(RuntimeError):
    """A candidate cannot be measured, such as one that needs too much memory."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """One setting of a training, and the other values to try.

    Attributes:
        name: name of the setting.
        present: value of the training as it is.
        values: other values, the most promising first.
        changes: what a change of the value changes in the result of the training.
    """

    name: str
    present: Any
    values: tuple
    changes: str


@dataclasses.dataclass
class Comparison:
    """Settings that were compared with the present ones.

    Attributes:
        settings: values of the knobs that differ from the present ones.
        ratios: measured speeds, divided by that of the present settings next to each of them.
        failure: why it was not measured, or "".
    """

    settings: dict[str, Any]
    ratios: list[float] = dataclasses.field(default_factory=list)
    failure: str = ""

    @property
    def ratio(self) -> float:
        """Median of the ratios; NaN without any."""
        return float(np.median(self.ratios)) if self.ratios and not self.failure else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval of the ratio; None for less than five pairs."""
        return None if self.failure else median_interval(self.ratios)


@dataclasses.dataclass(frozen=True)
class SpeedResult:
    """Outcome of a search.

    Attributes:
        settings: values that differ from the present ones; empty if none is faster for certain.
        gain: speed of these settings, divided by that of the present ones.
        interval: its 95 % confidence interval; None if the settings are empty.
        candidates: everything that was tried, in order.
    """

    settings: dict[str, Any]
    gain: float
    interval: tuple[float, float] | None
    candidates: list[Comparison]


class SpeedSearch:
    """Search for the fastest values of several knobs within a time.

    Args:
        knobs: the knobs.
        measure: returns the examples per second with some settings, which are the values that
            differ from the present ones. It may raise `MeasurementError`.
        seconds: time for the search. A measurement in progress is finished.
        report: called with each candidate after each round. Defaults to nothing.
        clock: returns seconds. Defaults to `time.monotonic`.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        measure: Callable[[Settings], float],
        seconds: float,
        report: Callable[[Comparison], object] = lambda candidate: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._knobs, self._measure, self._report = knobs, measure, report
        self._seconds, self._clock, self._start = seconds, clock, clock()
        self.candidates: list[Comparison] = []

    def run(self) -> SpeedResult:
        """Returns the settings that are fastest, measured again after they were chosen.

        Raises:
            MeasurementError: The present settings cannot be measured.
        """
        self._measure({})  # fails before anything is compared
        best = self._combined(self._single_changes())
        if best is None:
            return SpeedResult({}, 1.0, None, self.candidates)
        # The best of several noisy measurements is too good on average, so they are not used again.
        final = Comparison(best.settings)
        self._compare(final, _LAST_PAIRS, end=1.0, at_least=_MIN_INTERVAL_PAIRS)
        self.candidates.append(final)
        if final.interval is None or final.interval[0] <= 1.0:
            return SpeedResult({}, 1.0, None, self.candidates)
        return SpeedResult(final.settings, final.ratio, final.interval, self.candidates)

    def _single_changes(self):
        """Returns the best candidate of each knob that is worth changing, the fastest first."""
        rivals = {
            knob.name: [Comparison({knob.name: value}) for value in knob.values]
            for knob in self._knobs
        }
        # The present value is a rival, too, and needs no measurement.
        for each in rivals.values():
            each.append(Comparison({}, [1.0]))
        pairs = _FIRST_PAIRS
        while any(len(each) > 1 for each in rivals.values()):
            for name, each in rivals.items():
                for candidate in each if len(each) > 1 else ():
                    if candidate.settings and not candidate.failure:
                        self._try(candidate, pairs, _SINGLES_END)
                each.sort(key=_speed, reverse=True)
                rivals[name] = each[: math.ceil(len(each) / 2)]
            pairs *= 2
        winners = [each[0] for each in rivals.values() if _speed(each[0]) >= _MIN_GAIN]
        return sorted(winners, key=_speed, reverse=True)

    def _combined(self, winners):
        """Returns the best combination of candidates of single knobs; None without any."""
        if len(winners) < 2:
            return winners[0] if winners else None
        best, *others = winners
        whole = Comparison(
            {name: value for each in winners for name, value in each.settings.items()}
        )
        self._try(whole, 2 * _FIRST_PAIRS, _COMBINATIONS_END)
        if _speed(whole) > _speed(best):
            return whole
        for each in others if len(winners) > 2 else ():  # some of them do not go together
            candidate = Comparison({**best.settings, **each.settings})
            self._try(candidate, 2 * _FIRST_PAIRS, _COMBINATIONS_END)
            best = max(best, candidate, key=_speed)
        return best

    def _try(self, candidate, pairs, end):
        if candidate not in self.candidates:
            self.candidates.append(candidate)
        self._compare(candidate, pairs, end)
        self._report(candidate)

    def _compare(self, candidate, pairs, end, at_least=0):
        """Measures pairs until a fraction of the time is over, and at least a number of them."""
        if candidate.failure:
            return
        for number in range(pairs):
            is_over = self._clock() - self._start > end * self._seconds
            has_begun = 0 < len(candidate.ratios) < _FIRST_PAIRS
            if is_over and number >= at_least and not has_begun:
                break
            try:
                ratio = paired_ratio(self._measure, candidate.settings, {}, number)
            except MeasurementError as error:
                candidate.failure = str(error)
                return
            candidate.ratios.append(ratio)
        if not candidate.ratios:
            candidate.failure = TIME_OVER


def paired_ratio(
    measure: Callable[[Settings], float], settings: Settings, reference: Settings, number: int
) -> float:
    """Returns the speed of some settings, divided by that of others, measured one after the other.

    Args:
        measure: returns the speed with some settings.
        settings: the settings.
        reference: those to compare with.
        number: number of the pair. The order alternates with it, so that a steady drift cancels.
    """
    order = [settings, reference] if number % 2 else [reference, settings]
    first, second = map(measure, order)
    return first / second if number % 2 else second / first


def _speed(candidate):
    """Returns the ratio of a candidate, for sorting: 0 if it failed."""
    return 0.0 if math.isnan(candidate.ratio) else candidate.ratio


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % bootstrap interval of the median of values; None for less than five.

    Example:

        >>> low, high = median_interval([1.1, 1.2, 1.3, 1.25, 1.15, 1.2])
        >>> 1.1 <= low <= 1.2 <= high <= 1.3
        True
    """
    if len(values) < _MIN_INTERVAL_PAIRS:
        return None
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(np.asarray(values), (_RESAMPLES, len(values))), axis=1)
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(medians, [tail, 100 - tail])
    return float(low), float(high)
