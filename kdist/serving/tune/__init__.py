"""Tunes a model before it serves: simulates settings at several rates, and measures the best.

    result = tune(model_function, {"images": one_row}, Objective("latency"), sizes=[1, 8, 32])
    page.write(result, "tuning.html")
    result.rates[0].best.settings

`tune_export` does this for an exported model; it imports TensorFlow when it is called. A real
batcher is measured: latency under recorded arrivals, and the latency curve.

    result = await probe(call, poisson(rate=300, count=600))
    best, results = await confirm(apply, call, choice, arrivals, objective)
    curve = await measure_batcher(batcher, {"images": one_row}, sizes=[1, 8, 32])

`call()` is one request: a coroutine that ends with the response.
"""

import asyncio
import dataclasses
import functools
import logging
import os
import pathlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kdist.serving.core.model_directory import needed_devices, versions
from kdist.serving.core.requests import Arrays
from kdist.serving.core.settings import BatchSettings, Objective, padded_sizes
from kdist.serving.engine.batcher import Batcher
from kdist.serving.policy.latency_curve import LatencyCurve, needs_repetition, repeat_first_row
from kdist.serving.policy.selection import Choice, ScoredSettings, choose
from kdist.serving.policy.simulation import poisson

Call = Callable[[], Awaitable[Any]]

_WARM_UP_FRACTION = 0.1  # ignored, as in the simulator
_MIN_GAIN = 0.05  # of measured latency, to prefer other settings to the simulated best
_FULL_BATCH_SECONDS = 1.0  # timeout while the rows of a batch are queued

_logger = logging.getLogger(__name__)

# Request rates to tune for, as fractions of the capacity.
LOAD_FRACTIONS = (0.1, 0.3, 0.6, 0.9)
_SIMULATED_REQUESTS = 5000
_MIN_PROBE_REQUESTS, _MAX_PROBE_REQUESTS = 20, 3000
_CURVE_TIME_FRACTION = 0.2  # of the total time
_CANDIDATES, _ROUNDS = 3, 2  # settings that are measured, and how often


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


@dataclasses.dataclass(frozen=True)
class RateTuning:
    """Tuning result for one request rate."""

    share: float  # rate as a fraction of the device's capacity
    rate: float  # requests of one row per second
    choice: Choice  # simulated
    best: ScoredSettings | None  # by measurement; None if no settings meet the objective
    measured: Mapping[BatchSettings, ProbeResult]


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """Tuning results for all request rates, in their order."""

    curve: LatencyCurve  # includes the event loop's part
    objective: Objective
    rates: Sequence[RateTuning]


def tune(
    compute: Callable[[Arrays], Arrays],
    example: Arrays,
    objective: Objective,
    sizes: Sequence[int],
    shares: Sequence[float] = LOAD_FRACTIONS,
    seconds: float = 60.0,
    report: Callable[[str], None] = _logger.info,
) -> TuningResult:
    """Measures the latency curve, simulates Poisson arrivals, and measures the best settings.

    Args:
        compute: function of named arrays `(rows, …)`.
        example: named arrays with at least one row; requests hold the first row.
        objective: goal of the tuning.
        sizes: batch sizes in rows, ascending.
        shares: request rates, as fractions of the device's capacity; a ValueError unless positive.
        seconds: approximate total time of the measurements.
        report: called with a line of text after each step. Defaults to logging it.

    Returns:
        The latency curve, and a result for each rate.
    """
    if min(shares, default=0) <= 0:
        raise ValueError(
            f"shares={list(shares)}: give at least one fraction of the capacity, each above zero"
        )
    return asyncio.run(_tune(compute, example, objective, sizes, shares, seconds, report))


async def _tune(compute, example, objective, sizes, shares, seconds, report):
    row = {name: array[:1] for name, array in example.items()}
    batcher = Batcher(compute, BatchSettings(), sizes, max_waiting=10 * _MAX_PROBE_REQUESTS)
    try:
        curve = await measure_batcher(batcher, row, sizes, seconds * _CURVE_TIME_FRACTION)
        capacity = curve.capacity(curve.largest)
        report(f"at most {capacity:,.0f} rows per second; {_curve_text(curve)}")
        probes = len(shares) * _CANDIDATES * _ROUNDS
        probe_seconds = seconds * (1 - _CURVE_TIME_FRACTION) / probes
        rates = []
        for share in shares:
            rates.append(await _tune_rate(batcher, row, curve, objective, share, probe_seconds))
            report(rate_text(rates[-1], objective))
    finally:
        await batcher.close()
    return TuningResult(curve, objective, rates)


async def _tune_rate(batcher, row, curve, objective, share, seconds):
    rate = share * curve.capacity(curve.largest)
    choice = choose(curve, poisson(rate, _SIMULATED_REQUESTS), objective)
    if choice.best is None:
        return RateTuning(share, rate, choice, None, {})
    requests = int(np.clip(rate * seconds, _MIN_PROBE_REQUESTS, _MAX_PROBE_REQUESTS))
    arrivals = poisson(rate, requests, seed=1)

    def apply(settings):
        batcher.settings = settings

    best, measured = await confirm(
        apply, lambda: batcher(row), choice, arrivals, objective, _CANDIDATES, _ROUNDS
    )
    return RateTuning(share, rate, choice, best, measured)


def rate_text(tuned: RateTuning, objective: Objective) -> str:
    """Returns a line with the best settings at a rate, or the reason why there are none."""
    at = f"{tuned.rate:,.0f} requests per second ({tuned.share:.0%})"
    if tuned.best is None:
        return f"{at}: {tuned.choice.reason}"
    measured = tuned.measured[tuned.best.settings]
    warning = "" if measured.meets(objective) else "; this breaks the bound when measured"
    return (
        f"{at}: {tuned.best.settings}; mean {measured.mean_seconds * 1e3:.1f} ms, 99 of 100 within "
        f"{measured.p99_seconds * 1e3:.1f} ms{warning}"
    )


def _curve_text(curve):
    times = zip(curve.sizes, curve.batch_seconds, strict=True)
    return "ms by rows: " + ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in times)


def tune_export(
    directory: str | os.PathLike,
    page_path: str | os.PathLike,
    objective: Objective,
    max_batch: int,
    report: Callable[[str], None],
) -> TuningResult:
    """Returns the tuning of the highest version of an exported model, and writes its page.

    The tuning runs in this process, for about a minute. Each step is passed to `report`, and
    finally the path of the page. Raises ValueError if there is no version with a signature
    `serving_default`, and BadInput if the model rejects rows of zeros and has no warm-up requests.
    """
    from kdist.devices import find_devices
    from kdist.serving.core.signature import SERVING_DEFAULT
    from kdist.serving.engine.in_process import LoadedVersion, example_row
    from kdist.serving.tune import page

    available = versions(directory)
    if not available:
        raise ValueError(f"{directory} holds no version: write one with kdist.serving.export")
    path = pathlib.Path(directory, str(available[-1]))
    find_devices(needed_devices(path) or None)
    loaded = LoadedVersion(path)
    if SERVING_DEFAULT not in loaded.signatures:
        raise ValueError(f"{path} has no signature {SERVING_DEFAULT}; it has {loaded.signatures}")
    row = example_row(loaded.signatures[SERVING_DEFAULT], loaded.examples)
    compute = functools.partial(loaded, SERVING_DEFAULT)
    tuned = tune(compute, row, objective, padded_sizes(max_batch), report=report)
    report(str(page.write(tuned, page_path, pathlib.Path(directory).resolve().name)))
    return tuned
