"""Compares the tuner with the best settings of a measured sweep, after ten times the load.

There are two objectives: the lowest mean latency, and the lowest device time within a bound on the
99th percentile. The bound is chosen by simulation such that the best settings of the former load
are wrong for the new one.
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.serving_devices import SIZES, Timed, notify_tuner
from kdist.serving import BatchSettings, LatencyCurve, Objective, choose, poisson
from kdist.serving.engine.batcher import Batcher
from kdist.serving.policy.adaptation import Tuner
from kdist.serving.policy.selection import TIMEOUTS_MS
from kdist.serving.tune import probe

TIMES_MORE = 10
_BEFORE_SECONDS, _AFTER_SECONDS = 12.0, 20.0
_SIMULATED = 5000
_WITHIN = 1.1  # tolerance, relative to the best score and to the bound
# Fraction of the bound that some settings must meet by simulation, as measurements deviate.
_SLACK = 0.85
# Bounds to try, relative to the time of the largest batch.
_BOUNDS = np.arange(1.3, 4.0, 0.05)


@dataclasses.dataclass(frozen=True)
class Found:
    """Measured result of settings at the new load.

    Attributes:
        device_share: fraction of the time that the device computes.
        mean_seconds: mean latency.
        p99_seconds: 99th percentile of the latency.
    """

    device_share: float
    mean_seconds: float
    p99_seconds: float

    def score(self, objective: Objective, room: float = 1.0) -> float:
        """Returns the objective's value; infinite if `room` times its bound is broken."""
        if objective.p99_seconds is not None and self.p99_seconds > room * objective.p99_seconds:
            return np.inf
        return self.mean_seconds if objective.aim == "latency" else self.device_share

    def __str__(self):
        if self == _OVER_CAPACITY:
            return "over capacity"
        mean, p99 = self.mean_seconds * 1e3, self.p99_seconds * 1e3
        return f"{self.device_share:.0%} of the device, mean {mean:.1f} ms, p99 {p99:.1f} ms"


_OVER_CAPACITY = Found(np.inf, np.inf, np.inf)


