"""Compares predictions with published rates.

Each row is predicted in two ways: from the rate of the fewest devices of the same training, mostly
one device, and from the specification alone, without any measured rate. The constants are fitted
without the rows of its machine, and again without those of its model.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from benchmarks.planner_validation.compute_fitting import compute_constants_without
from benchmarks.planner_validation.fitting import cases_of, constants_without, predicted_rates
from benchmarks.planner_validation.priors import prior_constants
from benchmarks.planner_validation.published import (
    PublishedRate,
    gradients_of,
    input_of,
    pairs,
    read_rates,
    setup_of,
    specified_micro_step_seconds,
)
from benchmarks.planner_validation.published_models import find_model
from kdist.planner.cost.constants import (
    ComputeConstants,
    Constants,
    known_constants,
)
from kdist.planner.cost.step import step_seconds
from kdist.planner.tables.machines import Machine, known_machines, read_machines

WITHIN_NODE = "within a node"
NO_PEER_TO_PEER = "no peer-to-peer"
MANY_NODES = "many nodes"
CLASSES = (WITHIN_NODE, NO_PEER_TO_PEER, MANY_NODES)

# Row -> constants of its prediction; None means kdist's own constants of computation.
_ConstantsOf = Callable[[PublishedRate], tuple[Constants, ComputeConstants | None]]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row and its predicted rate.

    Attributes:
        rate: the published row.
        predicted: examples per second; None where unknown.
        kind: one of `CLASSES`.
    """

    rate: PublishedRate
    predicted: float | None
    kind: str

    @property
    def error(self) -> float:
        """Signed error relative to the published rate; NaN without a prediction."""
        return float("nan") if self.predicted is None else self.predicted / self.rate.rate - 1


@dataclasses.dataclass(frozen=True)
class Validation:
    """Predictions of all rows of a table.

    Attributes:
        without_machine: from a measured rate, with constants fitted without the machine.
        without_model: from a measured rate, with constants fitted without the model.
        specification: all rows from the specification alone, without the machine.
        specification_without_model: all rows from the specification alone, without the model.
        priors_alone: from a measured rate, with the priors.
        priors_specification: all rows from the specification alone, with the priors.
        too_fast: rows that others are predicted from and whose rate exceeds the limit of the model
            of exchange and input, with this limit in examples per second.
        unknown_models: predicted as a network of 25 million parameters on images of 224 pixels.
        reasons: why rows cannot be predicted from their specification, with the number of rows.
    """

    without_machine: tuple[Prediction, ...]
    without_model: tuple[Prediction, ...]
    specification: tuple[Prediction, ...]
    specification_without_model: tuple[Prediction, ...]
    priors_alone: tuple[Prediction, ...]
    priors_specification: tuple[Prediction, ...]
    too_fast: tuple[tuple[PublishedRate, float], ...]
    unknown_models: tuple[str, ...]
    reasons: tuple[tuple[str, int], ...]

    def __str__(self):
        from benchmarks.planner_validation.summary import validation_text

        return validation_text(self)


def mean_error(rows: Sequence[Prediction]) -> float:
    """Returns the mean absolute relative error of the predicted rows; NaN without any."""
    errors = [abs(row.error) for row in rows if row.predicted is not None]
    return sum(errors) / len(errors) if errors else float("nan")


