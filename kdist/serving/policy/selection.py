"""Chooses batch settings for a device, a load, and an objective.

    choice = choose(curve, poisson(rate=400, count=20_000), Objective("latency"))
    choice.best.settings, choice.best.outcome   # best is None if nothing serves the load
    choice.tried                                # all settings, to plot the trade-off

All settings of a grid are simulated. A timeout of 0 often has the lowest mean latency, because
requests queue up while the device is busy (Deb and Serfozo, "Optimal control of batch service
queues", 1973). A timeout helps with bursts, with clients that wait for each other, or to reduce
device time.

`choose_in_subprocess` is the same for a running server: a simulation takes a second of pure Python,
in which the event loop would answer no request.
"""

import asyncio
import dataclasses
import os
import pickle
import sys
from collections.abc import Sequence

import numpy as np

from kdist.serving.core.settings import BatchSettings, Objective
from kdist.serving.policy.latency_curve import LatencyCurve
from kdist.serving.policy.simulation import Outcome, simulate

TIMEOUTS_MS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# Scores within this fraction of the best count as equal. Differences between them are noise, and
# larger batches have reserves for higher load.
_SCORE_TOLERANCE = 0.03
# Fraction of the bound on the 99th percentile to aim at. Measured latencies deviate from simulated
# ones, so settings that just meet the bound would break it every other time.
_BOUND_MARGIN = 0.9
# Steps of the binary search for the highest rate, to a thousandth of the interval.
_BISECTIONS = 10
_CHILD_NICENESS = 10
_CHILD_TIMEOUT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class ScoredSettings:
    """Settings with their simulated outcome."""

    settings: BatchSettings
    outcome: Outcome
    score: float  # lower is better; infinite if a bound is broken (see `choose`)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Result of `choose`: the best settings, and all that were simulated.

    Example:

        choice = kdist.serving.choose(curve, arrivals, kdist.serving.Objective())
        print(choice.best.settings if choice.best else choice.reason)

    Attributes:
        best: the best settings; None if no settings meet the objective.
        tried: all simulated settings, lowest score first.
        reason: why there are no best settings; empty otherwise.
    """

    best: ScoredSettings | None
    tried: Sequence[ScoredSettings]
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
    """Simulates a grid of settings and returns the best for an objective.

    Settings should meet a latency bound with a margin of 10 %; without the margin if none does.
    Among settings whose score is within 3 % of the best, the shortest timeout wins, then the
    largest batch, which has reserves for higher load.

    Args:
        curve: latency curve of the device.
        arrivals: arrival times in seconds, ascending, of shape `(N,)`.
        objective: goal of the choice.
        timeouts_ms: timeouts to simulate, in milliseconds. Defaults to 0 to 64 ms.
        max_batches: batch sizes to simulate, in rows. Defaults to the sizes of the curve.
        overhead_seconds: additional seconds per request. Defaults to 0.
        devices: number of devices; each computes one batch at a time. Defaults to 1.

    Returns:
        A `Choice` with the best settings and all that were simulated.

    Raises:
        ValueError: there are fewer than two arrivals, or a batch is larger than the curve covers.

    Example:

        >>> from kdist.serving.policy.simulation import poisson
        >>> curve = LatencyCurve([1, 8, 32], [0.004, 0.006, 0.012])
        >>> choice = choose(curve, poisson(rate=400, count=2000), Objective("latency"))
        >>> choice.best.settings.timeout_seconds
        0.0
    """
    system = _System(curve, np.asarray(arrivals, float), overhead_seconds, devices)
    grid = [
        BatchSettings(timeout * 1e-3, rows)
        for timeout in sorted(timeouts_ms)
        for rows in sorted(curve.sizes if max_batches is None else max_batches)
    ]
    outcomes = {settings: system.outcome(settings) for settings in grid}
    tried = _score_settings(system, outcomes, objective)
    if reason := _failure_reason(system, objective, tried):
        return Choice(None, tried, reason)
    lowest = tried[0].score
    good = [each for each in tried if each.score <= lowest + _SCORE_TOLERANCE * abs(lowest)]
    best = min(good, key=lambda e: (e.settings.timeout_seconds, -e.settings.max_batch))
    return Choice(best, tried)


@dataclasses.dataclass(frozen=True)
class _System:
    """Everything that the settings are simulated on."""

    curve: LatencyCurve
    arrivals: np.ndarray
    overhead_seconds: float
    devices: int

    @property
    def rate(self):
        return (len(self.arrivals) - 1) / (self.arrivals[-1] - self.arrivals[0])

    def capacity(self, max_batch):
        return self.devices * self.curve.capacity(max_batch)

    def outcome(self, settings, speedup=1.0):
        arrivals = self.arrivals / speedup
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
    """Returns the highest request rate within the bound, for the same arrivals sped up."""
    low, high = 1.0, max(1.0, system.capacity(settings.max_batch) / system.rate)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        outcome = system.outcome(settings, middle)
        if outcome.over_capacity or outcome.p99_seconds > bound:
            high = middle
        else:
            low = middle
    return low * system.rate


def _score_settings(system, outcomes, objective):
    """Returns all settings with their scores, lowest score first."""

    def score_all(bound):
        aim = objective.aim
        return [
            ScoredSettings(settings, outcome, _score(system, settings, aim, bound, outcome))
            for settings, outcome in outcomes.items()
        ]

    bound = objective.p99_seconds
    tried = score_all(bound if bound is None else _BOUND_MARGIN * bound)
    if bound is not None and all(np.isinf(each.score) for each in tried):
        tried = score_all(bound)
    return sorted(tried, key=lambda each: each.score)


def _failure_reason(system, objective, tried):
    if np.isfinite(tried[0].score):
        return ""
    if all(each.outcome.over_capacity for each in tried):
        limit = max(system.capacity(each.settings.max_batch) for each in tried)
        return (
            f"over capacity: {system.rate:,.0f} rows per second arrive, and the device serves "
            f"at most {limit:,.0f}; add a process or a device, or allow larger batches"
        )
    tails = [each.outcome.p99_seconds for each in tried if not each.outcome.over_capacity]
    return (
        f"no setting keeps 99 of 100 requests within {objective.p99_seconds * 1e3:g} ms at "
        f"{system.rate:,.0f} rows per second; the best reaches {min(tails) * 1e3:.1f} ms: "
        "raise the bound, or add a process or a device"
    )


async def choose_in_subprocess(*arguments, **keywords) -> Choice:
    """Returns `choose(*arguments, **keywords)`, computed in a child process at low priority.

    The child imports NumPy and this package, but no TensorFlow and no main program, which a pool of
    `multiprocessing` would run again. Raises RuntimeError if it fails, or takes longer than a
    minute.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # no module is replaced by a file in the working directory
        "-c",
        f"from {__name__} import _child_main; _child_main()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    try:
        exchange = process.communicate(pickle.dumps((arguments, keywords)))
        result, errors = await asyncio.wait_for(exchange, _CHILD_TIMEOUT_SECONDS)
    except TimeoutError as error:
        message = f"choosing settings took longer than {_CHILD_TIMEOUT_SECONDS:g} s"
        raise RuntimeError(message) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"choosing settings failed: {' '.join(last) or process.returncode}")
    return pickle.loads(result)


def _child_main():
    os.nice(_CHILD_NICENESS)
    arguments, keywords = pickle.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pickle.dumps(choose(*arguments, **keywords)))
