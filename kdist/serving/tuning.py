"""Which settings of batches are best for a device, a load and an aim.

    choice = choose(curve, poisson(rate=400, count=20_000), Objective("latency"))
    choice.best.settings, choice.best.outcome   # best is None if nothing serves the load
    choice.tried                                # all, for a plot of the trade-off

All settings of a grid are simulated. A timeout of 0 is often the best for the mean latency: while
the device is busy requests gather anyhow (Deb and Serfozo, "Optimal control of batch service
queues", 1973). A timeout pays for bursts, for clients that wait for each other, or where the
device's time is what counts.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.settings import BatchSettings, Objective
from kdist.serving.simulation import Outcome, simulate

TIMEOUTS_MS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# Scores so close to the best are as good: which is less is decided by the few requests that
# happened to come together, and larger batches serve more when more come.
_NEARLY = 0.03
# Of the bound on the 99th percentile, which is measured to be as much off as simulated. Settings
# that just keep it would break it every other time.
_ROOM = 0.9
# Halvings of the interval in which the highest rate is sought: to a thousandth of it.
_HALVINGS = 10


@dataclasses.dataclass(frozen=True)
class Tried:
    """Settings, and what they were simulated to give.

    Attributes:
        settings: of batches.
        outcome: under the load.
        score: what the objective asks for; less is better. Infinite where its bound is not kept
            (see `choose`).
    """

    settings: BatchSettings
    outcome: Outcome
    score: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best settings, and all that were tried.

    Attributes:
        best: None if none serves the load as asked.
        tried: those with the least score first.
        reason: why there is none; empty if there is one.
    """

    best: Tried | None
    tried: Sequence[Tried]
    reason: str = ""


def choose(
    curve: LatencyCurve,
    arrivals: np.ndarray,
    objective: Objective,
    timeouts_ms: Sequence[float] = TIMEOUTS_MS,
    max_batches: Sequence[int] | None = None,
    overhead_seconds: float = 0.0,
    devices: int = 1,
) -> Choice:
    """Simulates all settings of a grid, and takes the one that the objective asks for.

    A bound counts as kept with a tenth to spare; without, if no setting has that. Of settings that
    score within 3 % of the best, the shortest timeout is taken, and of those the largest batch,
    which helps when more come.

    Args:
        curve: what a batch takes the device.
        arrivals: seconds, ascending, of shape (N,).
        objective: what for.
        timeouts_ms: milliseconds, as a client or TensorFlow Serving may be set to.
        max_batches: rows; by default the sizes of the curve.
        overhead_seconds: of each request, besides.
        devices: that compute a batch each.
    """
    system = _System(curve, np.asarray(arrivals, float), overhead_seconds, devices)
    grid = [
        BatchSettings(timeout * 1e-3, rows)
        for timeout in sorted(timeouts_ms)
        for rows in sorted(curve.sizes if max_batches is None else max_batches)
    ]
    outcomes = {settings: system.outcome(settings) for settings in grid}
    tried = _scored(system, outcomes, objective)
    if reason := _why_none(system, objective, tried):
        return Choice(None, tried, reason)
    least = tried[0].score
    good = [each for each in tried if each.score <= least + _NEARLY * abs(least)]
    best = min(good, key=lambda e: (e.settings.timeout_seconds, -e.settings.max_batch))
    return Choice(best, tried)


@dataclasses.dataclass(frozen=True)
class _System:
    """All but the settings."""

    curve: LatencyCurve
    arrivals: np.ndarray
    overhead_seconds: float
    devices: int

    @property
    def rate(self):
        return (len(self.arrivals) - 1) / (self.arrivals[-1] - self.arrivals[0])

    def capacity(self, max_batch):
        return self.devices * self.curve.capacity(max_batch)

    def outcome(self, settings, times_faster=1.0):
        arrivals = self.arrivals / times_faster
        return simulate(self.curve, arrivals, settings, self.overhead_seconds, self.devices)


def _score(system, settings, aim, bound, outcome):
    if outcome.over_capacity or (bound is not None and outcome.p99_seconds > bound):
        return float("inf")
    if aim == "latency":
        return outcome.mean_seconds
    if aim == "device_time":
        return outcome.device_share
    return -_highest_rate(system, settings, bound)


def _highest_rate(system, settings, bound):
    """How much faster the same requests could come, within the bound, in requests a second."""
    low, high = 1.0, max(1.0, system.capacity(settings.max_batch) / system.rate)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        outcome = system.outcome(settings, middle)
        if outcome.over_capacity or outcome.p99_seconds > bound:
            high = middle
        else:
            low = middle
    return low * system.rate


def _scored(system, outcomes, objective):
    """Those with the least score first."""

    def scored(bound):
        return [
            Tried(settings, outcome, _score(system, settings, objective.aim, bound, outcome))
            for settings, outcome in outcomes.items()
        ]

    bound = objective.p99_seconds
    tried = scored(bound if bound is None else _ROOM * bound)
    if bound is not None and all(np.isinf(each.score) for each in tried):
        tried = scored(bound)
    return sorted(tried, key=lambda each: each.score)


def _why_none(system, objective, tried):
    if np.isfinite(tried[0].score):
        return ""
    if all(each.outcome.over_capacity for each in tried):
        most = max(system.capacity(each.settings.max_batch) for each in tried)
        return (
            f"over capacity: {system.rate:,.0f} requests a second come, and the device serves "
            f"{most:,.0f} at most; add a process or a device, or allow larger batches"
        )
    serving = [each.outcome.p99_seconds for each in tried if not each.outcome.over_capacity]
    return (
        f"no setting keeps 99 of 100 requests within {objective.p99_seconds * 1e3:g} ms at "
        f"{system.rate:,.0f} requests a second; the best reaches {min(serving) * 1e3:.1f} ms: "
        "allow as much, or add a process or a device"
    )
