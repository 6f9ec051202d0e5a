"""Job: a training to plan. Plan: its layout, batch, and machine, with predicted time and price.

plan = kdist.plan(model, examples=60_000, epochs=10).best
plan.save("plan.json")                      # for kdist train --plan=plan.json
strategy = kdist.create_strategy(Plan.load("plan.json"))
"""

import dataclasses
import json
import math
import os
import pathlib
import shlex
import warnings

from kdist.batch import Batch
from kdist.json_text import parse_json
from kdist.layout import Layout
from kdist.planner.cost.setup import Gradients, InputWork, Setup
from kdist.planner.cost.step import Spot, Term
from kdist.planner.tables.machines import Machine
from kdist.planner.workload.layers import Workload
from kdist.run_directory import write_text

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
# 500 × 375 pixels, the mean of ImageNet's JPEGs.
IMAGENET_MEGAPIXELS = 0.19
# Smaller images are assumed to lie in memory as arrays, such as those of Fashion-MNIST.
_SMALLEST_JPEG = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """A training to plan.

    Example:

        job = kdist.planner.Job(
            kdist.planner.known_workload("resnet50"), examples=1_281_167, epochs=90
        )

    Args:
        workload: `Workload` of the model.
        examples: Examples per epoch.
        epochs: Number of epochs, whatever the batch is. Defaults to 1.
        precision: Keras dtype policy, one of `PRECISIONS`. Defaults to `"float32"`.
        optimizer: `"sgd"`, `"momentum"`, the default, `"adam"`, …, for the memory of its slots.
        jit_compile: Whether XLA compiles the step. Defaults to `False`.
        input_work: Work of the host for one example. Defaults to `default_input(workload)`.
        name: The user's name of the model. Defaults to that of its workload.

    Raises:
        ValueError: If a number is not above 0, `examples` is not a whole number, or the precision
            is unknown.
    """

    workload: Workload
    examples: int
    epochs: float = 1.0
    precision: str = "float32"
    optimizer: str = "momentum"
    jit_compile: bool = False
    input_work: InputWork | None = None
    name: str = ""

    def __post_init__(self):
        for name in ("examples", "epochs"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} has to be above 0, not {value}")
        if self.examples != int(self.examples):
            raise ValueError(f"examples is a whole number, not {self.examples}")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}, the values of "
                "kdist train --precision"
            )

    @property
    def model(self) -> str:
        """Name of the model in plans and in the table of measured runs."""
        return self.name or self.workload.name

    @property
    def host_work(self) -> InputWork:
        """Work of the host for one example: `input_work` or its default."""
        return self.input_work or default_input(self.workload)

    @property
    def gradients(self) -> Gradients:
        """Gradients that replicas exchange; float32 also under Keras's mixed policies."""
        sizes = [size for _, size in self.workload.gradients_as_ready()]
        total = sum(sizes)
        return Gradients(
            bytes=4 * total,
            largest_share=max(sizes) / total if total else 0.0,
            tensors=2 * len(sizes),  # a kernel and a bias, or a scale and an offset
        )

    @property
    def trained_examples(self) -> float:
        """Examples of the whole run."""
        return self.examples * self.epochs


def default_input(workload: Workload) -> InputWork:
    """Returns JPEGs of ImageNet's size for a model of photographs, else arrays in memory."""
    shape = workload.input_shape
    if len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= _SMALLEST_JPEG:
        return InputWork(
            source_megapixels=IMAGENET_MEGAPIXELS,
            model_megapixels=shape[0] * shape[1] / 1e6,
            decoder="tf.data",
        )
    return InputWork(host_bytes=workload.input_bytes)


