"""A model tried out before it serves: what is chosen at several rates, simulated and measured.

    found = tune(model_function, {"images": one_row}, Objective("latency"), sizes=[1, 8, 32])
    tuning_page.write(found, "tuning.html")
    found.rates[0].best.settings

Imports no TensorFlow.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.arrivals import poisson
from kdist.serving.batcher import Arrays, Batcher
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.measured_curve import measure_served
from kdist.serving.probing import Measured, confirm
from kdist.serving.settings import BatchSettings, Objective
from kdist.serving.tuning import Choice, Tried, choose

SHARES = (0.1, 0.3, 0.6, 0.9)
_SIMULATED = 5000
_MOST_PROBED = 3000  # requests of a probe
_FEWEST_PROBED = 20
_CURVE_SHARE = 0.2  # of the time
_FEW, _TURNS = 3, 2  # settings that are measured, and how often


@dataclasses.dataclass(frozen=True)
class TunedRate:
    """What was found at a rate of requests.

    Attributes:
        share: of what the device serves at most.
        rate: requests a second, of one row.
        choice: by simulation.
        best: by measurement; None if nothing serves the rate as asked.
        measured: by settings.
    """

    share: float
    rate: float
    choice: Choice
    best: Tried | None
    measured: Mapping[BatchSettings, Measured]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was found, at all rates.

    Attributes:
        curve: seconds of batches, with the event loop's part.
        objective: what for.
        rates: as asked for.
    """

    curve: LatencyCurve
    objective: Objective
    rates: Sequence[TunedRate]


def tune(
    compute: Callable[[Arrays], Arrays],
    example: Arrays,
    objective: Objective,
    sizes: Sequence[int],
    shares: Sequence[float] = SHARES,
    seconds: float = 60.0,
    tell: Callable[[str], None] = print,
) -> Tuned:
    """Measures the curve, simulates Poisson arrivals at each rate, and measures the best few.

    Args:
        compute: a function of named arrays (rows, …).
        example: named arrays of at least one row; requests are its first.
        objective: what for.
        sizes: rows of batches, ascending; the last is the largest.
        shares: rates, of the most rows a second that the device serves.
        seconds: of measuring, about.
        tell: is given a line about each step.

    Raises:
        ValueError: sizes that do not ascend from 1 on, or a share that is not above zero.
    """
    if min(shares, default=0) <= 0:
        raise ValueError(f"shares={list(shares)}: give some of the device's capacity, above zero")
    return asyncio.run(_tune(compute, example, objective, sizes, shares, seconds, tell))


async def _tune(compute, example, objective, sizes, shares, seconds, tell):
    row = {name: array[:1] for name, array in example.items()}
    batcher = Batcher(compute, BatchSettings(), sizes, max_waiting=10 * _MOST_PROBED)
    try:
        curve = await measure_served(batcher, row, sizes, seconds * _CURVE_SHARE)
        tell(f"at most {curve.capacity(curve.largest):,.0f} rows a second; {_in_words(curve)}")
        left = seconds * (1 - _CURVE_SHARE) / (len(shares) * _FEW * _TURNS)
        rates = []
        for share in shares:
            rates.append(await _tune_rate(batcher, row, curve, objective, share, left))
            tell(in_words(rates[-1], objective))
    finally:
        await batcher.close()
    return Tuned(curve, objective, rates)


async def _tune_rate(batcher, row, curve, objective, share, seconds):
    rate = share * curve.capacity(curve.largest)
    choice = choose(curve, poisson(rate, _SIMULATED), objective)
    if choice.best is None:
        return TunedRate(share, rate, choice, None, {})
    arrivals = poisson(rate, int(np.clip(rate * seconds, _FEWEST_PROBED, _MOST_PROBED)), seed=1)

    def apply(settings):
        batcher.settings = settings

    best, found = await confirm(
        apply, lambda: batcher(row), choice, arrivals, objective, _FEW, _TURNS
    )
    return TunedRate(share, rate, choice, best, found)


def in_words(tuned: TunedRate, objective: Objective) -> str:
    """What is best at this rate, or why nothing is."""
    at = f"{tuned.rate:,.0f} requests a second ({tuned.share:.0%})"
    if tuned.best is None:
        return f"{at}: {tuned.choice.reason}"
    measured = tuned.measured[tuned.best.settings]
    said = "" if measured.meets(objective) else "; measured, that breaks the bound"
    return (
        f"{at}: {tuned.best.settings}; mean {measured.mean_seconds * 1e3:.1f} ms, 99 of 100 within "
        f"{measured.p99_seconds * 1e3:.1f} ms{said}"
    )


def _in_words(curve):
    times = zip(curve.sizes, curve.batch_seconds, strict=True)
    return "ms by rows: " + ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in times)
