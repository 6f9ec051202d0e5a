"""How long one optimizer update of all devices takes, and of what that time consists.

    setup = Setup(known_machines()["dgx1-v100-32gb"], devices=8, local_batch=64)
    time = step_seconds(setup, Gradients(102e6), InputWork(), 0.08, known_constants())
    time.rate, time.terms[2].how   # 6,100 examples/s; "2 x (8 - 1) / 8 x 102 MB / (118 GB/s)"

The equations stand in `update.py`; here they get words.
"""

import dataclasses

from kdist.planner.constants import Constants
from kdist.planner.cost import update
from kdist.planner.cost.facts import facts_of
from kdist.planner.cost.setup import Gradients, InputWork, Setup
from kdist.planner.cost.wording import how

__all__ = [
    "Gradients",
    "InputWork",
    "Setup",
    "StepTime",
    "Term",
    "micro_step_seconds_of",
    "step_seconds",
]


@dataclasses.dataclass(frozen=True)
class Term:
    """One part of the time of an update.

    Attributes:
        name: "compute", "straggling", "exchange in node", "exchange between nodes", "latency",
            "coordination", "feed", "input wait" or "slowest node".
        seconds: its share of the whole.
        how: the arithmetic, as a person would write it.
    """

    name: str
    seconds: float
    how: str


@dataclasses.dataclass(frozen=True)
class StepTime:
    """One optimizer update of all devices.

    Attributes:
        terms: of its time; they sum to `total`. Only compute is always there, the others where they
            take any time.
        examples: that it processes.
    """

    terms: tuple[Term, ...]
    examples: float

    @property
    def total(self) -> float:
        """Seconds of the update."""
        return sum(term.seconds for term in self.terms)

    @property
    def rate(self) -> float:
        """Examples a second."""
        return self.examples / self.total


def step_seconds(
    setup: Setup,
    gradients: Gradients,
    input_work: InputWork,
    micro_step_seconds: float,
    constants: Constants,
) -> StepTime:
    """How long an update takes; asynchronous ones: one update from each worker.

    Args:
        setup: devices and how they share the work.
        gradients: what they exchange.
        input_work: what the host does for each example.
        micro_step_seconds: pure computation of `local_batch` examples on one device.
        constants: of `kdist.planner.constants`.

    Raises:
        ValueError: `micro_step_seconds` is not above 0.
    """
    if not micro_step_seconds > 0:
        raise ValueError(f"micro_step_seconds is above 0, not {micro_step_seconds}")
    facts = facts_of(setup, gradients, input_work)
    parts = update.update_seconds(facts, micro_step_seconds, constants)
    terms = [
        Term(name, float(seconds), how(name, setup, facts, micro_step_seconds, constants))
        for name, seconds in parts.items()
        if seconds > 0 or name == "compute"
    ]
    return StepTime(tuple(terms), setup.examples)


def micro_step_seconds_of(
    setup: Setup,
    gradients: Gradients,
    input_work: InputWork,
    measured_rate: float,
    constants: Constants,
) -> float:
    """Pure computation of a micro-step on one device, from a measured rate of a set-up.

    The inverse of `step_seconds`.

    Args:
        setup: as it was measured.
        gradients: what its devices exchange.
        input_work: what the host does for each example.
        measured_rate: examples a second of all devices together.
        constants: of `kdist.planner.constants`.

    Raises:
        ValueError: `measured_rate` is not above 0, or so high that exchange and input alone would
            take longer.
    """
    if not measured_rate > 0:
        raise ValueError(f"measured_rate is examples a second above 0, not {measured_rate}")
    facts = facts_of(setup, gradients, input_work)
    found = float(update.micro_step_of(facts, measured_rate, constants))
    back = step_seconds(setup, gradients, input_work, found, constants).rate
    if back < 0.99 * measured_rate:
        raise ValueError(
            f"{measured_rate:g} examples/s cannot be: exchange and input alone allow {back:.4g} on "
            f"{setup.devices} x {setup.machine.gpu} of {setup.machine.name}; check rate, machine "
            "and input"
        )
    return found
