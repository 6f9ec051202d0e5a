"""Constraints on a plan, and which one to relax when no plan is feasible."""

import collections
import dataclasses
import math

from kdist.planner.plans import dollars, duration
from kdist.planner.tables.prices import OWN_TABLE, PriceTable, known_offers

DEFAULT_STRATEGIES = ("one_device", "mirrored", "multi_worker", "sharded", "split")
STRATEGIES = (*DEFAULT_STRATEGIES, "local_sgd", "parameter_server")
_LOCAL_BATCHES = tuple(2**power for power in range(3, 11))
# ResNet-50 on ImageNet kept its accuracy up to 8,192 of 1,281,167 examples per update (Goyal et al.
# 2017, https://arxiv.org/abs/1706.02677); the same fraction of other data.
_LARGEST_BATCH, _UPDATES_PER_EPOCH = 8192, 156
_SMALLEST_LIMIT = 32


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Constraints on a plan.

    Example:

        >>> Constraints(max_usd=100, max_machines=4).largest_global_batch(examples=60_000)
        384

    Args:
        max_usd: Largest price of the whole run in US dollars. Defaults to `None`, no limit.
        max_hours: Longest time of the whole run. Defaults to `None`, no limit.
        max_machines: Largest number of machines, all of one kind. Defaults to 8.
        max_global_batch: Largest number of examples per update. Defaults to 1/156 of an epoch and
            at most 8,192: larger batches need other learning rates and more epochs.
        local_batches: Local batches to choose from. Defaults to the powers of two from 8 to 1,024.
        accumulate: Micro-steps per update. Defaults to `None`, which chooses among 1, 2, 4, and 8.
        strategies: Names to choose from. Defaults to all strategies with the results of one device;
            `"parameter_server"` and `"local_sgd"` train differently. `"split"` splits the model
            over the devices of one machine where it does not fit one device, or is faster split.
            `"sharded"` lets the replicas of the other strategies divide training state where the
            whole does not fit one device, or takes longer.
        spot: Whether to use spot VMs, with their prices and expected restarts. Defaults to `False`.

    Raises:
        ValueError: If a limit is not above 0, or a strategy is unknown.
    """

    max_usd: float | None = None
    max_hours: float | None = None
    max_machines: int = 8
    max_global_batch: int | None = None
    local_batches: tuple[int, ...] = _LOCAL_BATCHES
    accumulate: int | None = None
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    spot: bool = False

    def __post_init__(self):
        for name in ("max_usd", "max_hours", "max_machines", "max_global_batch", "accumulate"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} has to be above 0, not {value}")
        sizes = self.local_batches
        if (
            isinstance(sizes, int)
            or not sizes
            or not all(isinstance(size, int) and size >= 1 for size in sizes)
        ):
            raise ValueError(f"local_batches must be a sequence of positive integers, got {sizes}")
        if isinstance(self.strategies, str):
            object.__setattr__(self, "strategies", (self.strategies,))
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(
                f"unknown strategies: {', '.join(unknown) or 'none given'}. Choose from "
                f"{', '.join(STRATEGIES)}"
            )

    def largest_global_batch(self, examples: int) -> int:
        """Returns the largest number of examples per update, for `examples` per epoch."""
        if self.max_global_batch is not None:
            return self.max_global_batch
        return min(_LARGEST_BATCH, examples, max(_SMALLEST_LIMIT, examples // _UPDATES_PER_EPOCH))


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Candidates that one constraint excludes.

    Attributes:
        limit: `"memory"`, `"max_usd"`, `"max_hours"`, or `"prices"`.
        count: Number of candidates.
        reason: Reason for the candidate that is closest to the limit, with what to change.
    """

    limit: str
    count: int
    reason: str


def price_rejections(table: PriceTable, path: str) -> list[Rejection]:
    """Returns what a user's table of prices leaves out: known machines, and VMs with other GPUs."""
    known = (offer.machine.name for offer in known_offers())
    absent = [name for name in known if table.lacks(name)]
    return [
        Rejection("prices", len(names), f"{reason}, such as {names[0]}")
        for names, reason in (
            (absent, f"{path} has no price of these machines of {OWN_TABLE}"),
            (table.left_out, f"no data about the GPUs of these VMs of {path}"),
        )
        if names
    ]


# Limits on the whole run: the value of a candidate, and how it is written.
_LIMITS = {
    "max_usd": (lambda each: each.usd, dollars),
    "max_hours": (lambda each: each.hours, duration),
}


def apply_constraints(candidates, constraints):
    """Returns the candidates within the limits on the run, and the rejections of all others."""
    kept, excluded = [], collections.defaultdict(list)
    for candidate in candidates:
        exceeded = [name for name in _LIMITS if _ratio(candidate, constraints, name) > 1]
        for name in exceeded:
            excluded[name].append(candidate)
        if not exceeded:
            kept.append(candidate)
    return kept, [
        Rejection(name, len(group), _nearest(group, constraints, name))
        for name, group in excluded.items()
    ]


def _ratio(candidate, constraints, name):
    limit = getattr(constraints, name)
    return 0.0 if limit is None else _LIMITS[name][0](candidate) / limit


def _nearest(candidates, constraints, name):
    value, unit = _LIMITS[name]
    nearest = min(candidates, key=value)
    limit = unit(getattr(constraints, name))
    return f"the nearest takes {unit(value(nearest))} of {limit}: {nearest}"


def infeasible_message(candidates, alternatives, rejections, constraints):
    """Returns which constraint to relax, and by how much, when no candidate meets all of them.

    `alternatives` are the candidates as spot VMs, or on demand if `constraints.spot`. `rejections`
    are those of candidates that do not fit in memory.
    """
    if constraints.spot and alternatives and not candidates:
        return "none of these machines has a price for spot VMs; leave --spot out"
    if not candidates and not alternatives:
        return f"no plan fits in memory: {rejections[0].reason}"
    lines = [_relaxed(candidates, constraints, name) for name in _LIMITS]
    within, _ = apply_constraints(alternatives, constraints)
    if within:
        best = min(within, key=lambda each: each.usd * each.hours)
        flag = "on demand, --nospot" if constraints.spot else "on spot VMs, --spot"
        lines.append(f"  {flag}: {dollars(best.usd)} and {duration(best.hours)}, {best}")
    lines = [line for line in lines if line]
    if lines:
        return "\n".join(["no plan keeps to all limits; loosen one of them:", *lines])
    nearest = min(candidates, key=lambda each: max(_ratio(each, constraints, n) for n in _LIMITS))
    flags = " and ".join(
        f"--{name}={_round_up(value(nearest)):g}"
        for name, (value, _) in _LIMITS.items()
        if getattr(constraints, name) is not None
    )
    return f"no plan keeps to both limits; use {flags}, for {nearest}"


def _relaxed(candidates, constraints, name):
    """Returns the smallest value of this limit with which the others hold; `None` without one."""
    value, unit = _LIMITS[name]
    others = [other for other in _LIMITS if other != name]
    within = [each for each in candidates if all(_ratio(each, constraints, n) <= 1 for n in others)]
    if getattr(constraints, name) is None or not within:
        return None
    nearest = min(within, key=value)
    return (
        f"  --{name}={_round_up(value(nearest)):g} (now {getattr(constraints, name):g}): "
        f"{unit(value(nearest))} for {nearest}"
    )


def _round_up(value):
    """Rounds up to three digits."""
    step = 10 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / step) * step
