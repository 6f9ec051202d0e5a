"""Fits the constants of computation to published rates of few devices.

    # prints errors and constants
    python -m benchmarks.planner_validation.compute_fitting scaling.csv
    # and writes the constants to kdist/planner/tables/compute_constants.csv
    python -m benchmarks.planner_validation.compute_fitting scaling.csv --write

`benchmarks.planner_validation.least_squares` describes the method.
"""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib import resources

from benchmarks.planner_validation.least_squares import fit_logarithms, replace_values
from benchmarks.planner_validation.priors import names_of, prior_constants, priors
from benchmarks.planner_validation.published import (
    PublishedRate,
    group_rates,
    known_rates,
    micro_step_seconds_on,
    read_rates,
)
from kdist.planner.cost.constants import (
    ComputeConstants,
    known_compute_constants,
)

# Relative error of a published rate for reasons outside of the model; it sets the weight of priors.
_ROW_SPREAD = 0.08


def compute_rates(rates: Sequence[PublishedRate]) -> list[PublishedRate]:
    """Returns the rate of the fewest devices of each training, as the rate of one device.

    Rows with arrays on the host are left out, as input limits them, and so are rows whose model or
    GPU is unknown. Rates of several devices include their exchange.
    """
    fewest = [min(group, key=lambda rate: rate.devices) for group in group_rates(rates)]
    constants = prior_constants(ComputeConstants)
    return [
        dataclasses.replace(rate, rate=rate.rate / rate.devices)
        for rate in fewest
        if "array" not in rate.data and predicted_rate(rate, constants)
    ]


def predicted_rate(rate: PublishedRate, constants: ComputeConstants) -> float | None:
    """Returns the predicted examples per second of one device; None where unknown."""
    seconds = micro_step_seconds_on(rate.gpu, rate, constants)
    return rate.local_batch / seconds if seconds else None


def fit_compute_constants(rates: Sequence[PublishedRate]) -> ComputeConstants:
    """Returns the constants that fit rates of `compute_rates` best."""
    import numpy as np

    measured = np.array([rate.rate for rate in rates])

    def log_errors(values):
        constants = ComputeConstants(*values)
        return np.log(np.array([predicted_rate(rate, constants) for rate in rates]) / measured)

    known = priors(ComputeConstants)
    values, widths = [each.value for each in known], [each.width_e_folds for each in known]
    fitted = fit_logarithms(log_errors, values, widths, _ROW_SPREAD, max_nfev=40)
    return ComputeConstants(*fitted)


@functools.cache
def compute_constants_without(key: str, left_out: str) -> ComputeConstants:
    """Returns the constants fitted to kdist's own rows except those of one machine or model.

    Args:
        key: attribute that identifies the rows, "machine" or "family".
        left_out: its value in the rows that are left out.
    """
    rates = compute_rates(known_rates())
    others = [rate for rate in rates if getattr(rate, key) != left_out]
    return fit_compute_constants(others) if len(others) < len(rates) else known_compute_constants()


def leave_one_out(
    rates: Sequence[PublishedRate], key: Callable[[PublishedRate], str]
) -> list[float]:
    """Returns the rates predicted by constants fitted to the rows with another key."""
    constants = {
        name: fit_compute_constants([rate for rate in rates if key(rate) != name])
        for name in {*map(key, rates)}
    }
    return [predicted_rate(rate, constants[key(rate)]) or math.nan for rate in rates]


def relative_errors(rates: Sequence[PublishedRate], predicted: Sequence[float]) -> list[float]:
    """Returns predicted over published rates, minus one."""
    return [p / rate.rate - 1 for p, rate in zip(predicted, rates, strict=True)]


def report(path: str | os.PathLike) -> tuple[str, ComputeConstants]:
    """Returns (text with the errors and constants of a fit to a table, the constants)."""
    rates = compute_rates(read_rates(path))
    constants = fit_compute_constants(rates)
    runs = {"fitted": [predicted_rate(rate, constants) or math.nan for rate in rates]}
    runs["machine left out"] = leave_one_out(rates, lambda rate: rate.machine)
    runs["model left out"] = leave_one_out(rates, lambda rate: rate.family)
    lines = [f"mean absolute error in percent: {', '.join(runs)}"]
    lines.append(_errors("one device", [rate.devices == 1 for rate in rates], rates, runs))
    for name in dict.fromkeys(rate.machine for rate in rates):
        lines.append(_errors(name, [rate.machine == name for rate in rates], rates, runs))
    errors = relative_errors(rates, runs["machine left out"])
    largest = sorted(zip(errors, rates, strict=True), key=lambda pair: -abs(pair[0]))[:15]
    lines += [f"{100 * error:+6.0f} % {rate}" for error, rate in largest]
    lines += [f"{name:26} {getattr(constants, name):.4g}" for name in names_of(ComputeConstants)]
    return "\n".join(lines), constants


def _errors(name, chosen, rates, runs):
    cells = []
    for predicted in runs.values():
        errors = relative_errors(rates, predicted)
        some = [abs(error) for error, use in zip(errors, chosen, strict=True) if use]
        cells.append(f"{100 * sum(some) / len(some):8.1f}")
    return f"{name:26} {sum(chosen):4} {''.join(cells)}"


def main(arguments: Sequence[str]) -> None:
    """Prints the errors and constants, and writes the constants if asked to."""
    text, constants = report(arguments[0])
    sys.stdout.write(f"{text}\n")
    if "--write" in arguments:
        replace_values(constants, resources.files("kdist.planner.tables") / "compute_constants.csv")


if __name__ == "__main__":
    main(sys.argv[1:])
