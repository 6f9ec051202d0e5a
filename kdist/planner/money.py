"""What a run costs: price times time, and spot VMs with the restarts that are to be expected.

>>> round(on_demand_usd(hours=2.0, usd_per_hour=1.99, machines=4), 2)
15.92
>>> Spot().expected_hours(hours=10, machines=1) > 10
True
"""

import dataclasses
import math

# "The average preemption rate per day per project is between 5% and 15%"
# (https://cloud.google.com/compute/docs/instances/preemptible): one in ten a day.
_PREEMPTIONS_PER_HOUR = 0.1 / 24


@dataclasses.dataclass(frozen=True)
class Spot:
    """How VMs that may be taken away behave, and the job on them.

    Attributes:
        preemptions_per_hour: of one VM. Defaults to one in ten days.
        restart_hours: from the loss of a VM until the job computes again: another VM, packages,
            data, graph. Defaults to 6 minutes.
        checkpoint_hours: of work between two checkpoints. Defaults to 10 minutes, as
            `scripts/train.py` does.
    """

    preemptions_per_hour: float = _PREEMPTIONS_PER_HOUR
    restart_hours: float = 0.1
    checkpoint_hours: float = 10 / 60

    def expected_hours(self, hours: float, machines: int) -> float:
        """Wall-clock hours of `hours` of work where the loss of any machine stops all.

        E = n · (1/λ + R) · (exp(λ c) − 1) for n = hours / c parts of c hours each, the expected
        time of work with checkpoints under failures that come at a constant rate λ (Daly 2006,
        https://doi.org/10.1016/j.future.2004.11.016, with the time to write a checkpoint left out:
        kdist writes in the background).
        """
        rate = self.preemptions_per_hour * machines
        if rate == 0:
            return hours
        part = self.checkpoint_hours
        return hours / part * (1 / rate + self.restart_hours) * math.expm1(rate * part)

    def expected_restarts(self, hours: float, machines: int) -> float:
        """How often the job is expected to start again."""
        return self.preemptions_per_hour * machines * self.expected_hours(hours, machines)


def on_demand_usd(hours: float, usd_per_hour: float, machines: int = 1) -> float:
    """US dollars of `machines` VMs for so many hours."""
    return hours * usd_per_hour * machines
