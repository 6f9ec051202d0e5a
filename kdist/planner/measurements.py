"""Measurements of the user: a table of runs, and calibrations of machines.

    table = Measurements.read("~/.kdist/measurements.csv")
    table.correction("resnet50", "V100 SXM2 16GB", "float32")    # 1.12: 12 % longer than predicted

The table corrects the next predictions. A row is one run: the predicted compute time of a
micro-step, and the one that follows from the measured rate.

    calibration = Calibration.from_json(pathlib.Path("machine.json").read_text())
    calibrated_step_seconds(workload, calibration, local_batch=16, replicas=2).seconds

A calibration predicts the time of a step on a machine without published data. The terms of a step
are counted (`work_terms`) and multiplied by the cost of each in the small networks that
`kdist.calibrate` has timed on that machine: a linear model with nonnegative coefficients. The rate
of convolutions and products depends on the number of weights of a layer, as narrow layers leave
vector units idle. Nothing here imports TensorFlow.
"""

import csv
import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping

from kdist.json_text import parse_json
from kdist.planner.tables.read import number, read_table, text
from kdist.planner.workload.layers import LayerWork, Workload

DEFAULT_PATH = "~/.kdist/measurements.csv"

# Between these numbers of weights of a layer, seconds per FLOP are interpolated over the logarithm.
# Beyond them they are constant. Other kinds have one rate.
RATES_AT_WEIGHTS = {"convolution": (1e3, 1e4, 1e5, 1e6), "matmul": (1e4, 1e6)}

# Weights of one layer that stay in a core's own cache, in float32.
CACHED_WEIGHTS = 100_000


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measured and predicted rate of one run; a row of the table.

    The predictions are made without any measurement. `micro_step_seconds` is the compute time that
    follows from the measured rate.
    """

    as_of: str
    model: str
    gpu: str
    precision: str
    machine: str
    strategy: str
    replicas: float
    local_batch: float
    examples_per_second: float
    predicted_examples_per_second: float
    micro_step_seconds: float
    predicted_micro_step_seconds: float

    @property
    def log_error(self) -> float:
        """Logarithm of measured / predicted compute time."""
        return math.log(self.micro_step_seconds / self.predicted_micro_step_seconds)


_COLUMNS = {
    field.name: text if field.type is str else number for field in dataclasses.fields(Measurement)
}


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Table of measured runs.

    Example:

        >>> Measurements().correction("resnet50", "V100 SXM2 16GB", "float32")
        1.0

    Args:
        rows: All rows. Defaults to none.
    """

    rows: tuple[Measurement, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike = DEFAULT_PATH) -> "Measurements":
        """Reads the table at `path`; a missing file is an empty table.

        Raises:
            ValueError: If the file is no such table.
        """
        path = pathlib.Path(path).expanduser()
        if not path.exists():
            return cls()
        return cls(tuple(Measurement(**row) for row in read_table(path, _COLUMNS)))

    def correction(self, model: str, gpu: str, precision: str) -> float:
        """Returns the factor by which to multiply the predicted compute time.

        It is the geometric mean over runs of the same model, GPU, and precision. Without any, other
        models on this GPU contribute what they share: ln f = Σ ln(measured / predicted) / (n + 1),
        half of it for one run, two thirds for two.
        """
        on_gpu = [row for row in self.rows if row.gpu == gpu]
        same = [row for row in on_gpu if (row.model, row.precision) == (model, precision)]
        if same:
            return math.exp(sum(row.log_error for row in same) / len(same))
        return math.exp(sum(row.log_error for row in on_gpu) / (len(on_gpu) + 1))


def add_measurement(
    measurement: Measurement, path: str | os.PathLike = DEFAULT_PATH
) -> pathlib.Path:
    """Appends a row to the table at `path`, and creates the table if needed.

    Returns:
        The path.

    Raises:
        ValueError: If the file is no such table.
    """
    path = pathlib.Path(path).expanduser()
    Measurements.read(path)  # raises before a file of another kind is changed
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(_COLUMNS))
        if is_new:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(measurement))
    return path


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Costs of the terms of a training step on one machine.

    Attributes:
        machine: Name of the CPU or GPU.
        replicas: Devices that trained together under `mirrored` in the measurement and shared the
            machine's cores and memory; 1 for `one_device`.
        precision: Dtype policy of the measurement.
        seconds_per: Name of a term, see `work_terms` -> seconds for one unit of it on all replicas
            at the same time. The cost of weights includes their exchange and update.
        probe_error: Median relative error of the measured networks, each predicted from the others
            alone.
        max_probe_error: Largest of these errors.
    """

    machine: str
    replicas: int
    precision: str
    seconds_per: Mapping[str, float]
    probe_error: float
    max_probe_error: float

    def to_json(self) -> str:
        """Returns the calibration as JSON, for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str | os.PathLike = "this text") -> "Calibration":
        """Returns the calibration that `to_json` wrote; `source` names it in error messages.

        Raises:
            ValueError: If `text` is no calibration, or a cost in it is no number from 0 on.
        """
        try:
            calibration = cls(**parse_json(text))
            costs = dict(calibration.seconds_per)
            bad = [name for name, cost in costs.items() if not (0 <= cost < math.inf)]
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{source} holds no calibration ({error!r}); write it with Calibration.to_json()"
            ) from error
        if bad or not costs:
            what = f"{bad[0]!r} costs {costs[bad[0]]!r}" if bad else "nothing costs anything"
            raise ValueError(
                f"{source}: {what}; seconds are numbers from 0 on: calibrate the machine again "
                "with kdist.calibrate.calibrate()"
            )
        return calibration


