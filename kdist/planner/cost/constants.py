"""Constants of the cost model, fitted to published rates, with their priors.

    known_constants().network_share               # fraction of a node's network bandwidth
    known_compute_constants().convolution_tf32    # fraction of the GPU's peak

The values, their units, and their meanings are in `tables/constants.csv` and
`tables/compute_constants.csv`. `python -m benchmarks.planner_validation.fitting` and
`python -m benchmarks.planner_validation.compute_fitting` fit them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeVar

from kdist.planner.tables.read import check_above_zero, number, read_own_table, text


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants of the scaling model (`cost/update.py`), described in `tables/constants.csv`.

    Raises:
        ValueError: If a constant is not above zero.
    """

    nvlink_share: float
    pcie_share: float
    staged_host_share: float
    staged_device_share: float
    shared_port_devices: float
    socket_share: float
    host_server_share: float
    network_share: float
    host_server_overlap: float
    horovod_ms: float
    straggling_per_doubling: float
    paired_dies_slowdown: float
    node_spread: float
    hop_ms: float
    decode_core_ms_per_megapixel: float
    resize_core_ms_per_megapixel: float
    policy_core_ms_per_megapixel: float
    policy_exponent: float
    horovod_process_cores: float
    masks_core_ms: float
    recent_core_speed: float
    dali_cpu_share: float
    in_graph_copy_gb_s: float
    soft_maximum_exponent: float
    dispatch_ms_per_tensor: float
    cores_per_vcpu: float
    numpy_feed_ns_per_byte: float

    def __post_init__(self):
        check_above_zero(self)


@dataclasses.dataclass(frozen=True)
class ComputeConstants:
    """Constants of the compute time (`cost/compute.py`), see `tables/compute_constants.csv`.

    Raises:
        ValueError: If a constant is not above zero.
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


Kind = TypeVar("Kind", Constants, ComputeConstants)

TABLES = {Constants: "constants.csv", ComputeConstants: "compute_constants.csv"}
COLUMNS = {
    "name": text,
    "value": number,
    "prior": number,
    "width_e_folds": number,
    "unit": text,
    "meaning": text,
}


@functools.cache
def known_constants() -> Constants:
    """Returns kdist's constants of the scaling model."""
    return _known(Constants)


@functools.cache
def known_compute_constants() -> ComputeConstants:
    """Returns kdist's constants of the compute time."""
    return _known(ComputeConstants)


def _known(kind: type[Kind]) -> Kind:
    return make_constants(kind, read_own_table(TABLES[kind], COLUMNS), TABLES[kind])


def make_constants(kind: type[Kind], rows: Sequence[dict], source: str) -> Kind:
    """Returns the constants of the rows of a table.

    Raises:
        ValueError: If the table `source` does not have each constant once.
    """
    names, known = [row["name"] for row in rows], [each.name for each in dataclasses.fields(kind)]
    missing = [name for name in known if name not in names]
    unknown = [name for name in names if name not in known]
    if missing or unknown or len(names) != len(known):
        raise ValueError(
            f"{source} must have each constant once: missing {', '.join(missing) or 'none'}, "
            f"not known {', '.join(unknown) or 'none'}, {len(names)} rows for {len(known)}"
        )
    return kind(**{row["name"]: row["value"] for row in rows})