@dataclasses.dataclass(frozen=True)
class PredictedCost:
    """Predicted time, memory, and price of a plan.

    Attributes:
        step_seconds: Seconds per optimizer update.
        terms: Terms of these seconds.
        examples_per_second: Rate of all replicas together.
        efficiency: This rate divided by that of independent devices.
        memory_bytes: Peak memory of a device.
        device_memory_bytes: Memory that a device has; `None` if unknown.
        hours: Hours of the whole run.
        usd: Price of the whole run on demand.
        spot_hours: Hours on spot VMs with expected saving, lost work, and restarts; `None` without
            a spot price.
        spot_usd: Price of these hours.
        checkpoint_bytes: Size of a checkpoint; `None` in plans of earlier versions.
        save_seconds: Time to save it, so that it survives the loss of its VM.
        preemptions_per_hour: Rate of all machines together, if they are spot VMs.
        checkpoint_seconds: Work between two checkpoints on spot VMs; `None` without preemptions.
    """

    step_seconds: float
    terms: tuple[Term, ...]
    examples_per_second: float
    efficiency: float
    memory_bytes: float
    device_memory_bytes: float | None
    hours: float
    usd: float
    spot_hours: float | None = None
    spot_usd: float | None = None
    checkpoint_bytes: float | None = None
    save_seconds: float | None = None
    preemptions_per_hour: float | None = None
    checkpoint_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training, its layout, local batch, and machine, and what this is predicted to cost.

    `kdist.plan` creates plans, and `kdist.create_strategy` accepts them.

    Example:

        plan = kdist.planner.Plan.load("plan.json")
        strategy = kdist.create_strategy(plan)
        print(plan.layout, plan.local_batch, plan.machine.name, plan.hours, plan.usd)

    Args:
        model: Name of the model.
        input_shape: Shape of one example.
        examples: Examples per epoch.
        epochs: Number of epochs.
        precision: Keras dtype policy.
        optimizer: Name of the optimizer, such as `"momentum"`.
        jit_compile: Whether XLA compiles the step.
        machine: Kind of all machines.
        layout: Degrees of parallelism.
        local_batch: Examples per replica and micro-step.
        gradients: Gradients that replicas exchange.
        input_work: Work of the host for one example.
        micro_step_seconds: Compute time of a micro-step on one device, without corrections by
            measured runs.
        prediction: Predicted time, memory, and price, corrected by measured runs.
        spot: Whether the plan is for spot VMs, which may be preempted. Defaults to `False`.
        prices_of: Date of the prices. Defaults to `""`, unknown.
        derivation: How the numbers of a split model were derived, or why replicas divide training
            state. Defaults to `""`.
        region: Region of the prices; `""`, the default, where unknown.

    Raises:
        TypeError: If the local batch is not a whole number.
        ValueError: If the local batch is below 1.
    """

    model: str
    input_shape: tuple[int, ...]
    examples: int
    epochs: float
    precision: str
    optimizer: str
    jit_compile: bool
    machine: Machine
    layout: Layout
    local_batch: int
    gradients: Gradients
    input_work: InputWork
    micro_step_seconds: float
    prediction: PredictedCost
    spot: bool = False
    prices_of: str = ""
    derivation: str = ""
    region: str = ""

    def __post_init__(self):
        Batch(self.local_batch)  # checks the number

    @property
    def batch(self) -> Batch:
        """Sizes of the batch: local, replicas, accumulation, and global."""
        return batch_of(self.layout, self.local_batch)

    @property
    def hours(self) -> float:
        """Hours of the whole run, on the kind of VMs that the plan is for."""
        predicted = self.prediction
        return predicted.spot_hours if self.spot and predicted.spot_hours else predicted.hours

    @property
    def usd(self) -> float:
        """Price of the whole run in US dollars, on the kind of VMs that the plan is for."""
        predicted = self.prediction
        return predicted.spot_usd if self.spot and predicted.spot_usd else predicted.usd

    @property
    def checkpoint_minutes(self) -> float | None:
        """Minutes between checkpoints, with three digits; `None` if not for spot VMs."""
        seconds = self.prediction.checkpoint_seconds
        return float(f"{seconds / 60:.3g}") if self.spot and seconds else None

    def with_saving(self, checkpoint_bytes: float, save_seconds: float) -> "Plan":
        """Returns the plan with another size and time of a checkpoint, such as measured ones.

        The interval of checkpoints, and hours and price on spot VMs, are those of `Spot`.
        """
        predicted, spot = self.prediction, Spot(self.prediction.preemptions_per_hour or 0.0)
        save_hours = save_seconds / 3600
        interval = spot.interval_hours(save_hours, machines=1)  # the rate is that of all machines
        changes: dict[str, float | None] = {
            "checkpoint_bytes": checkpoint_bytes,
            "save_seconds": save_seconds,
            "checkpoint_seconds": interval and interval * 3600,
        }
        if predicted.spot_hours and predicted.spot_usd:
            hours = spot.expected_hours(predicted.hours, 1, save_hours)
            changes |= {
                "spot_hours": hours,
                "spot_usd": predicted.spot_usd * hours / predicted.spot_hours,
            }
        prediction = dataclasses.replace(predicted, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(self, prediction=prediction)

    @property
    def setup(self) -> Setup:
        """Setup from which the cost of an update is computed."""
        return make_setup(self.layout, self.local_batch, self.machine)

    def to_dict(self) -> dict:
        """Returns the fields for JSON, with the name of the strategy for readers."""
        fields = dataclasses.asdict(self)
        fields["layout"]["strategy"] = self.layout.strategy
        return fields

    @classmethod
    def from_dict(cls, fields: dict, source: str = "this") -> "Plan":
        """Returns the plan that `to_dict` wrote, also by earlier versions; errors name `source`.

        Raises:
            ValueError: If `fields` are not those of a plan.
        """
        try:
            fields = _upgrade(dict(fields))
            prediction = dict(fields["prediction"])
            terms = (Term(term["name"], term["seconds"]) for term in prediction["terms"])
            fields["prediction"] = PredictedCost(**{**prediction, "terms": tuple(terms)})
            for name, kind in _PARTS.items():
                fields[name] = kind(**fields[name])
            fields["input_shape"] = tuple(fields["input_shape"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{source} is no plan ({error!r}); write one with kdist plan --output"
            ) from error

    def save(self, path: str | os.PathLike):
        """Writes the plan as JSON and replaces an existing file."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Returns the plan that `save` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file holds no plan.
        """
        try:
            fields = parse_json(pathlib.Path(path).read_text())
        except ValueError as error:  # not JSON, or not text
            raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from None
        return cls.from_dict(fields, os.fspath(path))

    def compare(self, examples_per_second: float) -> str:
        """Returns a sentence that compares the prediction with a measured rate."""
        predicted = self.prediction.examples_per_second
        error = examples_per_second / predicted - 1
        return (
            f"planned: {predicted:,.1f} examples/s; measured: {examples_per_second:,.1f} "
            f"({error:+.0%})"
        )

    def compared(self, examples_per_second: float) -> str:
        """Returns `compare(examples_per_second)`. Deprecated."""
        message = "Plan.compared is deprecated; use Plan.compare"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.compare(examples_per_second)


_PARTS = {"machine": Machine, "gradients": Gradients, "input_work": InputWork}


def _upgrade(fields):
    """Returns a plan's fields with a `Layout`, also from plan files of kdist 0.1.

    Their layout has the local batch, the name of the strategy, and the devices of each machine.
    """
    layout = dict(fields["layout"])
    strategy = layout.pop("strategy", None)
    if "local_batch" in layout:
        fields["local_batch"] = layout.pop("local_batch")
        layout["data"] = layout["machines"] * layout.pop("devices")
        layout["asynchronous"] = strategy == "parameter_server"
    fields["layout"] = Layout(**layout)
    return fields


def batch_of(layout: Layout, local_batch: int) -> Batch:
    """Returns all sizes of the batch of a layout."""
    return Batch(local_batch, layout.data, layout.accumulate)


def make_setup(layout: Layout, local_batch: int, machine: Machine) -> Setup:
    """Returns the setup from which the cost of an update is computed.

    Raises:
        ValueError: If the layout splits the model.
    """
    if layout.group_size > 1:
        raise ValueError(
            f"{layout} splits the model, and this is a prediction of whole replicas; "
            "kdist.planner.Predictor.step predicts split models, and runs of them correct nothing"
        )
    return Setup(
        machine=machine,
        devices=layout.devices,
        local_batch=local_batch,
        accumulate=layout.accumulate,
        local_steps=layout.local_steps or 1,
        update="parameter_servers" if layout.asynchronous else "all_reduce",
        servers=layout.machines if layout.asynchronous else 1,  # one on each worker's machine
        asynchronous=layout.asynchronous,
    )


def describe(layout: Layout, local_batch: int, machine: Machine) -> str:
    """Returns machines, strategy, devices, and local batch in a few words."""
    machines = f"{layout.machines} × " if layout.machines > 1 else ""
    return (
        f"{machines}{machine.name}, {strategy_text(layout)} on {layout.devices} "
        f"device{'s' * (layout.devices > 1)}, local batch {local_batch}"
    )


def strategy_text(layout: Layout) -> str:
    """Returns the strategy of a layout in words, such as "mirrored, 8 local steps"."""
    if layout.group_size > 1:
        return f"split ({str(layout.degrees).replace(',', ', ')})"
    local_steps = f", {layout.local_steps} local steps" if layout.local_steps else ""
    shard = f", shard={layout.shard}" if layout.shard else ""
    return layout.strategy + shard + local_steps


def layout_flags(layout: Layout) -> dict[str, str | int | None]:
    """Returns the flags of `kdist train` that describe a plan's layout, without their dashes."""
    if layout.group_size > 1 or layout.min_shard_bytes != Layout().min_shard_bytes:
        return {"layout": str(layout.degrees)}
    return {
        "strategy": layout.strategy,
        "num_devices": layout.devices_per_machine,
        "shard": layout.shard,
    }


