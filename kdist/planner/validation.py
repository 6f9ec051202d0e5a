"""How far predictions are from published rates.

  print(validate("scaling.csv"))

A row is predicted in two ways. Given the rate of the fewest devices of the same training, on one
device mostly: there the constants are fitted without any row of its machine, and again without any
of its model. And from the specification alone, without any measured rate.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from kdist.planner import compute_fitting
from kdist.planner.constants import Constants, known_constants, prior_constants
from kdist.planner.cost.compute_constants import (
    ComputeConstants,
    prior_compute_constants,
)
from kdist.planner.cost.step import step_seconds
from kdist.planner.fitting import cases_of, known_without, predicted_rates
from kdist.planner.machines import Machine, known_machines, read_machines
from kdist.planner.published import (
    PublishedRate,
    gradients_of,
    input_of,
    pairs,
    read_rates,
    setup_of,
    specified_micro_step_seconds,
)
from kdist.planner.published_models import find_model

WITHIN_NODE = "within a node"
NO_PEER_TO_PEER = "no peer-to-peer"
MANY_NODES = "many nodes"
CLASSES = (WITHIN_NODE, NO_PEER_TO_PEER, MANY_NODES)

# What a row is predicted with; None stands for the constants of computation that come with kdist.
_Known = Callable[[PublishedRate], tuple[Constants, ComputeConstants | None]]


@dataclasses.dataclass(frozen=True)
class Checked:
    """One row beside what is predicted for it.

    Attributes:
        rate: as published.
        predicted: examples a second; None where nothing can be predicted.
        kind: one of `CLASSES`.
    """

    rate: PublishedRate
    predicted: float | None
    kind: str

    @property
    def error(self) -> float:
        """Relative to what is published, with its sign; NaN where nothing is predicted."""
        return float("nan") if self.predicted is None else self.predicted / self.rate.rate - 1


@dataclasses.dataclass(frozen=True)
class Validation:
    """Predictions of all rows of a table.

    Attributes:
        without_machine: given a measured rate, with constants that know nothing of the machine.
        without_model: the same, with constants that know nothing of the model.
        specification: from the specification alone, of all rows, with constants that know nothing
            of the machine.
        specification_without_model: the same, with constants that know nothing of the model.
        priors_alone: given a measured rate, with nothing fitted.
        priors_specification: from the specification alone, with nothing fitted.
        too_fast: rows that others are predicted from, and the most examples a second that the model
            of exchange and input allows them, which is less than was published.
        unknown_models: predicted as a network of 25 million parameters on images of 224 pixels.
        reasons: why rows cannot be predicted from their specification, and how many.
    """

    without_machine: tuple[Checked, ...]
    without_model: tuple[Checked, ...]
    specification: tuple[Checked, ...]
    specification_without_model: tuple[Checked, ...]
    priors_alone: tuple[Checked, ...]
    priors_specification: tuple[Checked, ...]
    too_fast: tuple[tuple[PublishedRate, float], ...]
    unknown_models: tuple[str, ...]
    reasons: tuple[tuple[str, int], ...]

    def __str__(self):
        from kdist.planner.validation_text import validation_text

        return validation_text(self)


def mean_error(rows: Sequence[Checked]) -> float:
    """Mean absolute relative error of those that can be predicted; NaN where there are none."""
    errors = [abs(row.error) for row in rows if row.predicted is not None]
    return sum(errors) / len(errors) if errors else float("nan")


def validate(
    table_path: str | os.PathLike,
    machines_path: str | os.PathLike | None = None,
    constants: Constants | None = None,
) -> Validation:
    """Predicts all rows of a table of measured rates.

    Args:
        table_path: with the columns of kdist's own `tables/scaling.csv`.
        machines_path: with the columns of `tables/machines.csv`; adds to kdist's own machines, and
            stands for those of the same name.
        constants: of exchange and input, taken for all rows. By default those that come with kdist,
            fitted again without the machine (or model) of a row where kdist's own rows have it;
            those of computation likewise.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a cell is wrong, a machine is not known, or no row has the
            same training on fewer devices beside it.
    """
    rates = read_rates(table_path)
    machines = known_machines() | (read_machines(machines_path) if machines_path else {})
    _check_machines(rates, machines, table_path)
    found = pairs(rates)
    if not found:
        raise ValueError(
            f"{os.fspath(table_path)} has no training on several numbers of devices; a row is "
            "predicted from one with the same machine, model, framework, gpu, per_gpu_batch, "
            "precision and data, but fewer n_gpus"
        )
    no_machine, no_model = (_leaving_out(key, constants) for key in ("machine", "family"))
    specification, reasons = _from_specification(rates, machines, no_machine)
    return Validation(
        without_machine=_given(found, machines, no_machine),
        without_model=_given(found, machines, no_model),
        specification=specification,
        specification_without_model=_from_specification(rates, machines, no_model)[0],
        priors_alone=_given(found, machines, _priors),
        priors_specification=_from_specification(rates, machines, _priors)[0],
        too_fast=_too_fast(found, machines, constants or known_constants()),
        unknown_models=tuple(
            dict.fromkeys(rate.model for rate in rates if find_model(rate.model) is None)
        ),
        reasons=reasons,
    )


def kind_of(rate: PublishedRate, machines: Mapping[str, Machine]) -> str:
    """Which of `CLASSES` a row is in."""
    setup = setup_of(rate, machines)
    if setup.nodes > 1:
        return MANY_NODES
    return WITHIN_NODE if setup.machine.direct else NO_PEER_TO_PEER


def _check_machines(rates, machines, path):
    unknown = {rate.machine: None for rate in rates if rate.machine not in machines}
    if unknown:
        raise ValueError(
            f"{os.fspath(path)} names machines that are not known: {', '.join(unknown)}; add them "
            "to a table with the columns of kdist/planner/tables/machines.csv and give that as "
            f"--machines. Known are {', '.join(machines)}"
        )


def _leaving_out(key: str, constants: Constants | None) -> _Known:
    """Constants that know nothing of the rows with the same `key`, or `constants` for all rows."""
    if constants:
        return lambda rate: (constants, None)

    def known(rate):
        left_out = getattr(rate, key)
        return known_without(key, left_out), compute_fitting.known_without(key, left_out)

    return known


def _priors(rate):
    """Constants that know nothing of any row."""
    return prior_constants(), prior_compute_constants()


def _given(found, machines, known: _Known) -> tuple[Checked, ...]:
    """Each row from another one."""
    groups: dict[Constants, list[int]] = {}
    for i, (_, rate) in enumerate(found):
        groups.setdefault(known(rate)[0], []).append(i)
    predicted: dict[int, float] = {}
    for constants, chosen in groups.items():
        rates = predicted_rates(cases_of([found[i] for i in chosen], machines), constants)
        predicted |= dict(zip(chosen, rates.tolist(), strict=True))
    return tuple(
        Checked(rate, predicted[i], kind_of(rate, machines)) for i, (_, rate) in enumerate(found)
    )


def _too_fast(found, machines, constants):
    """Rows whose published rate no time of computation explains, and what the model allows."""
    bases = list(dict.fromkeys(base for base, _ in found))
    allowed = predicted_rates(cases_of([(base, base) for base in bases], machines), constants)
    pairs_of = zip(bases, allowed.tolist(), strict=True)
    return tuple((base, rate) for base, rate in pairs_of if rate < 0.99 * base.rate)


def _from_specification(rates, machines, known: _Known):
    """All rows from what is known of model and machine, and why some cannot be predicted."""
    checked: list[Checked] = []
    reasons: dict[str, int] = {}
    for rate in rates:
        constants, compute = known(rate)
        predicted = None
        try:
            predicted = specified_rate(rate, machines, constants, compute)
        except (ImportError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
        checked.append(Checked(rate, predicted, kind_of(rate, machines)))
    return tuple(checked), tuple(reasons.items())


def specified_rate(
    rate: PublishedRate,
    machines: Mapping[str, Machine],
    constants: Constants,
    compute: ComputeConstants | None = None,
) -> float:
    """Examples a second of a row, without its own rate or that of any other.

    Args:
        rate: the row.
        machines: by name, that of the row among them.
        constants: of exchange and input.
        compute: of computation; by default those that come with kdist.

    Raises:
        ValueError: nothing is known of the model's or the GPU's arithmetic.
    """
    setup = setup_of(rate, machines)
    seconds = specified_micro_step_seconds(rate, setup, compute)
    return step_seconds(setup, gradients_of(rate), input_of(rate), seconds, constants).rate
