"""The constants of the cost model, fitted to published rates, and what is known of each besides.

known_constants().network_share   # of the rate of a node's network ports

Values stand in `tables/constants.csv`; `python -m kdist.planner.fitting` fits them again.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence

from kdist.planner.fitted import check_above_zero
from kdist.planner.tables import number, read_own_table, read_table, text


@dataclasses.dataclass(frozen=True)
class Constants:
    """Numbers above zero; what each means, and in which unit, stands in `tables/constants.csv`."""

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


NAMES = tuple(field.name for field in dataclasses.fields(Constants))


@dataclasses.dataclass(frozen=True)
class Prior:
    """What a constant is where no measurement says anything of it.

    Attributes:
        name: of the constant.
        value: of a data sheet or from experience.
        width_e_folds: standard deviation of its logarithm.
        unit: of the value.
        meaning: of the constant.
    """

    name: str
    value: float
    width_e_folds: float
    unit: str
    meaning: str


@functools.cache
def known_constants() -> Constants:
    """Those that come with kdist."""
    return _constants(read_own_table("constants.csv", _COLUMNS), "constants.csv")


def read_constants(path: str | os.PathLike) -> Constants:
    """Those of a file with the columns of kdist's own `constants.csv`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such table, or does not have each constant once.
    """
    return _constants(read_table(path, _COLUMNS), os.fspath(path))


def priors() -> tuple[Prior, ...]:
    """Of all constants, in the order of the attributes of `Constants`."""
    rows = {row["name"]: row for row in read_own_table("constants.csv", _COLUMNS)}
    return tuple(
        Prior(name, rows[name]["prior"], *(rows[name][key] for key in list(_COLUMNS)[3:]))
        for name in NAMES
    )


def prior_constants() -> Constants:
    """The constants as they were before any fit."""
    return Constants(*(prior.value for prior in priors()))


def _constants(rows: Sequence[dict], source: str) -> Constants:
    names = [row["name"] for row in rows]
    missing = [name for name in NAMES if name not in names]
    unknown = [name for name in names if name not in NAMES]
    if missing or unknown or len(names) != len(NAMES):
        raise ValueError(
            f"{source} does not have each constant once: missing {', '.join(missing) or 'none'}, "
            f"not known {', '.join(unknown) or 'none'}, {len(names)} rows for {len(NAMES)}"
        )
    return Constants(**{row["name"]: row["value"] for row in rows})


_COLUMNS = {
    "name": text,
    "value": number,
    "prior": number,
    "width_e_folds": number,
    "unit": text,
    "meaning": text,
}
