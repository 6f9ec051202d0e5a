"""Published training rates, and the set-ups that they were measured on.

A row of a table says in words how it was trained; here is how these words are read.
"""

import csv
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kdist.planner.cost.compute import micro_step_seconds
from kdist.planner.cost.compute_constants import ComputeConstants
from kdist.planner.cost.setup import Gradients, InputWork, Setup
from kdist.planner.machines import Machine
from kdist.planner.published_models import (
    BYTES_PER_NUMBER,
    UNKNOWN_MODEL,
    array_shape,
    family_of,
    find_model,
    workload_name,
)
from kdist.planner.tables import Reader, count, maybe, number, read_own_table, read_table, text

# What is assumed where a table does not say.
DEFAULT_BATCH = 64  # of tensorpack's benchmarks, and of the Keras 2 example measured beside them
DDP_BATCH = 256  # the default of NVIDIA's PyTorch example, whose tables lack the column
PRETRAINING_ACCUMULATION = 64  # where a note says only that there is accumulation
# Sources whose pipeline prepares images in one thread, as their programs show.
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
    """A precision in any of its names, such as "Mixed_Float16", by the one used here ("amp").

    Raises:
        ValueError: it is empty or not known; says which are.
    """
    said = text(cell).lower()
    for name, names in _PRECISIONS.items():
        if said in names:
            return name
    known = ", ".join(name for names in _PRECISIONS.values() for name in names)
    raise ValueError(f"is {cell!r}, where one of {known} is needed")


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
    """One row: how fast a model was trained.

    Attributes:
        machine: by name.
        model: by name.
        framework: and how it was used.
        gpu: as the table names it.
        devices: how many.
        local_batch: examples of one device in one micro-step.
        rate: examples a second of all devices.
        precision: "fp32", "tf32", "fp16", "amp" or "bf16".
        data: "synthetic", "real" or what else is said.
        note: what else is said.
        source: who published it; "" where the table does not say.
        batch_assumed: whether `local_batch` is `default_batch`, as the table does not say.
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
        """The model, whatever it was trained for."""
        return family_of(self.model)

    @property
    def group(self) -> tuple:
        """Rows with the same are the same training on other numbers of devices."""
        named = self.machine, self.model, self.framework, self.gpu
        return *named, self.local_batch, self.precision, self.data

    @property
    def accumulate(self) -> int:
        """Micro-steps of an update, as the note says."""
        return accumulation(self.model, self.note)

    @property
    def real_data(self) -> bool:
        """Whether examples are read and decoded while it trains."""
        made_up = re.search(r"synthetic|fake|dummy|random|array", self.data, re.IGNORECASE)
        return bool(self.data) and not made_up


def read_rates(path: str | os.PathLike) -> list[PublishedRate]:
    """The rows of a CSV file with the columns of kdist's own scaling.csv.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing or a cell is wrong.
    """
    optional = {name: read for name, read in _OPTIONAL.items() if name in column_names(path)}
    return [_rate(row) for row in read_table(path, {**_COLUMNS, **optional})]


def column_names(path: str | os.PathLike) -> list[str]:
    """Those of a CSV file, of which some may be optional.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with Path(path).open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return next(csv.reader(file), [])


def default_batch(framework: str) -> int:
    """Examples of one device in a micro-step where a table does not say: 256 of DDP, else 64."""
    return DDP_BATCH if "DDP" in framework else DEFAULT_BATCH


def accumulation(model: str, note: str) -> int:
    """Micro-steps of an update of a model, as a row's note says."""
    stated = re.search(r"gradient accumulation (?:of )?(\d+)", note)
    if stated:
        return int(stated[1])
    some = "gradient accumulation used" in note and "pretrain" in model
    return PRETRAINING_ACCUMULATION if some else 1


def known_rates() -> list[PublishedRate]:
    """The rows of `tables/scaling.csv`."""
    return [_rate(row) for row in read_own_table("scaling.csv", {**_COLUMNS, **_OPTIONAL})]


def pairs(rates: Iterable[PublishedRate]) -> list[tuple[PublishedRate, PublishedRate]]:
    """Each row behind the one of its group with the fewest devices, which it is predicted from."""
    groups: dict[tuple, list[PublishedRate]] = {}
    for rate in rates:
        groups.setdefault(rate.group, []).append(rate)
    found = []
    for group in groups.values():
        base, *others = sorted(group, key=lambda rate: rate.devices)
        found += [(base, other) for other in others if other.devices != base.devices]
    return found


def gradients_of(rate: PublishedRate) -> Gradients:
    """What is exchanged in an update; in half precision only where all is computed in it."""
    model = find_model(rate.model) or UNKNOWN_MODEL
    size = 2 if rate.precision == "fp16" else 4
    return Gradients(
        bytes=model.parameters * size,
        largest_share=model.largest_share,
        tensors=2 * model.layers,
        weight_bytes=model.parameters * 4,
    )


def input_of(rate: PublishedRate) -> InputWork:
    """What the host does for an example."""
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
    """Devices and how they worked together.

    Raises:
        ValueError: the machine is none of `machines`.
    """
    if rate.machine not in machines:
        raise ValueError(
            f"the machine {rate.machine!r} is not known; add it to a table of machines and name "
            f"that with --machines. Known are {', '.join(machines)}"
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
    """How variables are updated.

    tf_cnn_benchmarks without a word on it has its default, variables spread over the devices.
    """
    said = rate.note + rate.framework
    on_host = "PS-on-CPU" in rate.note and rate.model not in rate.note
    if "parameter_server" in said or on_host:
        return "server_on_host"
    spread = rate.framework.endswith("tf_cnn_benchmarks")
    replicated = re.search(r"replicated|NCCL|all.?reduce", rate.note, re.IGNORECASE)
    return "server_on_devices" if spread and not replicated else "all_reduce"


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
    """How long a device computes in a micro-step, from its data sheet.

    Args:
        rate: the row; its own rate is not looked at.
        setup: that of the row, by `setup_of`.
        compute: of computation; by default those that come with kdist.

    Raises:
        ValueError: nothing is known of the model's or the GPU's arithmetic.
    """
    gpu = rate.gpu or setup.machine.gpu
    seconds = micro_step_seconds(
        workload_name(rate.model, rate.data),
        gpu,
        rate.precision or "fp32",
        rate.local_batch,
        rate.framework,
        accumulate=rate.accumulate,
        constants=compute,
    )
    if seconds is None:
        raise ValueError(f"the time of {rate.model} on {gpu} in {rate.precision} is not known")
    return seconds
