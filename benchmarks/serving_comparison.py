"""Compares simulated and measured settings on one device, and the tuner at ten times the load."""

import gc
import itertools

import numpy as np

from benchmarks.serving_devices import SIZES, Timed
from benchmarks.serving_points import Point, milliseconds, summary, table
from benchmarks.serving_retuning import Retuning
from kdist.serving import (
    BatchSettings,
    LatencyCurve,
    Objective,
    bursty,
    choose,
    poisson,
    simulate,
)
from kdist.serving.engine.batcher import Batcher
from kdist.serving.tune import measure_batcher, probe

_LOADS = {"Poisson": poisson, "bursty": bursty}
_CURVE_SECONDS = 1.5
# Load after the change, as a fraction of the capacity; a tenth of it before.
_RETUNED_LOAD = 0.5


class Comparison:
    """Measures a device with real batchers.

    Args:
        compute: function of named arrays.
        example: named arrays with one row.
        shares: request rates, as fractions of the device's capacity.
        timeouts_ms: timeouts to measure, in milliseconds.
        seconds: seconds of requests for each setting.
        most: largest number of requests for each setting.
        turns: measurements of each setting. The fastest counts, as other load only slows.
    """

    def __init__(self, compute, example, shares, timeouts_ms, seconds, most, turns):
        self._compute, self._example = Timed(compute), example
        self._overhead = np.zeros(len(SIZES))
        self._shares, self._timeouts = shares, timeouts_ms
        self._seconds, self._most, self._turns = seconds, most, turns
        self._curve = None

    async def run(self, retune: bool = True) -> str:
        """Returns all results as text."""
        batcher = Batcher(self._compute, BatchSettings(0.1, SIZES[-1]), SIZES, max_waiting=10**6)
        gc.collect()
        gc.freeze()  # as the server does
        points = []
        for load, share in itertools.product(_LOADS, self._shares):
            self._curve = await self._measured_curve(batcher)
            points += await self._sweep(batcher, load, share)
        await batcher.close()
        texts = [self._head(), table(points), summary(points), self._chosen(points)]
        if retune:
            retuning = Retuning(
                self._compute, self._example, self._curve, _RETUNED_LOAD, self._seconds
            )
            texts.append(await retuning.run())
        return "\n\n".join(texts)

    async def _measured_curve(self, batcher):
        self._compute.times.clear()
        curve = await measure_batcher(batcher, self._example, SIZES, _CURVE_SECONDS)
        computing = [np.median(self._compute.times[size]) for size in SIZES]
        self._overhead = np.maximum(np.subtract(curve.batch_seconds, computing), 0)
        return curve

    async def _sweep(self, batcher, load, share):
        rate = share * self._curve.capacity(SIZES[-1])
        count = int(np.clip(rate * self._seconds, 50, self._most))
        arrivals = _LOADS[load](rate, count, seed=1)
        all_settings = [BatchSettings(timeout * 1e-3, SIZES[-1]) for timeout in self._timeouts]
        found: dict[BatchSettings, list[Point]] = {settings: [] for settings in all_settings}
        for _ in range(self._turns):
            for settings, points in found.items():
                self._curve = await self._measured_curve(batcher)  # a virtual machine gets slower
                batcher.settings = settings
                points.append(await self._point(batcher, arrivals, load, share))
        return [
            min(points, key=lambda point: point.measured.mean_seconds) for points in found.values()
        ]

    async def _point(self, batcher, arrivals, load, share):
        self._compute.times.clear()
        measured = await probe(lambda: batcher(self._example), arrivals)
        before, during = (
            simulate(curve, np.sort(measured.sent), batcher.settings)
            for curve in (self._curve, self._curve_of_run())
        )
        return Point(load, share, batcher.settings, before, during, measured)

    def _curve_of_run(self):
        """Returns the curve of the run. Sizes without batches get the mean slowdown."""
        known, times = np.array(self._curve.batch_seconds), self._compute.times
        taken = {
            size: np.array(times[size]) + self._overhead[place]
            for place, size in enumerate(SIZES)
            if times[size]
        }
        came = [place for place, size in enumerate(SIZES) if size in taken]
        slower = sum(each.mean() for each in taken.values()) / known[came].sum()
        every = {size: taken.get(size, [known[p] * slower]) for p, size in enumerate(SIZES)}
        return LatencyCurve.of_times(every)

    def _head(self):
        said = ", ".join(
            f"{size}: {seconds * 1e3:.2f}"
            for size, seconds in zip(SIZES, self._curve.batch_seconds, strict=True)
        )
        most = self._curve.capacity(SIZES[-1])
        return f"Milliseconds by rows: {said}; at most {most:,.0f} requests per second."

    def _chosen(self, points):
        """Compares the settings chosen for the recorded arrivals with the best measured."""
        lines = []
        for (load, share), group in itertools.groupby(points, lambda p: (p.load, p.share)):
            group = list(group)
            best = min(group, key=lambda p: p.measured.mean_seconds)
            arrivals = np.sort(group[0].measured.sent)
            choice = choose(
                self._curve, arrivals, Objective(), self._timeouts, max_batches=[SIZES[-1]]
            )
            if choice.best is None:
                lines.append(f"{load} {share:.0%}: {choice.reason}")
                continue
            mine = next(p for p in group if p.settings == choice.best.settings)
            more = mine.measured.mean_seconds / best.measured.mean_seconds - 1
            lines.append(
                f"{load} {share:.0%}: chosen {milliseconds(mine)} ms, best measured "
                f"{milliseconds(best)} ms; mean {more:+.1%}"
            )
        return "\n".join(f"- {line}" for line in lines)
