"""Fits the constants of the cost model to published rates.

  python -m kdist.planner.fitting          # prints what it finds
  python -m kdist.planner.fitting --write  # and writes it to tables/constants.csv

How: see `kdist.planner.fitted`.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kdist.planner.constants import (
    Constants,
    known_constants,
    priors,
)
from kdist.planner.cost.facts import Facts, facts_of, stack
from kdist.planner.cost.update import micro_step_of, update_seconds
from kdist.planner.fitted import fit_logarithms, replace_values
from kdist.planner.machines import Machine, known_machines
from kdist.planner.published import (
    PublishedRate,
    gradients_of,
    input_of,
    known_rates,
    pairs,
    setup_of,
)

RATE_ERROR = 0.03  # what a published rate may be off by itself
TOLERANCE = 1e-5  # of the cost: what less changes no rate by a tenth of a per cent


@dataclasses.dataclass(frozen=True)
class Cases:
    """Rows to predict, each from another one.

    Attributes:
        measured: what the rates are known of, arrays.
        measured_rate: examples a second of these.
        wanted: what rates are wanted of, arrays.
        wanted_rate: as published.
    """

    measured: Facts
    measured_rate: np.ndarray
    wanted: Facts
    wanted_rate: np.ndarray


def cases_of(
    found: Sequence[tuple[PublishedRate, PublishedRate]], machines: Mapping[str, Machine]
) -> Cases:
    """Rows as `pairs` gives them.

    Raises:
        ValueError: a machine is none of `machines`.
    """
    both = [[_facts(pair[side], machines) for pair in found] for side in (0, 1)]
    rates = [np.array([pair[side].rate for pair in found]) for side in (0, 1)]
    return Cases(stack(both[0]), rates[0], stack(both[1]), rates[1])


def predicted_rates(cases: Cases, constants: Constants) -> np.ndarray:
    """Examples a second of all rows that are wanted."""
    micro_step = micro_step_of(cases.measured, cases.measured_rate, constants)
    seconds = sum(update_seconds(cases.wanted, micro_step, constants).values())
    wanted = cases.wanted
    return wanted.devices * wanted.local_batch * wanted.accumulate / seconds


def fit(cases: Cases) -> Constants:
    """The constants with which the cases come out best.

    See `kdist.planner.fitted`.
    """

    def log_errors(values):
        return np.log(predicted_rates(cases, Constants(*values)) / cases.wanted_rate)

    centre = [prior.value for prior in priors()]
    widths = [prior.width_e_folds for prior in priors()]
    return Constants(*fit_logarithms(log_errors, centre, widths, RATE_ERROR, ftol=TOLERANCE))


def fit_without(rates: Sequence[PublishedRate], key: str, left_out: str) -> Constants:
    """The constants fitted to all rows but some, such as those of a machine.

    It begins at the priors: other constants would already have seen what is left out.

    Args:
        rates: all rows, of kdist's own machines.
        key: the attribute that says what a row belongs to, "machine" or "family".
        left_out: its value in the rows that are left out.
    """
    others = [rate for rate in rates if getattr(rate, key) != left_out]
    return fit(cases_of(pairs(others), known_machines()))


@functools.cache
def known_without(key: str, left_out: str) -> Constants:
    """Constants fitted to kdist's own rows but some; see `fit_without`."""
    rates = known_rates()
    if left_out not in {getattr(rate, key) for _, rate in pairs(rates)}:
        return known_constants()
    return fit_without(rates, key, left_out)


def known_cases() -> Cases:
    """All that can be learned from kdist's own tables."""
    return cases_of(pairs(known_rates()), known_machines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write tables/constants.csv")
    arguments = parser.parse_args()
    cases = known_cases()
    found = fit(cases)
    for prior in priors():
        values = [getattr(constants, prior.name) for constants in (known_constants(), found)]
        print(f"{prior.name:30} {values[0]:9.4g} -> {values[1]:9.4g} {prior.unit}")
    off = np.abs(predicted_rates(cases, found) / cases.wanted_rate - 1)
    print(f"{len(off)} rows are off by {100 * off.mean():.2f} % on average, in sample")
    if arguments.write:
        replace_values(found, Path(__file__).parent / "tables" / "constants.csv")


def _facts(rate, machines):
    return facts_of(setup_of(rate, machines), gradients_of(rate), input_of(rate))


if __name__ == "__main__":
    main()
