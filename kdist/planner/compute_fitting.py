"""Fits the constants of `cost/compute.py` to published rates, and says how far they are off.

    python -m kdist.planner.compute_fitting scaling.csv            # prints errors and constants
    python -m kdist.planner.compute_fitting scaling.csv --write    # and replaces the table's values

How: see `kdist.planner.fitted`.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from kdist.planner.cost.compute import micro_step_seconds
from kdist.planner.cost.compute_constants import (
    COMPUTE_CONSTANTS,
    ComputeConstants,
    known_compute_constants,
    prior_compute_constants,
    prior_widths,
)
from kdist.planner.fitted import fit_logarithms, replace_values
from kdist.planner.published import accumulation, default_batch, precision_name
from kdist.planner.published_models import family_of, workload_name
from kdist.planner.tables import Reader, count, maybe, number, read_table, text

# What a published rate may be off by for reasons of its own; sets how strong priors are.
ROW_SPREAD = 0.08
_TABLE = "compute_constants.csv"
_COLUMNS: Mapping[str, Reader] = {
    "machine": text,
    "model": text,
    "framework": text,
    "gpu": text,
    "n_gpus": count,
    "per_gpu_batch": maybe(number),
    "examples_per_s": number,
    "precision": precision_name,
    "data": str,
    "note": str,
}


@dataclasses.dataclass(frozen=True)
class Rate:
    """A published rate of few devices: the fewest of a group that differs in nothing else.

    Attributes:
        machine: its name in the table.
        model: as published.
        gpu: as published.
        precision: as `precision_name` gives it.
        framework: as published.
        devices: how many.
        batch: examples of a device in a micro-step.
        accumulate: micro-steps of an update.
        examples_per_second: of one device.
        data: as published.
    """

    machine: str
    model: str
    gpu: str
    precision: str
    framework: str
    devices: int
    batch: float
    accumulate: int
    examples_per_second: float
    data: str = ""

    @property
    def family(self) -> str:
        """The model, whatever it was trained for."""
        return family_of(self.model)

    def predicted(self, constants: ComputeConstants) -> float | None:
        """Examples a second; None where too little is known."""
        seconds = micro_step_seconds(
            workload_name(self.model, self.data),
            self.gpu,
            self.precision,
            self.batch,
            self.framework,
            accumulate=self.accumulate,
            constants=constants,
        )
        return self.batch / seconds if seconds else None


def read_rates(path) -> list[Rate]:
    """The rates of fewest devices of a table such as scaling.csv.

    Left out are those of arrays on the host, where input is the limit, and those of which the
    model or the GPU is not known. Rates of several devices count a device; what their exchange
    takes stays in.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it lacks columns, or cells are not what they have to be.
    """
    groups: dict[tuple, dict] = {}
    same = ("machine", "model", "framework", "per_gpu_batch", "precision", "data", "gpu")
    for row in read_table(path, _COLUMNS):
        first = groups.setdefault(tuple(row[name] for name in same), row)
        if row["n_gpus"] < first["n_gpus"]:
            first.update(row)
    rates = [_rate(row) for row in groups.values() if "array" not in row["data"]]
    start = prior_compute_constants()
    return [rate for rate in rates if rate.predicted(start)]


def fit(rates: Sequence[Rate]) -> ComputeConstants:
    """The constants that fit these rates best."""
    import numpy as np

    measured = np.array([rate.examples_per_second for rate in rates])

    def log_errors(values):
        constants = ComputeConstants(*values)
        return np.log(np.array([rate.predicted(constants) for rate in rates]) / measured)

    priors = dataclasses.astuple(prior_compute_constants())
    found = fit_logarithms(log_errors, priors, prior_widths(), ROW_SPREAD, max_nfev=40)
    return ComputeConstants(*found)


def fit_without(rates: Sequence[Rate], key: str, left_out: str) -> ComputeConstants:
    """The constants fitted to all rates but some, such as those of a machine.

    Args:
        rates: all of them.
        key: the attribute that says what a rate belongs to, "machine" or "family".
        left_out: its value in the rates that are left out.
    """
    return fit([rate for rate in rates if getattr(rate, key) != left_out])


@functools.cache
def known_without(key: str, left_out: str) -> ComputeConstants:
    """Constants fitted to kdist's own rows but some; see `fit_without`."""
    with resources.as_file(resources.files(__package__) / "tables" / "scaling.csv") as path:
        rates = read_rates(path)
    if left_out not in {getattr(rate, key) for rate in rates}:
        return known_compute_constants()
    return fit_without(rates, key, left_out)


def leave_one_out(rates: Sequence[Rate], key: Callable[[Rate], str]) -> list[float]:
    """Each rate, predicted by constants fitted to those with another key."""
    constants = {
        name: fit([rate for rate in rates if key(rate) != name]) for name in {*map(key, rates)}
    }
    return [rate.predicted(constants[key(rate)]) or math.nan for rate in rates]


def relative_errors(rates: Sequence[Rate], predicted: Sequence[float]) -> list[float]:
    """Predicted over published, less one."""
    return [p / rate.examples_per_second - 1 for p, rate in zip(predicted, rates, strict=True)]


def main(arguments: Sequence[str]) -> None:
    """Prints errors within the fit and left out, and the constants."""
    rates = read_rates(arguments[0])
    constants = fit(rates)
    runs = {"fitted": [rate.predicted(constants) or math.nan for rate in rates]}
    runs["machine left out"] = leave_one_out(rates, lambda rate: rate.machine)
    runs["model left out"] = leave_one_out(rates, lambda rate: rate.family)
    print(f"mean absolute error in per cent: {', '.join(runs)}")
    _print_errors("one device", [rate.devices == 1 for rate in rates], rates, runs)
    for name in dict.fromkeys(rate.machine for rate in rates):
        _print_errors(name, [rate.machine == name for rate in rates], rates, runs)
    errors = relative_errors(rates, runs["machine left out"])
    for error, rate in sorted(zip(errors, rates, strict=True), key=lambda x: -abs(x[0]))[:15]:
        print(f"{100 * error:+6.0f} % {rate}")
    for name in COMPUTE_CONSTANTS:
        print(f"{name:26} {getattr(constants, name):.4g}")
    if "--write" in arguments:
        path = str(resources.files(__package__) / "tables" / _TABLE)
        replace_values(constants, path)


def _print_errors(name, chosen, rates, runs):
    cells = []
    for predicted in runs.values():
        errors = relative_errors(rates, predicted)
        some = [abs(error) for error, use in zip(errors, chosen, strict=True) if use]
        cells.append(f"{100 * sum(some) / len(some):8.1f}")
    print(f"{name:26} {sum(chosen):4} {''.join(cells)}")


def _rate(row):
    model, framework = row["model"], row["framework"]
    return Rate(
        machine=row["machine"],
        model=model,
        gpu=row["gpu"],
        precision=row["precision"],
        framework=framework,
        devices=row["n_gpus"],
        batch=row["per_gpu_batch"] or default_batch(framework),
        accumulate=accumulation(model, row["note"]),
        examples_per_second=row["examples_per_s"] / row["n_gpus"],
        data=row["data"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
