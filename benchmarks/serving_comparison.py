"""One device: settings simulated and measured, the choice, and the tuner at ten times the load."""

import dataclasses
import gc
import itertools

import numpy as np

from benchmarks.serving_devices import SIZES, Timed
from benchmarks.serving_points import Point, milliseconds, summary, table
from benchmarks.serving_retuning import Retuning
from kdist.serving import (
    BatchSettings,
    Objective,
    bursty,
    choose,
    poisson,
    simulate,
)
from kdist.serving.batcher import Batcher
from kdist.serving.measured_curve import measure_served
from kdist.serving.probing import probe

_LOADS = {"Poisson": poisson, "bursty": bursty}
# Of the device's capacity: the load that comes after a tenth of it.
_RETUNED = 0.5


class Comparison:
    """Measures a device with real batchers.

    Args:
        compute: of named arrays.
        example: named arrays of a row.
        shares: of the device's capacity: rates of requests.
        timeouts_ms: that are measured.
        seconds: of requests, of each setting.
        most: requests of each.
        turns: of each; what others do on the machine only slows, so the faster counts.
    """

    def __init__(self, compute, example, shares, timeouts_ms, seconds, most, turns):
        self._compute, self._example = Timed(compute), example
        self._overhead = np.zeros(len(SIZES))
        self._shares, self._timeouts = shares, timeouts_ms
        self._seconds, self._most, self._turns = seconds, most, turns
        self._curve = None

    async def run(self, retune: bool = True) -> str:
        """All of it, as text."""
        batcher = Batcher(self._compute, BatchSettings(0.1, SIZES[-1]), SIZES, max_waiting=10**6)
        gc.collect()
        gc.freeze()  # as a server does
        points = []
        for load, share in itertools.product(_LOADS, self._shares):
            self._curve = await self._measured_curve(batcher)  # a virtual machine gets slower
            points += await self._sweep(batcher, load, share)
        await batcher.close()
        texts = [self._head(), table(points), summary(points), self._chosen(points)]
        if retune:
            retuning = Retuning(self._compute, self._example, self._curve, _RETUNED, self._seconds)
            texts.append(f"- {await retuning.run()}")
        return "\n\n".join(texts)

    async def _measured_curve(self, batcher):
        """A batch is full, or would wait: each size has settings of its own."""

        async def call(arrays):
            return await batcher(arrays)

        seconds, computing = [], []
        for size in SIZES:
            self._compute.times.clear()
            batcher.settings = BatchSettings(0.1, size)
            one = await measure_served(call, self._example, [size], seconds=0.25)
            seconds.append(one.batch_seconds[0])
            computing.append(np.median(self._compute.times[size]))
        self._overhead = np.maximum(np.subtract(seconds, computing), 0)
        return dataclasses.replace(one, sizes=SIZES, batch_seconds=np.maximum.accumulate(seconds))

    async def _sweep(self, batcher, load, share):
        rate = share * self._curve.capacity(SIZES[-1])
        count = int(np.clip(rate * self._seconds, 50, self._most))
        arrivals = _LOADS[load](rate, count, seed=1)
        all_settings = [BatchSettings(timeout * 1e-3, SIZES[-1]) for timeout in self._timeouts]
        found: dict[BatchSettings, list[Point]] = {settings: [] for settings in all_settings}
        for _ in range(self._turns):
            for settings, points in found.items():
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
        """What batches took on average; sizes that did not come are as much slower as the rest."""
        known = np.array(self._curve.batch_seconds)
        times = self._compute.times
        taken = {place: np.mean(times[size]) for place, size in enumerate(SIZES) if times[size]}
        taken = {place: mean + self._overhead[place] for place, mean in taken.items()}
        slower = sum(taken.values()) / sum(known[place] for place in taken)
        seconds = [taken.get(place, each * slower) for place, each in enumerate(known)]
        return dataclasses.replace(self._curve, batch_seconds=np.maximum.accumulate(seconds))

    def _head(self):
        said = ", ".join(
            f"{size}: {seconds * 1e3:.2f}"
            for size, seconds in zip(SIZES, self._curve.batch_seconds, strict=True)
        )
        most = self._curve.capacity(SIZES[-1])
        return f"Milliseconds by rows: {said}; at most {most:,.0f} requests a second."

    def _chosen(self, points):
        """The setting that the simulator takes for the load's own arrivals, beside the best."""
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
