"""Data workers of input-bound plans: how many CPU hosts, and what they change.

option = find_data_workers(plan)
print(option)    # "38 % of a step waits for input; 2 × e2-standard-8 as data workers …"
"""

import dataclasses
import math

from kdist.planner.cost.constants import Constants, known_constants
from kdist.planner.cost.setup import CostFeatures, make_features
from kdist.planner.cost.update import core_seconds, effective_cores, soft_maximum
from kdist.planner.plans import Plan, dollars, duration
from kdist.planner.tables.prices import CpuHost, known_cpu_hosts

# Share of a step that is worth an advice, as in the verdict of a run.
_MIN_SHARE = 0.1
_MAX_HOSTS = 64
# Of options that cost nearly the same, the one with fewer hosts is simpler to run.
_PENALTY_PER_HOST = 0.005


@dataclasses.dataclass(frozen=True)
class DataWorkerOption:
    """CPU hosts that prepare the input of a plan, and its time and price with them.

    Example:

        option = kdist.planner.find_data_workers(plan)
        option.count, option.host.name, option.hours, option.usd

    Attributes:
        host: kind of the hosts.
        count: number of hosts.
        share_before: fraction of a step that waits for input without them.
        share: fraction of a step that waits for input with them.
        hours: hours of the run with them, on demand.
        usd: price of the run with them, on demand.
        plan: the plan without them.
    """

    host: CpuHost
    count: int
    share_before: float
    share: float
    hours: float
    usd: float
    plan: Plan

    def __str__(self):
        before = self.plan.prediction
        return (
            f"{self.share_before:.0%} of a step waits for input. {self.count} × {self.host.name} "
            f"as data workers (kdist data_worker, "
            f"{dollars(self.count * self.host.usd_per_hour)}/h) lower it to {self.share:.0%}: "
            f"{duration(self.hours)} for {dollars(self.usd)} instead of {duration(before.hours)} "
            f"for {dollars(before.usd)} on demand."
        )


def find_data_workers(plan: Plan, constants: Constants | None = None) -> DataWorkerOption | None:
    """Returns the cheapest data workers of a plan; None if they do not help, or have no price.

    Data workers do all of the work of the input, and the host of the devices none. The model of
    the time is that of the plan, with the cores of the CPU hosts.

    Example:

        option = kdist.planner.find_data_workers(kdist.plan("resnet50", examples=1281167).best)

    Args:
        plan: the plan. Only the clouds of `tables/vm_prices.csv` with VMs without GPUs have prices.
        constants: constants of the cost model. Defaults to those of the tables.

    Returns:
        The option, or None.
    """
    constants = constants or known_constants()
    predicted = plan.prediction
    seconds = {term.name: term.seconds for term in predicted.terms}
    wait = seconds.get("input wait", 0.0)
    if wait < _MIN_SHARE * predicted.step_seconds or not predicted.usd:
        return None
    slowest = seconds.get("slowest node", 0.0)
    both = predicted.step_seconds - slowest
    features = make_features(plan.setup, plan.gradients, plan.input_work)
    options = [
        _option(plan, features, host, count, both - wait, slowest / both, constants)
        for host in known_cpu_hosts()
        if plan.machine.name.startswith(f"{host.cloud} ")
        for count in range(1, _MAX_HOSTS + 1)
    ]
    faster = [option for option in options if option.hours < predicted.hours]
    return min(
        faster,
        key=lambda option: option.usd * (1 + _PENALTY_PER_HOST * option.count),
        default=None,
    )


def _option(plan, features, host, count, busy, slowest_share, constants):
    """Returns the option of a number of hosts; `busy` is the seconds of a step without waiting."""
    predicted, machines = plan.prediction, plan.layout.machines
    own = {"cores": host.vcpus, "vcpus": 1.0, "input_threads": math.inf, "recent_host": 0.0}
    cores = count * float(effective_cores(CostFeatures(**vars(features) | own), 0, constants))
    work = features.decoded * float(core_seconds(features, constants))
    ready = machines * features.node_examples * work / cores
    both = float(soft_maximum(busy, ready, constants.soft_maximum_exponent))
    step = both * (1 + slowest_share)
    hours = predicted.hours * step / predicted.step_seconds
    price = predicted.usd / predicted.hours + count * host.usd_per_hour
    return DataWorkerOption(
        host=host,
        count=count,
        share_before=1 - (busy * (1 + slowest_share)) / predicted.step_seconds,
        share=(both - busy) / step,
        hours=hours,
        usd=hours * price,
        plan=plan,
    )
