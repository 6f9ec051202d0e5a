"""The tuner at ten times the load: its settings, beside the best of a measured sweep of all.

The aim is the least share of the device's time within a bound on the 99th percentile. The bound is
one for which, by simulation, the best settings of the former load would be wrong for the new one.
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.serving_devices import SIZES, Timed, told
from kdist.serving import BatchSettings, LatencyCurve, Objective, choose, poisson
from kdist.serving.adapting import Tuner
from kdist.serving.batcher import Batcher
from kdist.serving.probing import probe
from kdist.serving.tuning import TIMEOUTS_MS

TIMES_MORE = 10
_BEFORE_SECONDS, _AFTER_SECONDS = 12.0, 20.0
_SIMULATED = 5000
_WITHIN = 1.1  # of the best, and of the bound
# Of the bound: some setting has to keep it by so much, as what is measured is not quite the same.
_SLACK = 0.85
# Bounds that are tried, as times of the largest batch.
_BOUNDS = np.arange(1.3, 4.0, 0.05)


@dataclasses.dataclass(frozen=True)
class Found:
    """Settings at the new load.

    Attributes:
        device_share: of the time.
        p99_seconds: of latency.
    """

    device_share: float
    p99_seconds: float

    def score(self, bound: float) -> float:
        """The share of the device's time; infinite where the bound is broken."""
        return self.device_share if self.p99_seconds <= bound else np.inf

    def __str__(self):
        if self == _OVER_CAPACITY:
            return "over capacity"
        return f"{self.device_share:.0%} of the device, p99 {self.p99_seconds * 1e3:.0f} ms"


_OVER_CAPACITY = Found(np.inf, np.inf)


class Retuning:
    """Ten times the load comes to a device.

    Args:
        compute: of named arrays.
        example: named arrays of a row.
        curve: of the device.
        share: of the device's capacity: the new load.
        seconds: that each setting of the sweep is measured.
    """

    def __init__(self, compute: Timed, example, curve: LatencyCurve, share: float, seconds: float):
        self._compute, self._example, self._curve = compute, example, curve
        self._rate = share * curve.capacity(curve.largest)
        self._share, self._seconds = share, seconds

    async def run(self) -> str:
        """All of it, as text."""
        bound = self.bound()
        head = f"Load {self._share / TIMES_MORE:.0%}, then {self._share:.0%} of capacity"
        if bound is None:
            return f"{head}: no bound sets the two apart."
        spans = await self._tuned(Objective("device_time", bound))
        found = await self._sweep()
        return f"{head}; device's time within {bound * 1e3:.0f} ms. {verdict(spans, found, bound)}"

    def bound(self) -> float | None:
        """Seconds for which the former settings are the farthest from the best of the new load.

        None where they are good for both, whatever the bound.
        """
        before, after = (
            _outcomes(self._curve, rate) for rate in (self._rate / TIMES_MORE, self._rate)
        )
        worse = {}
        for bound in _BOUNDS * self._curve.batch_seconds[-1]:
            former, best = _best(before, bound), _best(after, _SLACK * bound)
            if former is not None and best is not None:
                worse[bound] = _times_worse(after, former, best, bound)
        bound = max(worse, key=lambda each: worse[each], default=None)
        return bound if bound and worse[bound] > _WITHIN else None

    async def _tuned(self, objective):
        """[(seconds since the new load came, settings)]; the first is what was set before."""
        tuner = Tuner(self._curve, objective, on_message=lambda _: None)
        loop = asyncio.get_running_loop()
        batcher = Batcher(told(self._compute, tuner, loop), tuner.settings, max_waiting=10**6)
        history = []

        def apply(settings):
            batcher.settings = settings
            history.append((loop.time(), settings))

        async def call():
            tuner.load.arrived()
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
        """{settings: what was measured} of the whole grid at the new load."""
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
                found[batcher.settings] = Found(busy / span, measured.p99_seconds)
        await batcher.close()
        return found


def _outcomes(curve, rate):
    tried = choose(curve, poisson(rate, _SIMULATED), Objective("device_time")).tried
    return {
        each.settings: Found(each.outcome.device_share, each.outcome.p99_seconds)
        for each in tried
        if not each.outcome.over_capacity
    }


def _best(found, bound):
    best = min(found, key=lambda each: found[each].score(bound))
    return best if np.isfinite(found[best].score(bound)) else None


def _times_worse(found, settings, best, bound):
    """Than the best; a bound that is broken by less than a tenth counts as kept."""
    mine = found.get(settings, _OVER_CAPACITY)
    return mine.score(_WITHIN * bound) / found[best].device_share


def verdict(
    spans: Sequence[tuple[float, BatchSettings]],
    found: Mapping[BatchSettings, Found],
    bound: float,
) -> str:
    """When the tuner's settings were within a tenth of the best, and what these are.

    Args:
        spans: seconds since the new load came, and settings from then on; the first of before.
        found: by measurement.
        bound: seconds that 99 of 100 requests may take.
    """
    best = _best(found, bound) or _best(found, _WITHIN * bound)
    if best is None:
        return "No setting was measured to keep the bound."
    bad = [_times_worse(found, settings, best, bound) > _WITHIN for _, settings in spans]
    last_bad = max((place for place, is_bad in enumerate(bad) if is_bad), default=-1)
    there = "never"
    if last_bad + 1 < len(spans):
        there = f"from {max(0.0, spans[last_bad + 1][0]):.1f} s on"
    former, now = [each for when, each in spans if when <= 0][-1], spans[-1][1]
    return (
        f"Within a tenth of the best of {len(found)} measured settings {there}.\n"
        f"  - the former settings ({former}): {found.get(former, _OVER_CAPACITY)}\n"
        f"  - the tuner's ({now}): {found.get(now, _OVER_CAPACITY)}\n"
        f"  - the best measured ({best}): {found[best]}"
    )