def train_command(plan: Plan) -> str:
    """Returns the command that trains as planned, on each machine of the plan."""
    layout, minutes = plan.layout, plan.checkpoint_minutes
    given = {
        "model": shlex.quote(plan.model),
        **layout_flags(layout),
        "local_batch_size": plan.local_batch,
        "accumulate": layout.accumulate if layout.accumulate > 1 else None,
        "local_steps": layout.local_steps,
        "epochs": int(plan.epochs) if plan.epochs == int(plan.epochs) else plan.epochs,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "jit_compile": "true" if plan.jit_compile else None,
        "allow_remote": "true" if layout.machines > 1 else None,
        "checkpoint_minutes": minutes and f"{minutes:g}",
    }
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return " ".join(["kdist train", *flags])


def duration(hours: float) -> str:
    """Returns hours, or minutes or seconds for short durations.

    >>> duration(12.3456), duration(0.25), duration(0.001)
    ('12.3 h', '15 min', '3.6 s')
    """
    for size, unit in ((1.0, "h"), (1 / 60, "min")):
        if hours >= size:
            return f"{_three_digits(hours / size)} {unit}"
    return f"{_three_digits(hours * 3600)} s"


def milliseconds(seconds: float) -> str:
    """Returns milliseconds, or seconds from one second on."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def dollars(usd: float) -> str:
    """Returns US dollars, at least with cents.

    >>> dollars(1234.5), dollars(0.00123), dollars(0)
    ('$1,234.50', '$0.00123', '$0.00')
    """
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.3g}"


def _three_digits(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
