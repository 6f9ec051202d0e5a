"""Settings of batches that follow the load while serving.

    tuner = Tuner(curve, Objective("latency"))
    task = asyncio.create_task(tuner.run(apply))    # apply(settings): batcher.settings = settings
    tuner.load.arrived(); tuner.load.batch_done(rows, seconds)              # told by the batcher
    task.cancel()

Of an open load, whose requests come when they like, the recent arrivals are simulated. Clients
that each wait for their answer come the later the later they are answered, so that replaying their
requests says nothing: for a number of these, settings are tried for moments
(`kdist.serving.trials`). One client alone has nobody to wait for. Imports no TensorFlow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from kdist.serving.arrivals import poisson
from kdist.serving.choosing_apart import choose_apart
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.load import Load
from kdist.serving.settings import BatchSettings, Objective
from kdist.serving.trials import Trials
from kdist.serving.tuning import Choice

_LOOK_SECONDS = 1.0
_WINDOW_SECONDS, _NEW_SECONDS = 10.0, 3.0
_MOST_ARRIVALS = 2000
_ENOUGH_ARRIVALS = 300  # with fewer, as many as the former come at their rate, Poisson's
_FEW_ARRIVALS = 8  # with fewer, nothing is chosen
# What is a change: of the rate, beyond what chance does; of the time of a batch.
_OTHER_RATE, _OTHER_TIME, _DEVIATIONS = 1.25, 1.25, 4.0
_AGAIN_SECONDS = 60.0
_BETTER = 0.03  # as a share of the score: less is not worth a change


class Tuner:
    """Chooses settings again when the load has changed.

    Args:
        curve: as measured before the first request.
        objective: what for. Defaults to the least mean latency.
        max_batches: largest batches to choose from. Defaults to the sizes of the curve.
        on_message: is told once what cannot be served, and why, and when it can be again.
        choose: as `choose_apart`.
        clock: seconds.
        sleep: as `asyncio.sleep`.

    Attributes:
        load: has to be told what happens.
        settings: as they are now; no timeout at first, and the largest batches.
        reason: why the load is not served as asked, "over capacity" for one; empty if it is.
    """

    def __init__(
        self,
        curve: LatencyCurve,
        objective: Objective | None = None,
        max_batches: Sequence[int] | None = None,
        on_message: Callable[[str], None] = print,
        *,
        choose: Callable[..., Awaitable[Choice]] = choose_apart,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.load, self.reason = Load(curve, clock), ""
        self.max_batches = sorted(curve.sizes if max_batches is None else max_batches)
        self.settings = self._widest()
        self._objective = objective or Objective()
        self._tell, self._choose, self._clock, self._sleep = on_message, choose, clock, sleep
        self._trials = Trials(self.load, self._objective, sleep)
        self._served: tuple[float, float, float] | None = None  # rate, slowness, when chosen
        self._kind, self._next_trial, self._pause, self._clients = "new", 0.0, 0.0, 0

    async def run(self, apply: Callable[[BatchSettings], None]):
        """Looks at the load about once a second, until it is cancelled.

        Args:
            apply: is given settings, at first and whenever they change.
        """
        apply(self.settings)
        while True:
            await self._sleep(_LOOK_SECONDS)
            try:
                await self.step(apply)
            except (OSError, RuntimeError) as error:  # serving goes on as it is
                self._say(str(error))

    async def step(self, apply: Callable[[BatchSettings], None]):
        """Looks at the load once, and changes the settings if others are better."""
        kind = "open" if self._refusing() else self.load.kind
        if kind != self._kind:  # looked at again, before anything is done about it
            self._kind, self._served = kind, None
            if kind != "alone":
                return
        if kind == "alone" or len(self.load.recent(_WINDOW_SECONDS)) < _FEW_ARRIVALS:
            self._say("")
            self._change(self._widest(), apply)
        elif kind == "closed":
            await self._try_out(apply)
        elif kind == "open" and (self._refusing() or self._has_changed()):
            await self._choose_anew(apply)

    def _refusing(self):
        return self._clock() - self.load.refused_at < 2 * _LOOK_SECONDS

    def _has_changed(self):
        if self._served is None:
            return True
        rate, seconds, when = self._served
        new = self.load.rate(_NEW_SECONDS)
        by_chance = _DEVIATIONS * (max(rate, new) / _NEW_SECONDS) ** 0.5
        is_other = _ratio(new, rate) > _OTHER_RATE and abs(new - rate) > by_chance
        slower = _ratio(self._batch_seconds(), seconds) > _OTHER_TIME
        return is_other or slower or self._clock() - when > _AGAIN_SECONDS

    async def _choose_anew(self, apply):
        arrivals = self._arrivals()
        if len(arrivals) < _FEW_ARRIVALS:
            return
        curve = self.load.curve()
        self._served = self.load.rate(_NEW_SECONDS), self._batch_seconds(), self._clock()
        choice = await self._choose(curve, arrivals, self._objective, max_batches=self.max_batches)
        self._say(choice.reason)
        if choice.best is None:
            self._change(self._least_bad(choice), apply)
        elif self._is_better(choice):
            self._change(choice.best.settings, apply)

    def _arrivals(self):
        """The recent ones; if it came otherwise before, only the last seconds are."""
        new, rate = self.load.rate(_NEW_SECONDS), self.load.rate(_WINDOW_SECONDS)
        is_new = _ratio(new, rate) > _OTHER_RATE
        found = self.load.recent(_NEW_SECONDS if is_new else _WINDOW_SECONDS)[-_MOST_ARRIVALS:]
        if _FEW_ARRIVALS <= len(found) < _ENOUGH_ARRIVALS:
            return poisson(max(new, 1e-3), _MOST_ARRIVALS)
        return found

    def _is_better(self, choice):
        now = [each.score for each in choice.tried if each.settings == self.settings]
        if not now or np.isinf(now[0]):  # a bound is broken, or too much comes
            return True
        return choice.best.score < now[0] - _BETTER * abs(now[0])

    def _least_bad(self, choice):
        served = [each for each in choice.tried if not each.outcome.over_capacity]
        if not served:
            return self._widest()
        return min(served, key=lambda each: each.outcome.p99_seconds).settings

    async def _try_out(self, apply):
        if self._trials.are_others(self._clients):
            self._clients, self._pause, self._next_trial = self.load.clients, 0.0, self._clock()
            self._change(self._widest(), apply)
        if self._clock() < self._next_trial:
            return
        best = await self._trials.best(self.settings, self._widest(), apply)
        self._say("")
        self._pause = self._trials.pause(self._pause, best == self.settings)
        self._next_trial = self._clock() + self._pause
        self.settings = best
        apply(best)

    def _widest(self):
        """No timeout, and the largest batches that serve more than smaller ones do."""
        return BatchSettings(0.0, max(self.max_batches, key=self.load.curve().capacity))

    def _batch_seconds(self):
        return float(np.mean(self.load.curve().batch_seconds))

    def _change(self, settings, apply):
        if settings != self.settings:
            self.settings = settings
            apply(settings)

    def _say(self, reason):
        """Once for each kind of reason: the figures in it change with every look."""
        kind, before = reason.partition(":")[0].split(" within")[0], self.reason
        self.reason = reason
        if kind != before.partition(":")[0].split(" within")[0]:
            self._tell(reason or "the load is served as asked again")


def _ratio(one, other):
    low, high = sorted((one, other))
    return high / low if low > 0 else float("inf")