def validate(
    table_path: str | os.PathLike,
    machines_path: str | os.PathLike | None = None,
    constants: Constants | None = None,
) -> Validation:
    """Predicts all rows of a table of measured rates.

    Args:
        table_path: path of a table with the columns of kdist's own `tables/scaling.csv`.
        machines_path: path of a table with the columns of kdist's own `machines.csv`, which adds
            machines to kdist's own and replaces those with the same name.
        constants: constants of exchange and input for all rows. By default kdist's own, fitted
            again without the machine or model of a row if kdist's own rows contain it; constants
            of computation likewise.

    Returns:
        The predictions; `str()` gives the text that `kdist plan --validate` prints.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing, a cell is invalid, a machine is unknown, or no training has
            rows with different numbers of devices.

    Example:

        text = str(validate("scaling.csv"))
        text.splitlines()[-1]  # "whole: …"
    """
    rates = read_rates(table_path)
    machines = known_machines() | (read_machines(machines_path) if machines_path else {})
    _check_machines(rates, machines, table_path)
    found = pairs(rates)
    if not found:
        raise ValueError(
            f"{os.fspath(table_path)} has no training on several numbers of devices; a row is "
            "predicted from one with the same machine, model, framework, gpu, per_gpu_batch, "
            "precision, and data, but fewer n_gpus"
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
    """Returns the class of a row, one of `CLASSES`."""
    setup = setup_of(rate, machines)
    if setup.nodes > 1:
        return MANY_NODES
    return WITHIN_NODE if setup.machine.direct else NO_PEER_TO_PEER


def _check_machines(rates, machines, path):
    unknown = {rate.machine: None for rate in rates if rate.machine not in machines}
    if unknown:
        raise ValueError(
            f"{os.fspath(path)} names machines that are not known: {', '.join(unknown)}; add them "
            "to a table with the columns of kdist/planner/tables/machines.csv and pass that as "
            f"--machines. Known are {', '.join(machines)}"
        )


def _leaving_out(key: str, constants: Constants | None) -> _ConstantsOf:
    """Returns `constants` for all rows, or those fitted without the rows with the same `key`."""
    if constants:
        return lambda rate: (constants, None)

    def constants_of(rate):
        left_out = getattr(rate, key)
        return constants_without(key, left_out), compute_constants_without(key, left_out)

    return constants_of


def _priors(rate):
    """Returns constants that are not fitted to any row."""
    return prior_constants(), prior_constants(ComputeConstants)


def _given(found, machines, constants_of: _ConstantsOf) -> tuple[Prediction, ...]:
    """Predicts each row from another one."""
    groups: dict[Constants, list[int]] = {}
    for i, (_, rate) in enumerate(found):
        groups.setdefault(constants_of(rate)[0], []).append(i)
    predicted: dict[int, float] = {}
    for constants, chosen in groups.items():
        rates = predicted_rates(cases_of([found[i] for i in chosen], machines), constants)
        predicted |= dict(zip(chosen, rates.tolist(), strict=True))
    return tuple(
        Prediction(rate, predicted[i], kind_of(rate, machines)) for i, (_, rate) in enumerate(found)
    )


def _too_fast(found, machines, constants):
    """Returns rows whose rate is impossible even without computation, and the possible rate."""
    bases = list(dict.fromkeys(base for base, _ in found))
    allowed = predicted_rates(cases_of([(base, base) for base in bases], machines), constants)
    pairs_of = zip(bases, allowed.tolist(), strict=True)
    return tuple((base, rate) for base, rate in pairs_of if rate < 0.99 * base.rate)


def _from_specification(rates, machines, constants_of: _ConstantsOf):
    """Predicts all rows from model and machine; returns why some cannot be predicted."""
    predictions: list[Prediction] = []
    reasons: dict[str, int] = {}
    for rate in rates:
        constants, compute = constants_of(rate)
        predicted = None
        try:
            predicted = specified_rate(rate, machines, constants, compute)
        except (ImportError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
        predictions.append(Prediction(rate, predicted, kind_of(rate, machines)))
    return tuple(predictions), tuple(reasons.items())


def specified_rate(
    rate: PublishedRate,
    machines: Mapping[str, Machine],
    constants: Constants,
    compute: ComputeConstants | None = None,
) -> float:
    """Returns the examples per second of a row, predicted without any measured rate.

    Args:
        rate: the row.
        machines: name -> machine.
        constants: constants of exchange and input.
        compute: constants of computation; kdist's own by default.

    Raises:
        ValueError: the arithmetic of the model or the GPU is unknown.
    """
    setup = setup_of(rate, machines)
    seconds = specified_micro_step_seconds(rate, setup, compute)
    return step_seconds(setup, gradients_of(rate), input_of(rate), seconds, constants).rate