class Retuning:
    """Experiment that multiplies the load of a device by ten.

    Args:
        compute: function of named arrays.
        example: named arrays with one row.
        curve: latency curve of the device.
        share: new load, as a fraction of the device's capacity.
        seconds: seconds for each setting of the sweep.
    """

    def __init__(self, compute: Timed, example, curve: LatencyCurve, share: float, seconds: float):
        self._compute, self._example, self._curve = compute, example, curve
        self._rate = share * curve.capacity(curve.largest)
        self._share, self._seconds = share, seconds

    async def run(self) -> str:
        """Returns all results as text."""
        objectives, bound = {"the least mean latency": Objective()}, self.bound()
        if bound is not None:
            said = f"the device's time, within {bound * 1e3:.0f} ms"
            objectives[said] = Objective("device_time", bound)
        spans = [await self._tuned(objective) for objective in objectives.values()]
        found = await self._sweep()
        verdicts = [
            f"- For {said}: {verdict(span, found, objective)}"
            for span, (said, objective) in zip(spans, objectives.items(), strict=True)
        ]
        head = f"Load {self._share / TIMES_MORE:.0%}, then {self._share:.0%} of capacity:"
        return "\n".join([head, "", *verdicts])

    def bound(self) -> float | None:
        """Returns the bound for which the former settings are worst at the new load.

        None if they suit both loads under any bound.
        """
        before, after = (
            _outcomes(self._curve, rate) for rate in (self._rate / TIMES_MORE, self._rate)
        )
        worse = {}
        for bound in _BOUNDS * self._curve.batch_seconds[-1]:
            objective = Objective("device_time", bound)
            former, best = _best(before, objective), _best(after, objective, _SLACK)
            if former is not None and best is not None:
                worse[bound] = _times_worse(after, former, best, objective)
        bound = max(worse, key=lambda each: worse[each], default=None)
        return bound if bound and worse[bound] > _WITHIN else None

    async def _tuned(self, objective):
        """Returns [(seconds since the load changed, settings)]; the first were set before."""
        tuner = Tuner(self._curve, objective, on_message=lambda _: None)
        loop = asyncio.get_running_loop()
        batcher = Batcher(
            notify_tuner(self._compute, tuner, loop), tuner.settings, max_waiting=10**6
        )
        history = []

        def apply(settings):
            batcher.settings = settings
            history.append((loop.time(), settings))

        async def call():
            tuner.load.record_arrival()
            return await batcher(self._example)

        task = asyncio.create_task(tuner.run(apply))
        low = self._rate / TIMES_MORE
        await probe(call, poisson(low, int(low * _BEFORE_SECONDS), seed=2))
        began = loop.time()
        await probe(call, poisson(self._rate, int(self._rate * _AFTER_SECONDS), seed=3))
        task.cancel()
        await batcher.close()
        return [(when - began, settings) for when, settings in history]

    async def _sweep(self):
        """Returns {settings: measurement} of the whole grid at the new load."""
        batcher = Batcher(self._compute, BatchSettings(), SIZES, max_waiting=10**6)
        arrivals = poisson(self._rate, int(self._rate * self._seconds), seed=4)
        found = {}
        for timeout in TIMEOUTS_MS:
            for rows in SIZES:
                if self._rate > 0.98 * self._curve.capacity(rows):
                    continue  # over capacity
                batcher.settings = BatchSettings(timeout * 1e-3, rows)
                self._compute.times.clear()
                measured = await probe(lambda: batcher(self._example), arrivals)
                busy = sum(map(sum, self._compute.times.values()))
                span = measured.sent[-1] + measured.latencies[-1]
                found[batcher.settings] = Found(
                    busy / span, measured.mean_seconds, measured.p99_seconds
                )
        await batcher.close()
        return found


def _outcomes(curve, rate):
    tried = choose(curve, poisson(rate, _SIMULATED), Objective("device_time")).tried
    return {
        each.settings: Found(
            each.outcome.device_share, each.outcome.mean_seconds, each.outcome.p99_seconds
        )
        for each in tried
        if not each.outcome.over_capacity
    }


def _best(found, objective, room=1.0):
    best = min(found, key=lambda each: found[each].score(objective, room))
    return best if np.isfinite(found[best].score(objective, room)) else None


def _times_worse(found, settings, best, objective):
    """Returns the ratio to the best score; a bound may be exceeded by a tenth."""
    mine = found.get(settings, _OVER_CAPACITY)
    return mine.score(objective, _WITHIN) / found[best].score(objective, _WITHIN)


def verdict(
    spans: Sequence[tuple[float, BatchSettings]],
    found: Mapping[BatchSettings, Found],
    objective: Objective,
) -> str:
    """Returns when the tuner's settings were within a tenth of the best, as text.

    Args:
        spans: (seconds since the load changed, settings from then on); the first were set before.
        found: settings -> measurement.
        objective: goal of the tuner.
    """
    best = _best(found, objective) or _best(found, objective, _WITHIN)
    if best is None:
        return "no setting was measured to keep the bound."
    bad = [_times_worse(found, settings, best, objective) > _WITHIN for _, settings in spans]
    last_bad = max((place for place, is_bad in enumerate(bad) if is_bad), default=-1)
    there = "never"
    if last_bad + 1 < len(spans):
        there = f"from {max(0.0, spans[last_bad + 1][0]):.1f} s on"
    former, now = [each for when, each in spans if when <= 0][-1], spans[-1][1]
    return (
        f"within a tenth of the best of {len(found)} measured settings {there}.\n"
        f"  - the former settings ({former}): {found.get(former, _OVER_CAPACITY)}\n"
        f"  - the tuner's ({now}): {found.get(now, _OVER_CAPACITY)}\n"
        f"  - the best measured ({best}): {found[best]}"
    )
