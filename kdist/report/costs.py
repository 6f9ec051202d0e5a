"""What a run cost.

cost_usd(run, parse_prices(["2.1"])), cost_usd(run, parse_prices(["first=2.1", "second=0.4"]))
"""

import math
from collections.abc import Mapping, Sequence

from kdist.report.runs import Run

# US dollars an hour of all machines of a run: of every run, or by the run's name.
Prices = float | Mapping[str, float] | None


def parse_prices(texts: Sequence[str]) -> Prices:
    """Prices as a command line gives them: one number, or NAME=number for each run.

    Raises:
        ValueError: a text is neither, or both are mixed.
    """
    named = [text.rpartition("=") for text in texts]
    if not texts:
        return None
    if len(texts) == 1 and not named[0][1]:
        return _price(texts[0])
    for name, _, price in named:
        if not name:
            raise ValueError(
                f"--price_usd_per_hour: {price!r} has no name; give one number for all runs, or "
                "NAME=2.1,NAME2=0.4 with the runs' names"
            )
    return {name: _price(price) for name, _, price in named}


def _price(text):
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ValueError(
            f"--price_usd_per_hour: {text!r} is no price; give US dollars an hour, such as 2.1, or "
            "NAME=2.1,NAME2=0.4"
        )
    return price


def check_names(prices: Prices, runs: Sequence[Run]):
    """Raises a ValueError if a price is of no run."""
    names = [run.name for run in runs]
    for name in prices if isinstance(prices, Mapping) else ():
        if name not in names:
            raise ValueError(
                f"--price_usd_per_hour: there is no run {name!r}; the runs are {', '.join(names)}"
            )


def cost_usd(run: Run, prices: Prices) -> float | None:
    """US dollars: price times hours, or else what the summary says; None if unknown."""
    price = prices.get(run.name) if isinstance(prices, Mapping) else prices
    if price is None:
        return run.figure("cost_usd")
    return None if run.seconds is None else price * run.seconds / 3600
