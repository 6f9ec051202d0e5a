"""Tunes a model before it serves: simulates settings at several rates, and measures the best.

    result = tune(model_function, {"images": one_row}, Objective("latency"), sizes=[1, 8, 32])
    page.write(result, "tuning.html")
    result.rates[0].best.settings

`tune_export` does this for an exported model; it imports TensorFlow when it is called.
"""

import asyncio
import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.core.model_directory import needed_devices, versions
from kdist.serving.core.requests import Arrays
from kdist.serving.core.settings import BatchSettings, Objective, padded_sizes
from kdist.serving.engine.batcher import Batcher
from kdist.serving.policy.latency_curve import LatencyCurve
from kdist.serving.policy.selection import Choice, ScoredSettings, choose
from kdist.serving.policy.simulation import poisson
from kdist.serving.tune.probing import ProbeResult, confirm, measure_batcher

_logger = logging.getLogger(__name__)

# Request rates to tune for, as fractions of the capacity.
LOAD_FRACTIONS = (0.1, 0.3, 0.6, 0.9)
_SIMULATED_REQUESTS = 5000
_MIN_PROBE_REQUESTS, _MAX_PROBE_REQUESTS = 20, 3000
_CURVE_TIME_FRACTION = 0.2  # of the total time
_CANDIDATES, _ROUNDS = 3, 2  # settings that are measured, and how often


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
    max_batch: int = 32,
    seconds: float = 60.0,
    report: Callable[[str], None] = _logger.info,
) -> TuningResult:
    """Returns the tuning of the highest version of an exported model, and writes its page.

    The tuning runs in this process, for about `seconds`. Each step is passed to `report`, and
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
    tuned = tune(compute, row, objective, padded_sizes(max_batch), seconds=seconds, report=report)
    report(str(page.write(tuned, page_path, pathlib.Path(directory).resolve().name)))
    return tuned
