"""The constants of `cost/compute.py`, in `tables/compute_constants.csv`, and what is known of each.

known_compute_constants().convolution_tf32   # share of the peak
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kdist.planner.fitted import check_above_zero
from kdist.planner.tables import Reader, number, read_own_table, text

_TABLE = "compute_constants.csv"
_COLUMNS: Mapping[str, Reader] = {
    "name": text,
    "value": number,
    "prior": number,
    "width_e_folds": number,
    "unit": text,
    "meaning": text,
}


@dataclasses.dataclass(frozen=True)
class ComputeConstants:
    """Numbers above zero; what each means, in which unit, stands in `tables/compute_constants.csv`.

    `python -m kdist.planner.compute_fitting` fits them.

    Raises:
        ValueError: one of them is not above zero.
    """

    convolution_float32: float
    convolution_tf32: float
    convolution_16_bit: float
    matmul_float32: float
    matmul_tensor_cores: float
    before_pascal: float
    filling_gflop_per_layer: float
    moved_share: float
    depthwise_moved_share: float
    xla_share: float
    launch_ms_per_layer: float
    regions_ms: float

    def __post_init__(self):
        check_above_zero(self)


COMPUTE_CONSTANTS = tuple(field.name for field in dataclasses.fields(ComputeConstants))


@functools.cache
def known_compute_constants() -> ComputeConstants:
    """Those that come with kdist."""
    return ComputeConstants(**{name: row["value"] for name, row in _rows().items()})


def prior_compute_constants() -> ComputeConstants:
    """The constants before any fit."""
    return ComputeConstants(**{name: row["prior"] for name, row in _rows().items()})


def prior_widths() -> tuple[float, ...]:
    """Standard deviations of the priors in e-folds, in the order of the attributes."""
    return tuple(_rows()[name]["width_e_folds"] for name in COMPUTE_CONSTANTS)


def _rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_own_table(_TABLE, _COLUMNS)}
