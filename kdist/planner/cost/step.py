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
# A checkpoint is written to the disk and then to a bucket, each at 125 MiB/s: the throughput of a
# gp3 volume (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ModifyVolume.html).
_SAVE_BYTES_PER_SECOND = 125 * 2**20 / 2
# Shorter intervals gain nothing: a restart takes minutes.
_MIN_CHECKPOINT_HOURS = 1 / 60
_MAX_EXPONENT = 700.0  # of a float


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
    """Preemptions of spot VMs, and checkpoints and restarts of the job on them.

    Example:

        >>> spot = Spot(preemptions_per_hour=0.01)
        >>> round(spot.interval_hours(save_hours=0.005, machines=4), 2)
        0.5

    Attributes:
        preemptions_per_hour: Rate of one VM. Defaults to one preemption in ten days.
        restart_hours: Time from the loss of a VM until the job computes again: another VM,
            packages, data, graph. Defaults to 6 minutes.
        checkpoint_hours: Work between two checkpoints. Defaults to `None`, the interval of
            `interval_hours`.
        save_bytes_per_second: Rate at which a checkpoint reaches a place that survives the VM.
            Defaults to 66 MB/s: to the disk and then to a bucket, at 125 MiB/s each.

    Raises:
        ValueError: If a rate is negative, or `save_bytes_per_second` is 0.
    """

    preemptions_per_hour: float = _PREEMPTIONS_PER_HOUR
    restart_hours: float = 0.1
    checkpoint_hours: float | None = None
    save_bytes_per_second: float = _SAVE_BYTES_PER_SECOND

    def __post_init__(self):
        if not (self.preemptions_per_hour >= 0 and self.save_bytes_per_second > 0):
            raise ValueError(
                f"preemptions_per_hour={self.preemptions_per_hour} has to be 0 or more, and "
                f"save_bytes_per_second={self.save_bytes_per_second} above 0"
            )

    def save_hours(self, checkpoint_bytes: float) -> float:
        """Returns the time until a checkpoint is safe."""
        return checkpoint_bytes / self.save_bytes_per_second / 3600

    def interval_hours(self, save_hours: float, machines: int) -> float | None:
        """Returns the work between two checkpoints that costs the least time.

        It is √(2 δ / λ) for the time δ to save and the rate λ of preemptions of all machines (Young
        1974, https://doi.org/10.1145/361147.361115), and at least a minute. If saving takes half of
        the time between two preemptions, or longer, it is 1 / λ (Daly 2006,
        https://doi.org/10.1016/j.future.2004.11.016).

        Args:
            save_hours: Time to save a checkpoint.
            machines: Number of machines.

        Returns:
            The hours; `None` without preemptions.
        """
        rate = self.preemptions_per_hour * machines
        if self.checkpoint_hours is not None or rate == 0:
            return self.checkpoint_hours
        return max(min(math.sqrt(2 * save_hours / rate), 1 / rate), _MIN_CHECKPOINT_HOURS)

    def expected_hours(self, hours: float, machines: int, save_hours: float = 0.0) -> float:
        """Returns wall-clock hours of `hours` of work, if the loss of any machine stops all.

        E = n · (1/λ + R) · (exp(λ (c + δ)) − 1) for n = hours / c parts of c hours each: the
        expected time of work with checkpoints under failures at a constant rate λ (Daly 2006,
        https://doi.org/10.1016/j.future.2004.11.016). It contains saving, lost work, and restarts.
        kdist writes in the background, so saving costs at most the time δ.

        Args:
            hours: Hours of work.
            machines: Number of machines.
            save_hours: Time to save a checkpoint. Defaults to 0.
        """
        rate = self.preemptions_per_hour * machines
        part = self.interval_hours(save_hours, machines)
        if rate == 0 or part is None:
            return hours
        factor = math.expm1(min(rate * (part + save_hours), _MAX_EXPONENT))
        return hours / part * (1 / rate + self.restart_hours) * factor


def on_demand_usd(hours: float, usd_per_hour: float, machines: int = 1) -> float:
    """Returns the price of `machines` VMs for `hours`, in US dollars."""
    return hours * usd_per_hour * machines
