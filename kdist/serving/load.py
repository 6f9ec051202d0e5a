"""The load of a batcher, as it is just now: when requests come, how many are inside, how fast
batches are.

    load = Load(curve)
    load.arrived(); load.batch_done(rows=8, seconds=0.006, requests=8)    # under a microsecond each
    load.recent(10), load.kind, load.curve()
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kdist.serving.latency_curve import MOST_TIMES_SLOWER, LatencyCurve

_KEPT_ARRIVALS = 4096
_KEPT_BATCHES, _BATCHES_SECONDS = 256, 3.0
# When a batch ends, in an open load, the number inside varies by the requests that came while it
# was computed, if by nothing else: by as much as their mean, as Poisson's numbers do. Of clients
# that each wait for their answer, the number is fixed.
_CLOSED_SPREAD = 0.3
_LATE_SHARE = 0.1  # of batches, that some clients are late for: those with the fewest inside
_FEW_BATCHES = 16
_ENOUGH_SHARES = 64  # of which batches' times vary
# How much the last batch counts for its size, and as how many batches of a size those of all
# others do.
_NEW_SHARE, _OTHERS = 0.05, 20


@dataclasses.dataclass(frozen=True)
class Totals:
    """Counts since the beginning; the difference of two says what was between.

    Attributes:
        seconds: of the clock.
        waited: seconds that requests have been inside, all together.
        answered: requests.
        rows: of batches.
        batches: that have ended.
        busy: seconds of batches.
    """

    seconds: float
    waited: float
    answered: int
    rows: int
    batches: int
    busy: float

    def since(self, earlier: "Totals") -> "Totals":
        """What was between the two."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
        return Totals(*(now - then for now, then in pairs))


class _End(NamedTuple):
    """Of a batch."""

    when: float
    inside: int  # with its own
    requests: int
    seconds: float


class Load:
    """Notes what happens, in the thread of the event loop.

    Args:
        curve: as measured before; corrected by what batches take.
        clock: seconds. Defaults to `time.monotonic`.

    Attributes:
        inside: requests that are not answered yet.
        refused_at: when a request was refused for the last time; minus infinity if never.
    """

    def __init__(self, curve: LatencyCurve, clock: Callable[[], float] = time.monotonic):
        self.inside, self.refused_at = 0, float("-inf")
        self._curve, self._clock = curve, clock
        self._times: collections.deque[float] = collections.deque(maxlen=_KEPT_ARRIVALS)
        self._ends: collections.deque[_End] = collections.deque(maxlen=_KEPT_BATCHES)
        self._began = self._last = clock()
        self._waited = self._busy = 0.0
        self._answered = self._rows = self._batches = 0
        self._sizes, self._known = np.asarray(curve.sizes), np.asarray(curve.batch_seconds)
        self._slower = np.ones(len(self._sizes))  # than the curve says
        self._seen = np.zeros(len(self._sizes))
        self._all_slower = 1.0
        self._shares: collections.deque[float] = collections.deque(maxlen=_KEPT_BATCHES)

    def arrived(self, rows: int = 1):
        """A request of so many rows is taken."""
        now = self._passed()
        self.inside += 1
        if rows == 1:
            self._times.append(now)
        else:
            self._times.extend([now] * rows)

    def refused(self, rows: int = 1):
        """A request is not taken, as too much waits."""
        self.refused_at = self._clock()
        self._times.extend([self.refused_at] * rows)

    def left(self, requests: int = 1):
        """Requests that were taken are not computed: nobody waits for them any more."""
        self._passed()
        self.inside = max(0, self.inside - requests)

    def batch_done(self, rows: int, seconds: float, requests: int | None = None):
        """A batch has ended.

        Args:
            rows: that were asked for, without those that fill it up.
            seconds: that the device took.
            requests: in it. Defaults to one for each row.
        """
        now = self._passed()
        requests = rows if requests is None else requests
        self._ends.append(_End(now, self.inside, requests, seconds))
        self.inside = max(0, self.inside - requests)
        self._answered += requests
        self._rows += rows
        self._batches += 1
        self._busy += seconds
        self._correct(min(int(self._sizes.searchsorted(rows)), len(self._sizes) - 1), seconds)

    def totals(self) -> Totals:
        """Up to now."""
        now = self._passed()
        return Totals(now, self._waited, self._answered, self._rows, self._batches, self._busy)

    def recent(self, seconds: float) -> np.ndarray:
        """When the rows of the last so many seconds came, the latest few thousand: shape (N,)."""
        times = np.array(self._times)
        return times[times >= self._clock() - seconds]

    def rate(self, seconds: float) -> float:
        """Rows a second, in the last so many seconds or as far back as it is known."""
        now = self._clock()
        whole = len(self._times) == _KEPT_ARRIVALS
        since = max(now - seconds, self._times[0] if whole else self._began)
        return len(self.recent(seconds)) / max(now - since, 1e-9)

    @property
    def kind(self) -> str:
        """`"alone"`: never more than one inside; `"closed"`: a fixed number of clients, each of
        which waits for its answer; `"open"`: all else; `"new"`: not known yet."""
        if len(self._ends) < _FEW_BATCHES:
            return "new"
        ends = self._last_ends()
        inside = np.sort([end.inside for end in ends])
        if inside[-1] <= 1:
            return "alone"
        a_second = sum(end.requests for end in ends) / max(ends[-1].when - ends[0].when, 1e-9)
        meanwhile = a_second * np.mean([end.seconds for end in ends])
        usual = inside[int(_LATE_SHARE * len(inside)) :]
        return "closed" if usual.var() < _CLOSED_SPREAD * meanwhile else "open"

    @property
    def clients(self) -> int:
        """Requests inside when a batch ended, the most of the last batches."""
        return max((end.inside for end in self._last_ends()), default=0)

    def _last_ends(self):
        """Of the last seconds, or the last few if that is longer."""
        since = self._clock() - _BATCHES_SECONDS
        found = [end for end in self._ends if end.when >= since]
        return found if len(found) >= _FEW_BATCHES else list(self._ends)[-_FEW_BATCHES:]

    def curve(self) -> LatencyCurve:
        """As batches are just now; sizes that did not come are as much slower as the others."""
        weight = np.minimum(self._seen, 5 * _OTHERS)
        slower = (weight * self._slower + _OTHERS * self._all_slower) / (weight + _OTHERS)
        seconds = np.maximum.accumulate(self._known * slower).tolist()
        spread = self._curve.spread
        if len(self._shares) >= _ENOUGH_SHARES:
            spread = (np.array(self._shares) / np.mean(self._shares)).tolist()
        return LatencyCurve(self._curve.sizes, seconds, spread)

    def _passed(self):
        now = self._clock()
        self._waited += self.inside * (now - self._last)
        self._last = now
        return now

    def _correct(self, place, seconds):
        slower = min(seconds / self._known[place], MOST_TIMES_SLOWER * self._all_slower)
        if self._seen[place] >= _FEW_BATCHES:  # before, the mean is not known
            self._shares.append(slower / self._slower[place])
        self._seen[place] += 1
        share = max(_NEW_SHARE, 1 / self._seen[place])
        self._slower[place] += share * (slower - self._slower[place])
        self._all_slower += _NEW_SHARE * (slower - self._all_slower)
