"""A plan: a layout, a batch and a machine, with the time, the memory and the price predicted.

plan = kdist.plan(model, examples=60_000, epochs=10).best
plan.save("plan.json")                      # for scripts/train.py --plan=plan.json
strategy = kdist.create_strategy(Plan.load("plan.json"))
"""

import dataclasses
import json
import os
import pathlib

from kdist.batch import Batch
from kdist.planner.cost.setup import Gradients, InputWork, Setup
from kdist.planner.cost.step import Term
from kdist.planner.machines import Machine

# Names that `create_strategy` takes, of layouts that the planner knows.
STRATEGIES = ("one_device", "mirrored", "multi_worker", "parameter_server")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How replicas share the work.

    Attributes:
        strategy: a name that `create_strategy` takes.
        machines: how many; each is a task.
        devices: of each machine.
        local_batch: examples of a replica in a micro-step.
        accumulate: micro-steps before an update.
        local_steps: of local SGD; None without.

    Raises:
        ValueError: a number is not a whole one from 1 on, or the strategy cannot have so many
            devices.
    """

    strategy: str
    machines: int
    devices: int
    local_batch: int
    accumulate: int = 1
    local_steps: int | None = None

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        for name in ("machines", "devices", "local_batch", "accumulate", "local_steps"):
            value = getattr(self, name)
            if name == "local_steps" and value is None:
                continue
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} of a layout is a whole number from 1 on, not {value!r}")
        if self.machines > 1 and self.strategy in ("one_device", "mirrored"):
            raise ValueError(f"{self.strategy} is for one machine, not {self.machines}")

    @property
    def batch(self) -> Batch:
        """All sizes of the batch."""
        return Batch(self.local_batch, self.machines * self.devices, self.accumulate)

    def __str__(self):
        text = self.strategy
        if self.local_steps:
            text += f", {self.local_steps} local steps"
        return text


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a plan is expected to take.

    Attributes:
        step_seconds: of one optimizer update.
        terms: of these seconds.
        examples_per_second: of all replicas.
        efficiency: that rate by that of as many devices each alone.
        memory_bytes: the most that one device needs.
        device_memory_bytes: what it has; None where not known.
        hours: of the whole run.
        usd: on demand.
        spot_hours: with the restarts that are to be expected; None without a spot price.
        spot_usd: of these hours.
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to run, where, and what that is predicted to take.

    Attributes:
        model: its name.
        input_shape: of one example.
        examples: of an epoch.
        epochs: times through them.
        precision: a Keras dtype policy.
        optimizer: such as "momentum".
        jit_compile: whether XLA compiles the step.
        machine: the kind that all machines are of.
        layout: how the work is shared.
        gradients: what replicas exchange.
        input_work: what hosts do for an example.
        micro_step_seconds: that one device computes, as the tables say.
        prediction: time, memory and money, with what runs have measured.
        spot: whether it is for spot VMs, which may be taken away.
        prices_of: when its prices were read.
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
    gradients: Gradients
    input_work: InputWork
    micro_step_seconds: float
    prediction: Prediction
    spot: bool = False
    prices_of: str = ""

    @property
    def hours(self) -> float:
        """Of the whole run, on the VMs that it is for."""
        predicted = self.prediction
        return predicted.spot_hours if self.spot and predicted.spot_hours else predicted.hours

    @property
    def usd(self) -> float:
        """Of the whole run, on the VMs that it is for."""
        predicted = self.prediction
        return predicted.spot_usd if self.spot and predicted.spot_usd else predicted.usd

    @property
    def setup(self) -> Setup:
        """What the cost of an update is computed from."""
        return setup_of(self.layout, self.machine)

    def to_dict(self) -> dict:
        """As JSON can write it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict, source: str = "this") -> "Plan":
        """The plan that `to_dict` made.

        Raises:
            ValueError: `fields` are not those of a plan.
        """
        try:
            fields = dict(fields)
            prediction = dict(fields["prediction"])
            prediction["terms"] = tuple(Term(**term) for term in prediction["terms"])
            fields["prediction"] = Prediction(**prediction)
            for name, kind in _PARTS.items():
                fields[name] = kind(**fields[name])
            fields["input_shape"] = tuple(fields["input_shape"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{source} is no plan ({error!r}); write one with scripts/plan.py --output"
            ) from error

    def save(self, path: str | os.PathLike):
        """Writes the plan as JSON; a file that is there is replaced."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Reads the plan that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds no plan.
        """
        try:
            fields = json.loads(pathlib.Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from None
        return cls.from_dict(fields, os.fspath(path))

    def compared(self, examples_per_second: float) -> str:
        """The prediction beside what a run measured, in a sentence."""
        predicted = self.prediction.examples_per_second
        off = examples_per_second / predicted - 1
        return (
            f"planned: {predicted:,.1f} examples/s; measured: {examples_per_second:,.1f} "
            f"({off:+.0%})"
        )


_PARTS = {
    "layout": Layout,
    "machine": Machine,
    "gradients": Gradients,
    "input_work": InputWork,
}


def setup_of(layout: Layout, machine: Machine) -> Setup:
    """What the cost of an update of this layout is computed from."""
    served = layout.strategy == "parameter_server"
    return Setup(
        machine=machine,
        devices=layout.batch.replicas,
        local_batch=layout.local_batch,
        accumulate=layout.accumulate,
        local_steps=layout.local_steps or 1,
        update="parameter_servers" if served else "all_reduce",
        servers=layout.machines if served else 1,  # one beside each worker
        asynchronous=served,
    )


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    return described(plan.layout, plan.machine)


def described(layout: Layout, machine: Machine) -> str:
    """A layout on machines of a kind, in a few words."""
    machines = f"{layout.machines} × " if layout.machines > 1 else ""
    return (
        f"{machines}{machine.name}, {layout} on {layout.batch.replicas} "
        f"device{'s' * (layout.batch.replicas > 1)}, local batch {layout.local_batch}"
    )
