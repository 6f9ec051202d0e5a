"""Current load of a batcher: arrivals, requests in flight, and batch times.

Recording an event takes less than a microsecond.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kdist.serving.policy.latency_curve import MAX_SLOWDOWN, LatencyCurve

_KEPT_ARRIVALS = 4096
_KEPT_BATCHES, _BATCHES_SECONDS = 256, 3.0
# In an open loop, the number of requests in flight at the end of a batch varies at least by the
# arrivals during the batch, whose variance is their mean (Poisson). In a closed loop, with clients
# that wait for their response, the number is constant.
_MAX_CLOSED_VARIANCE_RATIO = 0.3
# Fraction of batches to ignore: those with the fewest requests in flight, due to late clients.
_LATE_FRACTION = 0.1
_MIN_BATCHES = 16
_MIN_RATIOS = 64  # needed to estimate the spread of batch times
# Weight of a new batch in the moving average, and the number of batches that the average over all
# sizes counts as.
_NEW_WEIGHT, _PRIOR_BATCHES = 0.05, 20


@dataclasses.dataclass(frozen=True)
class LoadTotals:
    """Counters since the start. The difference of two describes the time between them."""

    seconds: float  # time of the clock
    waited: float  # total seconds that requests have been in flight
    answered: int  # requests
    rows: int  # in batches
    batches: int  # that have ended
    busy: float  # total seconds of batches

    def since(self, earlier: "LoadTotals") -> "LoadTotals":
        """Returns the difference to earlier totals."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
        return LoadTotals(*(now - then for now, then in pairs))


class _BatchEnd(NamedTuple):
    """End of a batch."""

    when: float
    in_flight: int  # including the requests of the batch
    requests: int
    seconds: float


