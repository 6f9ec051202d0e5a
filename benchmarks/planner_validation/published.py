"""Published training rates, and the setups that they were measured on.

Tables describe trainings in words; this module interprets them.
"""

import csv
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.planner_validation import TABLES
from benchmarks.planner_validation.published_models import (
    BYTES_PER_NUMBER,
    UNKNOWN_MODEL,
    array_shape,
    family_of,
    find_model,
    published_compute_seconds,
    workload_name,
)
from kdist.planner.cost.constants import ComputeConstants
from kdist.planner.cost.setup import Gradients, InputWork, Setup
from kdist.planner.tables.machines import Machine
from kdist.planner.tables.read import Reader, count, maybe, number, read_table, text

# Defaults where a table has no value.
DEFAULT_BATCH = 64  # of tensorpack's benchmarks, and of the Keras 2 example measured with them
DDP_BATCH = 256  # the default of NVIDIA's PyTorch example, whose tables lack the column
PRETRAINING_ACCUMULATION = 64  # if a note mentions accumulation without a number
# Sources whose programs prepare images in one thread.
_ONE_THREAD = {
    "sayakpaul/tf.keras-Distributed-Training": "Dataset.map without num_parallel_calls (notebooks)",
}
_PRECISIONS = {
    "fp32": ("fp32", "float32"),
    "tf32": ("tf32",),
    "fp16": ("fp16", "float16", "half"),
    "amp": ("amp", "mixed_float16", "mixed"),
    "bf16": ("bf16", "bfloat16", "mixed_bfloat16"),
}


def precision_name(cell: str) -> str:
    """Returns the canonical name of a precision, such as "amp" for "Mixed_Float16".

    Raises:
        ValueError: the cell is empty or unknown.
    """
    cell_name = text(cell).lower()
    for name, names in _PRECISIONS.items():
        if cell_name in names:
            return name
    known = ", ".join(name for names in _PRECISIONS.values() for name in names)
    raise ValueError(f"is {cell!r}, but must be one of {known}")


_COLUMNS: Mapping[str, Reader] = {
    "machine": text,
    "model": text,
    "framework": maybe(text),
    "gpu": maybe(text),
    "n_gpus": count,
    "per_gpu_batch": maybe(number),
    "examples_per_s": number,
    "precision": maybe(precision_name),
    "data": maybe(text),
    "note": maybe(text),
}
_OPTIONAL: Mapping[str, Reader] = {"source": maybe(text)}


@dataclasses.dataclass(frozen=True)
class PublishedRate:
    """One row: the training rate of a model.

    Attributes:
        machine: name of the machine.
        model: name of the model.
        framework: name of the framework, and how it was used.
        gpu: name of the GPU in the table.
        devices: number of devices.
        local_batch: examples per device and micro-step.
        rate: examples per second of all devices.
        precision: "fp32", "tf32", "fp16", "amp" or "bf16".
        data: "synthetic", "real", or another description.
        note: other information.
        source: who published it; "" where the table does not tell.
        batch_assumed: whether `local_batch` is `default_batch`, as the table has none.
    """

    machine: str
    model: str
    framework: str
    gpu: str
    devices: int
    local_batch: float
    rate: float
    precision: str
    data: str
    note: str
    source: str = ""
    batch_assumed: bool = False

    @property
    def family(self) -> str:
        """Name of the model without its data set and image size."""
        return family_of(self.model)

    @property
    def group(self) -> tuple:
        """Key of the training; rows of one group differ in the number of devices."""
        named = self.machine, self.model, self.framework, self.gpu
        return *named, self.local_batch, self.precision, self.data

    @property
    def accumulate(self) -> int:
        """Micro-steps per update, from the note."""
        return accumulation(self.model, self.note)

    @property
    def real_data(self) -> bool:
        """True if examples are read and decoded during training."""
        synthetic = re.search(r"synthetic|fake|dummy|random|array", self.data, re.IGNORECASE)
        return bool(self.data) and not synthetic


def read_rates(path: str | os.PathLike) -> list[PublishedRate]:
    """Returns the rows of a CSV file with the columns of kdist's own `scaling.csv`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing or a cell is invalid.
    """
    optional = {name: read for name, read in _OPTIONAL.items() if name in column_names(path)}
    return [_rate(row) for row in read_table(path, {**_COLUMNS, **optional})]


