"""What a plan has to keep to, and what to loosen where none can.

limits = Limits(max_usd=100, max_machines=4)
"""

import collections
import dataclasses
import math

from kdist.planner.units import dollars, duration

STRATEGIES = ("one_device", "mirrored", "multi_worker", "local_sgd", "parameter_server")
_DEFAULT_STRATEGIES = ("one_device", "mirrored", "multi_worker")
_LOCAL_BATCHES = tuple(2**power for power in range(3, 11))
# ResNet-50 on ImageNet kept its accuracy up to 8,192 of 1,281,167 examples behind an update (Goyal
# et al. 2017, https://arxiv.org/abs/1706.02677); the same share of other data.
_LARGEST_BATCH, _UPDATES_AN_EPOCH = 8192, 156
_SMALLEST_LIMIT = 32


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan has to keep to.

    Attributes:
        max_usd: of the whole run; None for no limit.
        max_hours: of the whole run; None for no limit.
        max_machines: of one kind.
        max_global_batch: examples behind an update. By default 1/156 of an epoch, and 8,192 at
            most: more examples need other learning rates and more epochs.
        local_batches: to choose from. Defaults to the powers of two from 8 to 1,024.
        accumulate: micro-steps before an update; None to choose among 1, 2, 4 and 8.
        strategies: to choose from. By default all that compute the same as one device.
        spot: whether spot VMs are wanted, at their price and with the restarts to be expected.

    Raises:
        ValueError: a limit is not above 0, or a strategy not known.
    """

    max_usd: float | None = None
    max_hours: float | None = None
    max_machines: int = 8
    max_global_batch: int | None = None
    local_batches: tuple[int, ...] = _LOCAL_BATCHES
    accumulate: int | None = None
    strategies: tuple[str, ...] = _DEFAULT_STRATEGIES
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
            raise ValueError(f"local_batches are several whole numbers from 1 on, not {sizes}")
        if isinstance(self.strategies, str):
            object.__setattr__(self, "strategies", (self.strategies,))
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(
                f"strategies are of {', '.join(STRATEGIES)}, not {', '.join(unknown) or 'none'}"
            )

    def largest_global_batch(self, examples: int) -> int:
        """The most examples behind an update, of an epoch of so many."""
        if self.max_global_batch is not None:
            return self.max_global_batch
        return min(_LARGEST_BATCH, examples, max(_SMALLEST_LIMIT, examples // _UPDATES_AN_EPOCH))


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Candidates that cannot be, for one reason.

    Attributes:
        limit: "memory", "max_usd" or "max_hours".
        count: how many.
        reason: of the one that misses by least, with what to change.
    """

    limit: str
    count: int
    reason: str


# Limits on the whole run, and how what a plan takes of them is written.
_LIMITED = {
    "max_usd": (lambda each: each.usd, dollars),
    "max_hours": (lambda each: each.hours, duration),
}


def within_limits(plans, limits):
    kept, out = [], collections.defaultdict(list)
    for plan in plans:
        missed = [name for name in _LIMITED if _ratio(plan, limits, name) > 1]
        for name in missed:
            out[name].append(plan)
        if not missed:
            kept.append(plan)
    return kept, [
        Rejected(name, len(missed), _nearest(missed, limits, name)) for name, missed in out.items()
    ]


def _ratio(plan, limits, name):
    limit = getattr(limits, name)
    return 0.0 if limit is None else _LIMITED[name][0](plan) / limit


def _nearest(plans, limits, name):
    takes, unit = _LIMITED[name]
    nearest = min(plans, key=takes)
    limit = unit(getattr(limits, name))
    return f"the nearest takes {unit(takes(nearest))} of {limit}: {nearest}"


def impossible(candidates, otherwise, rejections, limits):
    """Which limit to loosen, and by how much, when nothing keeps to all of them.

    Args:
        candidates: all that fit in memory.
        otherwise: the same as spot VMs, or on demand where spot VMs were asked for.
        rejections: of those that do not fit.
        limits: that are not kept.
    """
    if limits.spot and otherwise and not candidates:
        return "none of these machines has a price for spot VMs; leave --spot out"
    if not candidates and not otherwise:
        return f"no plan fits in memory: {rejections[0].reason}"
    lines = [_loosened(candidates, limits, name) for name in _LIMITED]
    within, _ = within_limits(otherwise, limits)
    if within:
        best = min(within, key=lambda each: each.usd * each.hours)
        flag = "on demand, --nospot" if limits.spot else "on spot VMs, --spot"
        lines.append(f"  {flag}: {dollars(best.usd)} and {duration(best.hours)}, {best}")
    lines = [line for line in lines if line]
    if lines:
        return "\n".join(["no plan keeps to all limits; loosen one of them:", *lines])
    nearest = min(candidates, key=lambda each: max(_ratio(each, limits, n) for n in _LIMITED))
    wanted = " and ".join(
        f"--{name}={_round_up(takes(nearest)):g}"
        for name, (takes, _) in _LIMITED.items()
        if getattr(limits, name) is not None
    )
    return f"no plan keeps to both limits; {wanted} would do, for {nearest}"


def _loosened(candidates, limits, name):
    """The least that this limit has to be for the others to be kept; None where that is none."""
    takes, unit = _LIMITED[name]
    others = [other for other in _LIMITED if other != name]
    within = [each for each in candidates if all(_ratio(each, limits, n) <= 1 for n in others)]
    if getattr(limits, name) is None or not within:
        return None
    nearest = min(within, key=takes)
    return (
        f"  --{name}={_round_up(takes(nearest)):g} (now {getattr(limits, name):g}): "
        f"{unit(takes(nearest))} for {nearest}"
    )


def _round_up(value):
    """To three digits, upwards."""
    step = 10 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / step) * step
