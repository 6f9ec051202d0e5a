"""Fits the constants of exchange and input to published rates.

    python -m benchmarks.planner_validation.fitting  # prints the fitted constants
    # and writes them to kdist/planner/tables/constants.csv
    python -m benchmarks.planner_validation.fitting --write

`benchmarks.planner_validation.least_squares` describes the method.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np

from benchmarks.planner_validation.least_squares import fit_logarithms, replace_values
from benchmarks.planner_validation.priors import priors
from benchmarks.planner_validation.published import (
    PublishedRate,
    gradients_of,
    input_of,
    known_rates,
    pairs,
    setup_of,
)
from kdist.planner.cost.constants import Constants, known_constants
from kdist.planner.cost.setup import CostFeatures, make_features, stack_features
from kdist.planner.cost.update import infer_micro_step, update_seconds
from kdist.planner.tables.machines import Machine, known_machines

# Relative error of published rates.
_ROW_SPREAD = 0.03
# Relative tolerance of the fit's cost, which changes no rate by 0.1 %.
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Cases:
    """Rows to predict, each from the rate of another row.

    Attributes:
        measured: features of the rows with a known rate, arrays.
        measured_rate: their examples per second.
        wanted: features of the rows to predict, arrays.
        wanted_rate: their published examples per second.
    """

    measured: CostFeatures
    measured_rate: np.ndarray
    wanted: CostFeatures
    wanted_rate: np.ndarray


def cases_of(
    row_pairs: Sequence[tuple[PublishedRate, PublishedRate]], machines: Mapping[str, Machine]
) -> Cases:
    """Returns the cases of the row pairs that `pairs` returns.

    Raises:
        ValueError: a machine is not in `machines`.
    """
    both = [[_features(pair[side], machines) for pair in row_pairs] for side in (0, 1)]
    rates = [np.array([pair[side].rate for pair in row_pairs]) for side in (0, 1)]
    return Cases(stack_features(both[0]), rates[0], stack_features(both[1]), rates[1])


def predicted_rates(cases: Cases, constants: Constants) -> np.ndarray:
    """Returns the predicted examples per second of all wanted rows."""
    micro_step = infer_micro_step(cases.measured, cases.measured_rate, constants)
    seconds = sum(update_seconds(cases.wanted, micro_step, constants).values())
    wanted = cases.wanted
    return wanted.devices * wanted.local_batch * wanted.accumulate / seconds


def fit_constants(cases: Cases) -> Constants:
    """Returns the constants that fit the cases best."""

    def log_errors(values):
        return np.log(predicted_rates(cases, Constants(*values)) / cases.wanted_rate)

    values = [prior.value for prior in priors()]
    widths = [prior.width_e_folds for prior in priors()]
    return Constants(*fit_logarithms(log_errors, values, widths, _ROW_SPREAD, ftol=_TOLERANCE))


@functools.cache
def constants_without(key: str, left_out: str) -> Constants:
    """Returns the constants fitted to kdist's own rows except those of one machine or model.

    The fit starts at the priors, as other constants would depend on the rows that are left out.

    Args:
        key: attribute that identifies the rows, "machine" or "family".
        left_out: its value in the rows that are left out.
    """
    rates = known_rates()
    others = [rate for rate in rates if getattr(rate, key) != left_out]
    if len(pairs(others)) == len(pairs(rates)):
        return known_constants()
    return fit_constants(cases_of(pairs(others), known_machines()))


def known_cases() -> Cases:
    """Returns all cases of kdist's own tables."""
    return cases_of(pairs(known_rates()), known_machines())


def main() -> None:
    """Prints the fitted constants, and writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write kdist/planner/tables/constants.csv"
    )
    arguments = parser.parse_args()
    cases = known_cases()
    fitted = fit_constants(cases)
    for prior in priors():
        old, new = (getattr(constants, prior.name) for constants in (known_constants(), fitted))
        sys.stdout.write(f"{prior.name:30} {old:9.4g} -> {new:9.4g} {prior.unit}\n")
    errors = np.abs(predicted_rates(cases, fitted) / cases.wanted_rate - 1)
    sys.stdout.write(
        f"mean absolute error of {len(errors)} rows, in sample: {100 * errors.mean():.2f} %\n"
    )
    if arguments.write:
        replace_values(fitted, resources.files("kdist.planner.tables") / "constants.csv")


def _features(rate, machines):
    return make_features(setup_of(rate, machines), gradients_of(rate), input_of(rate))


if __name__ == "__main__":
    main()
