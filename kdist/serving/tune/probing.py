"""Measures a real batcher: latency under recorded arrivals, and the latency curve.

    result = await probe(call, poisson(rate=300, count=600))
    best, results = await confirm(apply, call, choice, arrivals, objective)
    curve = await measure_batcher(batcher, {"images": one_row}, sizes=[1, 8, 32])

`call()` is one request: a coroutine that ends with the response. Imports no TensorFlow.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from kdist.serving.core.requests import Arrays
from kdist.serving.core.settings import BatchSettings, Objective
from kdist.serving.engine.batcher import Batcher
from kdist.serving.policy.latency_curve import LatencyCurve, needs_repetition, repeat_first_row
from kdist.serving.policy.selection import Choice, ScoredSettings

Call = Callable[[], Awaitable[Any]]

_WARM_UP_FRACTION = 0.1  # ignored, as in the simulator
_MIN_GAIN = 0.05  # of measured latency, to prefer other settings to the simulated best
_FULL_BATCH_SECONDS = 1.0  # timeout while the rows of a batch are queued


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Measured latency of requests. Means and percentiles ignore the first tenth.

    `sent` are the seconds from the first request until each was sent, of shape `(N,)`. They are
    later than planned if the machine was busy; simulate these times to compare. `latencies` are NaN
    for requests that failed or had no response in time, which `failed` counts.
    """

    sent: np.ndarray
    latencies: np.ndarray
    mean_seconds: float
    p50_seconds: float
    p99_seconds: float
    failed: int

    def meets(self, objective: Objective) -> bool:
        """Returns whether all requests had a response and the objective's bound is met."""
        bound = objective.p99_seconds
        return not self.failed and (bound is None or self.p99_seconds <= bound)


async def probe(call: Call, arrivals: np.ndarray, wait_seconds: float = 10.0) -> ProbeResult:
    """Returns latencies of requests sent at given times, whether or not earlier ones were answered.

    The arrivals are in seconds, ascending, of shape `(N,)`. Responses later than `wait_seconds`
    after the last request count as failed. Raises ValueError without arrivals.
    """
    if not len(arrivals):
        raise ValueError("there are no arrivals: give the times of requests")
    sent, latencies = np.full(len(arrivals), np.nan), np.full(len(arrivals), np.nan)

    async def request(place):
        began = time.perf_counter()
        sent[place] = began
        await call()
        latencies[place] = time.perf_counter() - began

    first, tasks = time.perf_counter() - arrivals[0], []
    for place, when in enumerate(arrivals):
        remaining = first + when - time.perf_counter()
        if remaining > 0:
            await asyncio.sleep(remaining)
        tasks.append(asyncio.ensure_future(request(place)))
    _, late = await asyncio.wait(tasks, timeout=wait_seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return _summary(sent - np.nanmin(sent), latencies)


def _summary(sent, latencies):
    counted = latencies[int(len(latencies) * _WARM_UP_FRACTION) :]
    counted = counted[np.isfinite(counted)]
    failed = int(np.isnan(latencies).sum())
    if not len(counted):
        return ProbeResult(sent, latencies, *[float("inf")] * 3, failed)
    p50, p99 = np.percentile(counted, [50, 99])
    return ProbeResult(sent, latencies, float(counted.mean()), float(p50), float(p99), failed)


async def confirm(
    apply: Callable[[BatchSettings], None],
    call: Call,
    choice: Choice,
    arrivals: np.ndarray,
    objective: Objective,
    candidates: int = 3,
    rounds: int = 2,
) -> tuple[ScoredSettings, dict[BatchSettings, ProbeResult]]:
    """Returns the best settings as measured, and the last measurement of each candidate.

    The simulated best wins unless others are measured to be 5 % better. The device time and the
    highest rate cannot be measured from outside. For these objectives, the simulation decides among
    the settings that are measured to meet the bound.

    Args:
        apply: called with settings; with the best at the end.
        call: sends one request; see `probe`.
        choice: a simulated choice; a ValueError if it has no best.
        arrivals: times of requests in each round, in seconds, ascending.
        objective: goal of the choice.
        candidates: number of settings to measure in turns, with different timeouts.
        rounds: number of measurements of each.
    """
    if choice.best is None:
        raise ValueError(f"nothing to confirm: {choice.reason}")
    tried = _best_by_timeout(choice)[:candidates]
    results: dict[BatchSettings, list[ProbeResult]] = {each.settings: [] for each in tried}
    for _ in range(rounds):
        for settings, measured in results.items():
            apply(settings)
            measured.append(await probe(call, arrivals))
    best = _best(tried, results, objective)
    apply(best.settings)
    return best, {settings: measured[-1] for settings, measured in results.items()}


def _best_by_timeout(choice):
    """Returns the best settings of each timeout, the overall best first."""
    first = {choice.best.settings.timeout_seconds: choice.best}
    for each in choice.tried:
        if np.isfinite(each.score):
            first.setdefault(each.settings.timeout_seconds, each)
    return list(first.values())


def _best(tried: Sequence[ScoredSettings], results, objective):
    meeting = [t for t in tried if all(m.meets(objective) for m in results[t.settings])]
    if not meeting or objective.aim != "latency":
        return (meeting or tried)[0]

    def mean(each):
        return min(m.mean_seconds for m in results[each.settings])

    best = min(meeting, key=mean)
    return meeting[0] if mean(best) > (1 - _MIN_GAIN) * mean(meeting[0]) else best


async def measure_batcher(
    batcher: Batcher, example: Arrays, sizes: Sequence[int], seconds: float = 4.0
) -> LatencyCurve:
    """Returns the latency curve as clients see it, including the event loop's part of a batch.

    That part dominates for models of a millisecond. Each batch consists of concurrent requests of
    one row, the first of `example`, and ends when the last is answered. The batcher must have no
    other load, and its settings are changed. The sizes ascend; `seconds` is the total time for all
    of them.
    """
    row = repeat_first_row(example, 1)

    async def time_batch(size):
        batcher.settings = BatchSettings(_FULL_BATCH_SECONDS, size)  # starts when it is full
        began = time.perf_counter()
        await asyncio.gather(*(batcher(row) for _ in range(size)))
        return time.perf_counter() - began

    for size in [*sizes, *sizes]:
        await time_batch(size)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    end = time.perf_counter() + seconds
    while needs_repetition(times, end):
        for size in sizes:
            times[size].append(await time_batch(size))
    return LatencyCurve.of_times(times)