def column_names(path: str | os.PathLike) -> list[str]:
    """Returns the header of a CSV file.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    with Path(path).open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return next(csv.reader(file), [])


def default_batch(framework: str) -> int:
    """Returns the examples per device and micro-step where a table has none."""
    return DDP_BATCH if "DDP" in framework else DEFAULT_BATCH


def accumulation(model: str, note: str) -> int:
    """Returns the micro-steps per update of a model, from the note of its row."""
    stated = re.search(r"gradient accumulation (?:of )?(\d+)", note)
    if stated:
        return int(stated[1])
    some = "gradient accumulation used" in note and "pretrain" in model
    return PRETRAINING_ACCUMULATION if some else 1


def known_rates() -> list[PublishedRate]:
    """Returns the rows of `tables/scaling.csv`."""
    return [_rate(row) for row in read_table(TABLES / "scaling.csv", {**_COLUMNS, **_OPTIONAL})]


def group_rates(rates: Iterable[PublishedRate]) -> list[list[PublishedRate]]:
    """Returns the rows of each training, which differ in the number of devices."""
    groups: dict[tuple, list[PublishedRate]] = {}
    for rate in rates:
        groups.setdefault(rate.group, []).append(rate)
    return list(groups.values())


def pairs(rates: Iterable[PublishedRate]) -> list[tuple[PublishedRate, PublishedRate]]:
    """Returns (row with the fewest devices of its group, another row of it) for each other row."""
    found = []
    for group in group_rates(rates):
        base, *others = sorted(group, key=lambda rate: rate.devices)
        found += [(base, other) for other in others if other.devices != base.devices]
    return found


def gradients_of(rate: PublishedRate) -> Gradients:
    """Returns the gradients of a row; only those of "fp16" are in half precision."""
    model = find_model(rate.model) or UNKNOWN_MODEL
    size = 2 if rate.precision == "fp16" else 4
    return Gradients(
        bytes=model.parameters * size,
        largest_share=model.largest_share,
        tensors=2 * model.layers,
        weight_bytes=model.parameters * 4,
    )


def input_of(rate: PublishedRate) -> InputWork:
    """Returns the work of the host for each example of a row."""
    model = find_model(rate.model) or UNKNOWN_MODEL
    arrays = array_shape(f"{rate.model} {rate.data}")
    if arrays:
        side, channels = arrays
        decoder = "numpy" if "numpy" in rate.framework else "none"
        return InputWork(host_bytes=side * side * channels * BYTES_PER_NUMBER, decoder=decoder)
    if "numpy" in rate.framework:
        return InputWork(model_megapixels=model.model_megapixels, decoder="numpy")
    if "array" in rate.data:
        return InputWork(host_bytes=model.model_megapixels * 12e6)
    if not (rate.real_data and model.source_megapixels):
        return InputWork()
    return InputWork(
        source_megapixels=model.source_megapixels,
        model_megapixels=model.model_megapixels,
        policy=model.policy,
        masks=model.masks,
        decoder="dali" if "DALI" in rate.framework + rate.data else "tf.data",
        threads=1 if rate.source in _ONE_THREAD else None,
    )


def setup_of(rate: PublishedRate, machines: Mapping[str, Machine]) -> Setup:
    """Returns the devices of a row, and how they update variables.

    Raises:
        ValueError: the machine is not in `machines`.
    """
    if rate.machine not in machines:
        raise ValueError(
            f"the machine {rate.machine!r} is not known; add it to a table of machines and pass "
            f"that as --machines. Known are {', '.join(machines)}"
        )
    library = _library(rate.framework)
    return Setup(
        machine=machines[rate.machine],
        devices=rate.devices,
        local_batch=rate.local_batch,
        accumulate=rate.accumulate,
        update=_update(rate),
        library=library,
        in_graph=library == "tf.distribute" and "numpy" not in rate.framework,
        nccl1=bool(re.match(r"TF1(\.[0-4])? tf_cnn|tensorpack 0\.[0-5]\b", rate.framework)),
    )


def _library(framework):
    if "horovod" in framework.lower():
        return "horovod"
    return "ddp" if re.search(r"DDP|PyTorch", framework) else "tf.distribute"


def _update(rate):
    """Returns how variables are updated.

    The default of tf_cnn_benchmarks is variables that are distributed over the devices.
    """
    description = rate.note + rate.framework
    on_host = "PS-on-CPU" in rate.note and rate.model not in rate.note
    if "parameter_server" in description or on_host:
        return "server_on_host"
    distributed = rate.framework.endswith("tf_cnn_benchmarks")
    replicated = re.search(r"replicated|NCCL|all.?reduce", rate.note, re.IGNORECASE)
    return "server_on_devices" if distributed and not replicated else "all_reduce"


def _rate(row: Mapping[str, Any]) -> PublishedRate:
    words = ("framework", "gpu", "precision", "data", "note", "source")
    cells = {name: row.get(name) or "" for name in words}
    return PublishedRate(
        machine=row["machine"],
        model=row["model"],
        devices=row["n_gpus"],
        local_batch=row["per_gpu_batch"] or default_batch(cells["framework"]),
        rate=row["examples_per_s"],
        batch_assumed=row["per_gpu_batch"] is None,
        **cells,
    )


def specified_micro_step_seconds(
    rate: PublishedRate, setup: Setup, compute: ComputeConstants | None = None
) -> float:
    """Returns the compute time of a micro-step on one device, from the data sheet of the GPU.

    Args:
        rate: the row, whose own rate is not used.
        setup: setup of the row, from `setup_of`.
        compute: constants of computation; kdist's own by default.

    Raises:
        ValueError: the arithmetic of the model or the GPU is unknown.
    """
    gpu = rate.gpu or setup.machine.gpu
    seconds = micro_step_seconds_on(gpu, rate, compute)
    if seconds is None:
        raise ValueError(f"the time of {rate.model} on {gpu} in {rate.precision} is not known")
    return seconds


def micro_step_seconds_on(
    gpu: str, rate: PublishedRate, compute: ComputeConstants | None = None
) -> float | None:
    """Returns the compute time of a row's micro-step on a GPU; None where unknown."""
    return published_compute_seconds(
        workload_name(rate.model, rate.data),
        gpu,
        rate.precision or "fp32",
        rate.local_batch,
        rate.framework,
        accumulate=rate.accumulate,
        constants=compute,
    )