class LoadMonitor:
    """Records the load of a batcher, in the thread of the event loop.

    The initial latency curve is corrected by the measured times of batches, and by the time that
    they wait for other models on the same device. `in_flight` counts
    requests that are not answered yet; `rejected_at` is the time of the last rejected request, or
    minus infinity.
    """

    def __init__(self, curve: LatencyCurve, clock: Callable[[], float] = time.monotonic):
        self.in_flight, self.rejected_at = 0, float("-inf")
        self._curve, self._clock = curve, clock
        self._arrivals: collections.deque[float] = collections.deque(maxlen=_KEPT_ARRIVALS)
        self._ends: collections.deque[_BatchEnd] = collections.deque(maxlen=_KEPT_BATCHES)
        self._began = self._last = clock()
        self._waited = self._busy = 0.0
        self._answered = self._rows = self._batches = 0
        self._sizes, self._initial = np.asarray(curve.sizes), np.asarray(curve.batch_seconds)
        self._slowdowns = np.ones(len(self._sizes))  # measured / initial time
        self._counts = np.zeros(len(self._sizes))
        self._mean_slowdown = 1.0
        self._ratios: collections.deque[float] = collections.deque(maxlen=_KEPT_BATCHES)

    def record_arrival(self, rows: int = 1, requests: int = 1):
        """Records that a request was accepted, or a part of one that counts as 0 `requests`."""
        now = self._advance()
        self.in_flight += requests
        if rows == 1:
            self._arrivals.append(now)
        else:
            self._arrivals.extend([now] * rows)

    def record_rejection(self, rows: int = 1):
        """Records that a request was rejected because the queue is full."""
        self.rejected_at = self._clock()
        self._arrivals.extend([self.rejected_at] * rows)

    def record_departure(self, requests: int = 1):
        """Records that an accepted request was canceled or failed, or a part that counts as 0."""
        self._advance()
        self.in_flight = max(0, self.in_flight - requests)

    def record_batch(
        self, rows: int, seconds: float, requests: int | None = None, waited: float = 0.0
    ):
        """Records a batch of `rows` without padding that a device computed for `seconds`.

        The number of `requests` defaults to one per row. The batch `waited` seconds for a device
        that other models used: to this model, the device is slower by that.
        """
        now = self._advance()
        requests = rows if requests is None else requests
        self._ends.append(_BatchEnd(now, self.in_flight, requests, seconds))
        self.in_flight = max(0, self.in_flight - requests)
        self._answered += requests
        self._rows += rows
        self._batches += 1
        self._busy += seconds
        place = min(int(self._sizes.searchsorted(rows)), len(self._sizes) - 1)
        self._correct(place, seconds + waited)

    def totals(self) -> LoadTotals:
        """Returns the totals up to now."""
        now = self._advance()
        return LoadTotals(now, self._waited, self._answered, self._rows, self._batches, self._busy)

    def recent(self, seconds: float) -> np.ndarray:
        """Returns arrival times of rows in the last seconds, at most 4,096, of shape `(N,)`."""
        times = np.array(self._arrivals)
        return times[times >= self._clock() - seconds]

    def rate(self, seconds: float) -> float:
        """Returns rows per second over the last seconds, or over the recorded time if shorter."""
        now = self._clock()
        is_full = len(self._arrivals) == _KEPT_ARRIVALS
        since = max(now - seconds, self._arrivals[0] if is_full else self._began)
        return len(self.recent(seconds)) / max(now - since, 1e-9)

    @property
    def kind(self) -> str:
        """Kind of load: "alone", "closed", "open", or "new".

        "alone" has at most one request in flight. "closed" has a constant number of clients, each
        of which waits for its response. "open" is any other load; "new" is not known yet.
        """
        if len(self._ends) < _MIN_BATCHES:
            return "new"
        ends = self._recent_ends()
        in_flight = np.sort([end.in_flight for end in ends])
        if in_flight[-1] <= 1:
            return "alone"
        span = max(ends[-1].when - ends[0].when, 1e-9)
        answered_per_second = sum(end.requests for end in ends) / span
        arrivals_per_batch = answered_per_second * np.mean([end.seconds for end in ends])
        usual = in_flight[int(_LATE_FRACTION * len(in_flight)) :]
        return "closed" if usual.var() < _MAX_CLOSED_VARIANCE_RATIO * arrivals_per_batch else "open"

    @property
    def clients(self) -> int:
        """Largest number of requests in flight at the end of a recent batch."""
        return max((end.in_flight for end in self._recent_ends()), default=0)

    def _recent_ends(self):
        """Returns the batches of the last seconds, but at least the last 16."""
        since = self._clock() - _BATCHES_SECONDS
        recent = [end for end in self._ends if end.when >= since]
        return recent if len(recent) >= _MIN_BATCHES else list(self._ends)[-_MIN_BATCHES:]

    def curve(self) -> LatencyCurve:
        """Returns the current latency curve. Sizes without batches get the mean slowdown."""
        weight = np.minimum(self._counts, 5 * _PRIOR_BATCHES)
        weighted = weight * self._slowdowns + _PRIOR_BATCHES * self._mean_slowdown
        slowdowns = weighted / (weight + _PRIOR_BATCHES)
        seconds = np.maximum.accumulate(self._initial * slowdowns).tolist()
        spread = self._curve.spread
        if len(self._ratios) >= _MIN_RATIOS:
            spread = (np.array(self._ratios) / np.mean(self._ratios)).tolist()
        return LatencyCurve(self._curve.sizes, seconds, spread)

    def _advance(self):
        now = self._clock()
        self._waited += self.in_flight * (now - self._last)
        self._last = now
        return now

    def _correct(self, place, seconds):
        slowdown = min(seconds / self._initial[place], MAX_SLOWDOWN * self._mean_slowdown)
        if self._counts[place] >= _MIN_BATCHES:  # before, the mean is not known
            self._ratios.append(slowdown / self._slowdowns[place])
        self._counts[place] += 1
        weight = max(_NEW_WEIGHT, 1 / self._counts[place])
        self._slowdowns[place] += weight * (slowdown - self._slowdowns[place])
        self._mean_slowdown += _NEW_WEIGHT * (slowdown - self._mean_slowdown)
