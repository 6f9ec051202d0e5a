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

import numpy as np

from kdist.serving.latency_curve import LatencyCurve

_KEPT_ARRIVALS = 4096
_KEPT_BATCHES, _BATCHES_SECONDS = 256, 3.0
# Requests inside vary, in an open load, as Poisson's numbers do: by as much as their mean. Of
# clients that each wait for their answer, the number is fixed.
_CLOSED_SPREAD = 0.25
_FEW_BATCHES = 16
# How much the last batch counts for its size, and as how many batches of a size those of all
# others do.
_NEW_SHARE, _OTHERS = 0.05, 20
_MOST_TIMES_SLOWER = 4.0  # what is more was compiled, or the process stood still


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
        self._insides: collections.deque[tuple[float, int]] = collections.deque(
            maxlen=_KEPT_BATCHES
        )
        self._began = self._last = clock()
        self._waited = self._busy = 0.0
        self._answered = self._rows = self._batches = 0
        self._sizes, self._known = np.asarray(curve.sizes), np.asarray(curve.batch_seconds)
        self._slower = np.ones(len(self._sizes))  # than the curve says
        self._seen = np.zeros(len(self._sizes))
        self._all_slower = 1.0

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
        self._insides.append((now, self.inside))
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
        if len(self._insides) < _FEW_BATCHES:
            return "new"
        others = self._last_insides() - 1
        if others.max() <= 0:
            return "alone"
        return "closed" if others.var() < _CLOSED_SPREAD * others.mean() else "open"

    @property
    def clients(self) -> int:
        """Requests inside when a batch ended, the most of the last batches."""
        return int(self._last_insides().max(initial=0))

    def _last_insides(self):
        """Of the last seconds, or of the last few batches if that is longer."""
        since = self._clock() - _BATCHES_SECONDS
        found = [inside for when, inside in self._insides if when >= since]
        if len(found) < _FEW_BATCHES:
            found = [inside for _, inside in self._insides][-_FEW_BATCHES:]
        return np.array(found, int)

    def curve(self) -> LatencyCurve:
        """As batches are just now; sizes that did not come are as much slower as the others."""
        weight = np.minimum(self._seen, 5 * _OTHERS)
        slower = (weight * self._slower + _OTHERS * self._all_slower) / (weight + _OTHERS)
        return LatencyCurve(self._curve.sizes, np.maximum.accumulate(self._known * slower).tolist())

    def _passed(self):
        now = self._clock()
        self._waited += self.inside * (now - self._last)
        self._last = now
        return now

    def _correct(self, place, seconds):
        slower = min(seconds / self._known[place], _MOST_TIMES_SLOWER * self._all_slower)
        self._seen[place] += 1
        share = max(_NEW_SHARE, 1 / self._seen[place])
        self._slower[place] += share * (slower - self._slower[place])
        self._all_slower += _NEW_SHARE * (slower - self._all_slower)
