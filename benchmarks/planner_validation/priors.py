"""Priors of the constants of the cost model, from the tables of the constants."""

import dataclasses
from typing import TypeVar

from kdist.planner.cost.constants import COLUMNS, TABLES, ComputeConstants, Constants
from kdist.planner.tables.read import read_own_table

Kind = TypeVar("Kind", Constants, ComputeConstants)


@dataclasses.dataclass(frozen=True)
class Prior:
    """Prior of one constant: its value in the absence of measurements.

    Attributes:
        name: Name of the constant.
        value: Value from a data sheet or from experience.
        width_e_folds: Standard deviation of the value's logarithm.
        unit: Unit of the value.
        meaning: Meaning of the constant.
    """

    name: str
    value: float
    width_e_folds: float
    unit: str
    meaning: str


def names_of(kind: type) -> list[str]:
    """Returns the names of the constants of `Constants` or `ComputeConstants`, in order."""
    return [field.name for field in dataclasses.fields(kind)]


def priors(kind: type = Constants) -> tuple[Prior, ...]:
    """Returns the priors of `Constants` or `ComputeConstants`, in the order of its fields."""
    rows = {row["name"]: row for row in read_own_table(TABLES[kind], COLUMNS)}
    return tuple(
        Prior(name, rows[name]["prior"], *(rows[name][key] for key in list(COLUMNS)[3:]))
        for name in names_of(kind)
    )


def prior_constants(kind: type[Kind] = Constants) -> Kind:  # type: ignore[assignment]
    """Returns the constants before any fit."""
    return kind(*(prior.value for prior in priors(kind)))