@dataclasses.dataclass(frozen=True)
class CalibratedStep:
    """Predicted time of a training step, in seconds.

    `parts` is the time by kind of layers, of `"weights"` (exchange and update), and of `"step"`
    (overhead of any model).
    """

    seconds: float
    parts: Mapping[str, float]


def calibrated_step_seconds(
    workload: Workload,
    calibration: Calibration,
    local_batch: int,
    replicas: int = 1,
    precision: str = "float32",
) -> CalibratedStep:
    """Returns the time of a training step on the calibrated machine.

    Assumes that input is never late, and the replicas, the precision, and the update of the
    calibration: SGD with momentum.

    Raises:
        ValueError: If `local_batch` is less than 1, the calibration is for other replicas or
            another precision, lacks a cost, or the model has operations of unknown work.
    """
    if local_batch < 1:
        raise ValueError(f"local_batch={local_batch}: give at least 1 example per replica")
    measured = (calibration.replicas, calibration.precision)
    if measured != (replicas, precision) or workload.precision != precision:
        raise ValueError(
            f"{workload.name} in {workload.precision} on {replicas} replicas in {precision}: "
            f"{calibration.machine} was calibrated with {measured[0]} in {measured[1]}; calibrate "
            "it again for these replicas and this precision"
        )
    if workload.uncounted:
        raise ValueError(
            f"{workload.name} has operations of which the work is not known "
            f"({', '.join(workload.uncounted)}); time its step instead"
        )
    return _apply_costs(work_terms(workload, local_batch), calibration)


def _apply_costs(terms, calibration):
    missing = terms.keys() - calibration.seconds_per.keys()
    if missing:
        raise ValueError(
            f"the calibration of {calibration.machine} has no cost of {min(missing)!r}; "
            "calibrate the machine again with this version of kdist"
        )
    parts: dict[str, float] = {}
    for name, amount in terms.items():
        part = name.partition(" ")[0]
        parts[part] = parts.get(part, 0.0) + amount * calibration.seconds_per[name]
    return CalibratedStep(sum(parts.values()), parts)


def work_terms(workload: Workload, local_batch: int) -> dict[str, float]:
    """Returns the amount of each term in a step of one replica.

    The first word of a term is the kind of the layers, see `LayerWork`, `"normalisation"` for
    elementwise layers that compute with weights, `"weights"`, or `"step"`.
    """
    terms: dict[str, float] = {"step": 1.0}
    for layer in workload.layers:
        for name, amount in _layer_terms(layer, local_batch):
            if amount:
                terms[name] = terms.get(name, 0.0) + amount
    return terms


def _layer_terms(layer: LayerWork, local_batch: int):
    flops = layer.forward_flops + layer.backward_flops
    weights = layer.trainable_parameters
    kind = _kind(layer)
    if flops or layer.moved_bytes:
        yield f"{kind} layers", 1.0
    for at, share in _shares(kind, weights):
        yield f"{kind} FLOPs{at}", local_batch * flops * share
    yield f"{kind} bytes", local_batch * layer.moved_bytes
    if kind == "normalisation":
        yield "normalisation weights", weights
    else:
        yield "weights", weights
        yield f"{kind} weights beyond {CACHED_WEIGHTS:,}", max(weights - CACHED_WEIGHTS, 0.0)


def _kind(layer):
    """Returns a layer's kind; an embedding also has weights, but no arithmetic with them."""
    normalises = layer.kind == "elementwise" and layer.parameters and layer.forward_flops
    return "normalisation" if normalises else layer.kind


def _shares(kind, weights):
    """Returns the rates for a layer with this number of weights, each with its share."""
    knots = RATES_AT_WEIGHTS.get(kind)
    if knots is None:
        return [("", 1.0)]
    weights = min(max(weights, knots[0]), knots[-1])
    for low, high in itertools.pairwise(knots):
        if weights <= high:
            share = math.log(weights / low) / math.log(high / low)
            break
    return [(f" at {low:,.0f} weights", 1.0 - share), (f" at {high:,.0f} weights", share)]
