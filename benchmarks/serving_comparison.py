"""One device: settings simulated and measured, the choice, and the tuner at ten times the load."""

import asyncio
import dataclasses
import gc
import itertools

import numpy as np

from benchmarks.serving_devices import SIZES
from benchmarks.tables import markdown
from kdist.serving import (
    BatchSettings,
    Objective,
    Outcome,
    bursty,
    choose,
    poisson,
    simulate,
)
from kdist.serving.adapting import Tuner
from kdist.serving.batcher import Batcher
from kdist.serving.measured_curve import measure_served
from kdist.serving.probing import Measured, probe

_DIFFER = 1.1  # settings that differ by less may be in any order
_LOADS = {"Poisson": poisson, "bursty": bursty}


@dataclasses.dataclass
class Point:
    """A load and settings: simulated and measured."""

    load: str
    share: float
    settings: BatchSettings
    simulated: Outcome
    measured: Measured

    def error(self, name: str) -> float:
        """Of simulation, as a share of what was measured."""
        return getattr(self.simulated, name) / getattr(self.measured, name) - 1


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
        self._compute, self._example = compute, example
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
        texts = [self._head(), _table(points), _summary(points), self._chosen(points)]
        if retune:
            texts.append(await self._retuned())
        return "\n\n".join(texts)

    async def _measured_curve(self, batcher):
        """A batch is full, or would wait: each size has settings of its own."""

        async def call(arrays):
            return await batcher(arrays)

        seconds = []
        for size in SIZES:
            batcher.settings = BatchSettings(0.1, size)
            one = await measure_served(call, self._example, [size], seconds=0.25)
            seconds.append(one.batch_seconds[0])
        return dataclasses.replace(one, sizes=SIZES, batch_seconds=np.maximum.accumulate(seconds))

    async def _sweep(self, batcher, load, share):
        rate = share * self._curve.capacity(SIZES[-1])
        count = int(np.clip(rate * self._seconds, 50, self._most))
        arrivals, points = _LOADS[load](rate, count, seed=1), []
        for timeout in self._timeouts:
            batcher.settings = BatchSettings(timeout * 1e-3, SIZES[-1])
            turns = [
                await probe(lambda: batcher(self._example), arrivals) for _ in range(self._turns)
            ]
            measured = min(turns, key=lambda turn: turn.mean_seconds)
            simulated = simulate(self._curve, np.sort(measured.sent), batcher.settings)
            points.append(Point(load, share, batcher.settings, simulated, measured))
        return points

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
                f"{load} {share:.0%}: chosen {_ms(mine)} ms, best measured {_ms(best)} ms; "
                f"mean {more:+.1%}"
            )
        return "\n".join(f"- {line}" for line in lines)

    async def _retuned(self):
        """Ten times the load: the seconds until no later setting differs from the last."""
        most = self._curve.capacity(SIZES[-1])
        objective = Objective("device_time", 4 * self._curve.batch_seconds[-1])
        tuner = Tuner(self._curve, objective)
        compute = _told(self._compute, tuner, asyncio.get_running_loop())
        batcher = Batcher(compute, tuner.settings, max_waiting=10**6)
        history = []

        def apply(settings):
            batcher.settings = settings
            history.append((asyncio.get_running_loop().time(), settings))

        async def call():
            tuner.load.arrived()
            return await batcher(self._example)

        task = asyncio.create_task(tuner.run(apply))
        lines = []
        for share in (0.06, 0.6):
            began = asyncio.get_running_loop().time()
            measured = await probe(call, poisson(share * most, int(share * most * 12), seed=2))
            lines.append(self._after(share, began, history, measured, objective))
        task.cancel()
        await batcher.close()
        return "\n".join(f"- {line}" for line in lines)

    def _after(self, share, began, history, measured, objective):
        """Settings since then, each with the score that the simulator gives it."""
        load = poisson(share * self._curve.capacity(SIZES[-1]), 5000)
        choice = choose(self._curve, load, objective)
        if choice.best is None:
            return f"tuned, load {share:.0%}: {choice.reason}"
        # A setting just outside the bound is within a tenth of it, too.
        wider = Objective(objective.aim, 1.1 * objective.p99_seconds)
        scores = {each.settings: each.score for each in choose(self._curve, load, wider).tried}
        spans = [(max(0.0, when - began), settings) for when, settings in history]
        good = [scores.get(settings, np.inf) <= 1.1 * choice.best.score for _, settings in spans]
        last_bad = max((i for i, is_good in enumerate(good) if not is_good), default=-1)
        there = "not reached" if last_bad + 1 == len(good) else f"{spans[last_bad + 1][0]:.1f} s"
        said = f"settings {spans[-1][1]}, best {choice.best.settings}"
        return (
            f"tuned for the device's time, load {share:.0%}: within a tenth of the best after "
            f"{there}; {said}; measured p99 {measured.p99_seconds * 1e3:.1f} ms of "
            f"{objective.p99_seconds * 1e3:.1f}"
        )


def _told(compute, tuner, loop):
    """Pads batches, as a batcher does, and tells the tuner of them in its own thread."""

    def computed(arrays):
        began, rows = loop.time(), len(arrays["x"])
        size = next(size for size in SIZES if size >= rows)
        more = np.repeat(arrays["x"][:1], size - rows, axis=0)
        outputs = compute({"x": np.concatenate([arrays["x"], more])})
        loop.call_soon_threadsafe(tuner.load.batch_done, rows, loop.time() - began)
        return {name: output[:rows] for name, output in outputs.items()}

    return computed


def _ms(point):
    return f"{point.settings.timeout_seconds * 1e3:g}"


def _table(points):
    head = ["load", "of capacity", "timeout ms", "mean ms", "simulated", "p99 ms", "simulated"]
    lines = [
        [
            p.load,
            f"{p.share:.0%}",
            _ms(p),
            f"{p.measured.mean_seconds * 1e3:.2f}",
            f"{p.error('mean_seconds'):+.1%}",
            f"{p.measured.p99_seconds * 1e3:.2f}",
            f"{p.error('p99_seconds'):+.1%}",
        ]
        for p in points
    ]
    return markdown([head, *lines])


def _summary(points):
    means, tails = ([abs(p.error(n)) for p in points] for n in ("mean_seconds", "p99_seconds"))
    pairs, right = 0, 0
    for one, other in itertools.combinations(points, 2):
        if (one.load, one.share) != (other.load, other.share):
            continue
        low, high = sorted((one, other), key=lambda p: p.measured.mean_seconds)
        if high.measured.mean_seconds > _DIFFER * low.measured.mean_seconds:
            pairs += 1
            right += low.simulated.mean_seconds < high.simulated.mean_seconds
    return (
        f"Error of the mean: median {np.median(means):.1%}, at most {max(means):.1%}; of the 99th "
        f"percentile: median {np.median(tails):.1%}, at most {max(tails):.1%}. Of {pairs} pairs of "
        f"settings that differ by more than a tenth, {right} are ranked right."
    )
