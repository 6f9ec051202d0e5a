"""Time of one optimizer update of all devices and its terms, and the price of a run.

    setup = Setup(known_machines()["dgx1-v100-32gb"], devices=8, local_batch=64)
    time = step_seconds(setup, Gradients(102e6), InputWork(), 0.08, known_constants())
    time.rate     # 6,100 examples per second
    Spot().expected_hours(hours=10, machines=1)    # more than 10

The equations are in `update.py`. `kdist.planner.report.arithmetic` writes them out.
"""

import dataclasses
import math

from kdist.planner.cost import update
from kdist.planner.cost.constants import Constants
from kdist.planner.cost.setup import Gradients, InputWork, Setup, make_features

# "The average preemption rate per day per project is between 5% and 15%"
# (https://cloud.google.com/compute/docs/instances/preemptible): 10 % per day.
_PREEMPTIONS_PER_HOUR = 0.1 / 24


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of the time of an update.

    Attributes:
        name: `"compute"`, `"straggling"`, `"exchange in node"`, `"exchange between nodes"`,
            `"latency"`, `"coordination"`, `"feed"`, `"input wait"`, or `"slowest node"`.
        seconds: Seconds that it adds.
    """

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Time of one optimizer update of all devices, on `examples` examples.

    Terms add up to `total`. Terms of zero seconds are left out, except compute.
    """

    terms: tuple[Term, ...]
    examples: float

    @property
    def total(self) -> float:
        """Seconds of the update."""
        return sum(term.seconds for term in self.terms)

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.examples / self.total


def step_seconds(
    setup: Setup,
    gradients: Gradients,
    input_work: InputWork,
    micro_step_seconds: float,
    constants: Constants,
) -> StepTime:
    """Returns the time of an update; if asynchronous, of one update from each worker.

    `micro_step_seconds` is the pure computation of `local_batch` examples on one device.

    Raises:
        ValueError: If `micro_step_seconds` is not above 0.
    """
    if not micro_step_seconds > 0:
        raise ValueError(f"micro_step_seconds is above 0, not {micro_step_seconds}")
    features = make_features(setup, gradients, input_work)
    parts = update.update_seconds(features, micro_step_seconds, constants)
    terms = [
        Term(name, float(seconds))
        for name, seconds in parts.items()
        if seconds > 0 or name == "compute"
    ]
    return StepTime(tuple(terms), setup.examples)


def infer_micro_step_seconds(
    setup: Setup,
    gradients: Gradients,
    input_work: InputWork,
    measured_rate: float,
    constants: Constants,
) -> float:
    """Returns the pure computation of a micro-step on one device, from a measured rate.

    This is the inverse of `step_seconds`. The rate is in examples per second of all devices.

    Raises:
        ValueError: If `measured_rate` is not above 0, or so high that exchange and input alone
            would take longer.
    """
    if not measured_rate > 0:
        raise ValueError(f"measured_rate is examples per second above 0, not {measured_rate}")
    features = make_features(setup, gradients, input_work)
    found = float(update.infer_micro_step(features, measured_rate, constants))
    highest = step_seconds(setup, gradients, input_work, found, constants).rate
    if highest < 0.99 * measured_rate:
        raise ValueError(
            f"{measured_rate:g} examples/s is impossible: exchange and input alone allow "
            f"{highest:.4g} on {setup.devices} x {setup.machine.gpu} of {setup.machine.name}; "
            "check the rate, the machine, and the input"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Spot:
    """Preemptions of spot VMs, and restarts of the job on them.

    Attributes:
        preemptions_per_hour: Rate of one VM. Defaults to one preemption in ten days.
        restart_hours: Time from the loss of a VM until the job computes again: another VM,
            packages, data, graph. Defaults to 6 minutes.
        checkpoint_hours: Work between two checkpoints. Defaults to 10 minutes, as in
            `kdist train`.
    """

    preemptions_per_hour: float = _PREEMPTIONS_PER_HOUR
    restart_hours: float = 0.1
    checkpoint_hours: float = 10 / 60

    def expected_hours(self, hours: float, machines: int) -> float:
        """Returns wall-clock hours of `hours` of work, if the loss of any machine stops all.

        E = n · (1/λ + R) · (exp(λ c) − 1) for n = hours / c parts of c hours each: the expected
        time of work with checkpoints under failures at a constant rate λ (Daly 2006,
        https://doi.org/10.1016/j.future.2004.11.016). The time to write a checkpoint is left out,
        as kdist writes in the background.
        """
        rate = self.preemptions_per_hour * machines
        if rate == 0:
            return hours
        part = self.checkpoint_hours
        return hours / part * (1 / rate + self.restart_hours) * math.expm1(rate * part)

    def expected_restarts(self, hours: float, machines: int) -> float:
        """Returns the expected number of restarts of the job."""
        return self.preemptions_per_hour * machines * self.expected_hours(hours, machines)


def on_demand_usd(hours: float, usd_per_hour: float, machines: int = 1) -> float:
    """Returns the price of `machines` VMs for `hours`, in US dollars."""
    return hours * usd_per_hour * machines
