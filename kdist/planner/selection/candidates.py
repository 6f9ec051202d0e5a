"""Candidates, and their ranking.

Candidates are layouts and local batches of a job on machines of an offer that fit in memory.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from kdist.batch import Batch
from kdist.layout import Layout
from kdist.planner.cost.step import on_demand_usd
from kdist.planner.plans import Plan, batch_of, describe
from kdist.planner.selection.constraints import Constraints, Rejection
from kdist.planner.selection.prediction import Predictor, required_gpu
from kdist.planner.tables.prices import Offer

_ACCUMULATIONS = (1, 2, 4, 8)
_LOCAL_STEPS = 8
# Pipelines of S stages are tried with S times these numbers of micro-batches.
_MICRO_BATCHES_PER_STAGE = (1, 2, 4)
# Of each split layout, this number of the largest batches that fit.
_SPLIT_BATCHES = 2
# Splits need more care than replicas, and fewer published rates have validated their prediction:
# they are candidates only if they are faster by this factor.
_MIN_SPEEDUP_OF_SPLIT = 1.1

RANKINGS = ("auto", "time", "money", "both")
# What the first plan of each ranking is called.
CHOICES = {"time": "fastest", "money": "cheapest", "both": "balanced"}
# Number of plans that are checked for slowdowns, and the smallest relative slowdown to report.
_CHECKED_PLANS, _MIN_SLOWDOWN = 20, 0.01
# A smaller global batch suits more learning rates, and predictions of whole replicas are validated:
# these are preferred within this fraction of time.
_TOLERANCE = 0.02

_KEYS = {
    "time": lambda each: (each.hours, each.usd),
    "money": lambda each: (each.usd, each.hours),
    "both": lambda each: (each.usd * each.hours, each.hours),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Layout and local batch on machines of an offer, with what ranking needs.

    `hours` are those of the whole run. `usd_per_hour` is the price of one machine, on demand or as
    a spot VM.
    """

    layout: Layout
    local_batch: int
    offer: Offer
    hours: float
    usd_per_hour: float

    @property
    def batch(self) -> Batch:
        """Sizes of the batch."""
        return batch_of(self.layout, self.local_batch)

    @property
    def usd(self) -> float:
        """Price of the whole run in US dollars."""
        return on_demand_usd(self.hours, self.usd_per_hour, self.layout.machines)

    def __str__(self):
        return describe(self.layout, self.local_batch, self.offer.machine)


def priced_candidates(
    predictor: Predictor, fitting: Sequence[tuple[Layout, int, Offer]], spot: bool
) -> list[Candidate]:
    """Returns candidates with hours and prices: on demand, or as spot VMs if these have a price."""
    prices = [offer.spot_usd_per_hour if spot else offer.usd_per_hour for *_, offer in fitting]
    priced = [
        (*each, price) for each, price in zip(fitting, prices, strict=True) if price is not None
    ]
    if not priced:
        return []
    rates = predictor.rates([(layout, batch, offer.machine) for layout, batch, offer, _ in priced])
    all_hours = (predictor.job.trained_examples / rates / 3600).tolist()
    if spot:
        all_hours = [
            predictor.spot.expected_hours(hours, layout.machines, predictor.save_hours)
            for hours, (layout, *_) in zip(all_hours, priced, strict=True)
        ]
    return [
        Candidate(layout, batch, offer, hours, price)
        for hours, (layout, batch, offer, price) in zip(all_hours, priced, strict=True)
    ]


def fitting_layouts(
    predictor: Predictor, offers: Sequence[Offer], constraints: Constraints
) -> tuple[list[tuple[Layout, int, Offer]], list[Rejection]]:
    """Returns layouts, local batches, and offers that fit in memory, and the rejections.

    Sharded and split layouts that do not fit are no rejections: they are tried because something
    else does not.

    Raises:
        ValueError: If no layout meets the constraints on machines, strategies, and batches.
    """
    largest = constraints.largest_global_batch(predictor.job.examples)
    fitting, too_large = [], []
    for offer in offers:
        available = required_gpu(offer.machine.gpu).memory_gb
        for layout, batch in _layouts(predictor, offer, constraints, largest):
            needed = predictor.memory(layout, batch).total
            if available and needed > available * 1e9:
                too_large.append(
                    (needed / available / 1e9, needed, available, layout, batch, offer)
                )
            else:
                fitting.append((layout, batch, offer))
        for found in (_sharded_layouts, _split_layouts):
            pairs = found(predictor, offer, constraints, largest)
            fitting += [(layout, batch, offer) for layout, batch in pairs]
    if not fitting and not too_large:
        raise ValueError(_no_layout_message(offers, constraints, largest))
    return fitting, _memory_rejections(predictor, too_large)


def _layouts(predictor, offer, constraints, largest) -> Iterator[tuple[Layout, int]]:
    """Yields layouts with global batches up to `largest`, whether they fit in memory or not.

    Accumulation is for what does not fit at once: with several micro-steps, only the largest local
    batch that fits is a candidate.
    """
    accumulations = _accumulations(constraints)
    for machines, devices in _device_counts(offer, constraints):
        for options, accumulate in itertools.product(
            _strategies(machines, devices, constraints), accumulations
        ):
            layout = Layout(
                data=machines * devices, machines=machines, accumulate=accumulate, **options
            )
            pairs = _with_batches(layout, constraints, largest)
            if accumulate == accumulations[0]:
                yield from pairs
            elif machines * devices > 1:  # without an exchange nothing is saved
                yield from _first_that_fits(predictor, pairs, offer)


def _accumulations(constraints):
    return (constraints.accumulate,) if constraints.accumulate else _ACCUMULATIONS


def _with_batches(layout, constraints, largest):
    """Returns a layout with each local batch that its global batch allows, the largest first."""
    return [
        (layout, batch)
        for batch in sorted(constraints.local_batches, reverse=True)
        if batch_of(layout, batch).global_size <= largest
    ]


def _sharded_layouts(predictor, offer, constraints, largest) -> Iterator[tuple[Layout, int]]:
    """Yields layouts of replicas that divide training state, and batches that fit.

    On one machine, the first shard of each batch that fits is a candidate: the others take longer.
    Several exchange less with each other if each divides the weights within.
    """
    if "sharded" not in constraints.strategies:
        return
    accumulations = _accumulations(constraints)
    for machines, devices in _device_counts(offer, constraints):
        for accumulate in accumulations:
            layout = Layout(data=machines * devices, machines=machines, accumulate=accumulate)
            if layout.strategy not in constraints.strategies:
                continue
            sharded = [
                dataclasses.replace(layout, shard=shard) for shard in predictor.shards(layout)
            ]
            number = 1 if machines == 1 else len(sharded)
            found = (
                pair
                for _, batch in _with_batches(layout, constraints, largest)
                for pair in _first_that_fits(
                    predictor, [(each, batch) for each in sharded], offer, number
                )
            )
            is_first = accumulate == accumulations[0]
            yield from found if is_first else itertools.islice(found, number)


def _first_that_fits(predictor, pairs, offer, number=1):
    available = required_gpu(offer.machine.gpu).memory_gb
    fits = (
        pair for pair in pairs if not available or predictor.memory(*pair).total <= available * 1e9
    )
    return list(itertools.islice(fits, number))


def _split_layouts(predictor, offer, constraints, largest) -> Iterator[tuple[Layout, int]]:
    """Yields split layouts of all devices of a machine, with the largest batches that fit.

    A pipeline recomputes activations only where it does not fit otherwise.
    """
    if "split" not in constraints.strategies or predictor.job.jit_compile:
        return
    devices, accumulate = offer.machine.gpus_per_node, constraints.accumulate or 1
    # Statistics of fewer rows than the smallest batch would change the training.
    smallest = min(constraints.local_batches) if predictor.uses_batch_statistics() else 1
    for group in powers_of_two(devices)[1:]:
        if devices % group:
            continue
        shared = {"data": devices // group, "accumulate": accumulate}
        layouts = [Layout(tensor=group, **shared)]
        for times in _MICRO_BATCHES_PER_STAGE:
            layouts.append(Layout(pipeline=group, micro_batches=times * group, **shared))
        for layout in filter(predictor.split, layouts):
            batches = [
                batch
                for batch in sorted(constraints.local_batches, reverse=True)
                if batch_of(layout, batch).global_size <= largest
                and batch % layout.micro_batches == 0
                and batch >= smallest * layout.micro_batches
            ]
            recomputing = [layout]
            if layout.micro_batches > 1:
                recomputing.append(dataclasses.replace(layout, recompute=True))
            for each in recomputing:
                pairs = [(each, batch) for batch in batches]
                if found := _first_that_fits(predictor, pairs, offer, _SPLIT_BATCHES):
                    yield from found
                    break


def without_slow_splits(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns candidates without split models that whole ones on the same machine outperform."""
    whole: dict[str, float] = {}
    for each in candidates:
        if each.layout.group_size == 1 and each.layout.machines == 1:
            name = each.offer.machine.name
            whole[name] = min(each.hours, whole.get(name, each.hours))
    return [
        each
        for each in candidates
        if each.layout.group_size == 1
        or each.hours * _MIN_SPEEDUP_OF_SPLIT < whole.get(each.offer.machine.name, math.inf)
    ]


def _device_counts(offer, constraints):
    """Yields numbers of machines, and of devices on each."""
    per_machine = offer.machine.gpus_per_node
    for devices in powers_of_two(per_machine):
        yield 1, devices
    for machines in powers_of_two(constraints.max_machines)[1:]:
        yield machines, per_machine


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, …, and `largest` itself."""
    return sorted({*(2**power for power in range(largest.bit_length())), largest})


def _strategies(machines, devices, constraints):
    """Yields the options of a layout for each strategy that suits these devices."""
    if Layout(data=machines * devices, machines=machines).strategy in constraints.strategies:
        yield {}
    if "local_sgd" in constraints.strategies and machines * devices > 1:
        yield {"local_steps": _LOCAL_STEPS}
    if "parameter_server" in constraints.strategies and machines > 1:
        yield {"asynchronous": True}


def _memory_rejections(predictor, too_large):
    if not too_large:
        return []
    _, needed, available, layout, batch, offer = min(too_large, key=lambda each: each[0])
    reason = (
        f"{batch} examples per device do not fit: {needed / 1e9:.1f} GB on {available:g} GB "
        f"({offer.machine.gpu}); {_smaller_batch_text(predictor, layout, batch, available)}"
    )
    return [Rejection("memory", len(too_large), reason)]


def _no_layout_message(offers, constraints, largest):
    if not offers:
        return "no machine is left to choose from; loosen --gpu, --cloud or --machine"
    counts = [
        machines * devices
        for offer in offers
        for machines, devices in _device_counts(offer, constraints)
        if any(True for _ in _strategies(machines, devices, constraints))
    ]
    if not counts:
        return (
            f"{', '.join(constraints.strategies)}: not available on these machines. one_device is "
            "for one device, mirrored and local_sgd need a machine with several GPUs or more "
            "machines, multi_worker and parameter_server several machines (--max_machines), and "
            "sharded needs mirrored or multi_worker"
        )
    accumulate = constraints.accumulate or 1
    smallest = min(counts) * min(constraints.local_batches) * accumulate
    return (
        f"no global batch of {largest} or less is possible with local batches from "
        f"{min(constraints.local_batches)} on, {accumulate} micro-steps, and these machines and "
        f"strategies: raise max_global_batch to {smallest} at least (--max_global_batch), or lower "
        "local_batches (--local_batch_sizes)"
    )


def _smaller_batch_text(predictor, layout, local_batch, available):
    """Returns the largest half, quarter, … of a local batch that fits, in words."""
    batch = local_batch // 2
    accumulating = dataclasses.replace(layout, accumulate=2)
    while batch:
        if predictor.memory(accumulating, batch).total <= available * 1e9:
            parts = local_batch // batch
            verb = "halve the local batch" if parts == 2 else f"take a local batch of {batch}"
            return f"{verb} or accumulate {parts}"
        batch //= 2
    return "not even one example does: take a larger GPU, or a machine with more of them"


def resolve_ranking(ranking: str, constraints: Constraints) -> str:
    """Returns "time", "money", or "both"; "auto" follows from what is limited.

    Raises:
        ValueError: If the ranking is unknown.
    """
    if ranking not in RANKINGS:
        raise ValueError(f"ranking is one of {', '.join(RANKINGS)}, not {ranking!r}")
    if ranking != "auto":
        return ranking
    if constraints.max_usd is not None and constraints.max_hours is None:
        return "time"
    if constraints.max_hours is not None and constraints.max_usd is None:
        return "money"
    return "both"


def rank_candidates(
    candidates: Sequence[Candidate], ranking: str, one_machine_first: bool
) -> list[Candidate]:
    """Returns the best batch of each machine and strategy, best first.

    Args:
        candidates: candidates that meet the constraints.
        ranking: "time", "money", or "both".
        one_machine_first: whether candidates on one machine come before those on several, which
            are more work to set up and to keep running.
    """
    found = sorted(_best_batches(candidates), key=_KEYS[ranking])
    if one_machine_first:
        found.sort(key=lambda each: each.layout.machines > 1)
    return found


def _best_batches(candidates) -> Iterator[Candidate]:
    """Yields the fastest batch of each strategy on each machine, or a smaller, similar one.

    Replicas divide training state only if whole ones do not fit, or take longer.
    """
    groups: dict[tuple, list[Candidate]] = {}
    for each in candidates:
        layout = each.layout
        counts = layout.machines, layout.devices
        key = (each.offer.machine.name, layout.strategy, layout.local_steps, *counts)
        groups.setdefault(key, []).append(each)
    for group in groups.values():
        whole = [each for each in group if each.layout.shard is None]
        hours = min((each.hours for each in whole), default=math.inf)
        sharded = [each for each in group if each.layout.shard is not None]
        faster = [each for each in sharded if each.hours * (1 + _TOLERANCE) < hours]
        chosen = faster or whole
        hours = min(each.hours for each in chosen) * (1 + _TOLERANCE)
        fast = [each for each in chosen if each.hours <= hours]
        yield min(fast, key=lambda each: (each.batch.global_size, each.hours))


def pareto_front(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Returns plans that no other plan beats in both time and money, the cheapest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.usd, plan.hours)):
        if not front or plan.hours < front[-1].hours:
            front.append(plan)
    return tuple(front)


def choices(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Returns the first plan as "recommended", and the "fastest", "cheapest", and "balanced" one.

    The balanced plan has the smallest product of hours and dollars: half the time may cost twice
    as much. Without prices there is no cheapest and no balanced plan.
    """
    keys = _KEYS if any(plan.usd for plan in plans) else {"time": _KEYS["time"]}
    return {
        "recommended": plans[0],
        **{CHOICES[ranking]: min(plans, key=key) for ranking, key in keys.items()},
    }


def slowdown_warnings(predictor, plans, offers) -> Iterator[str]:
    """Yields a sentence for each machine on which more devices process fewer examples per second.

    Compares the same strategy with the same local batch: a limited global batch slows more devices
    down as well, but not because of the devices.
    """
    offer_of = {offer.machine: offer for offer in offers}
    first_plans: dict[tuple, Plan] = {}
    for plan in plans[:_CHECKED_PLANS]:
        layout = plan.layout
        if layout.group_size > 1:
            continue
        options = layout.local_steps, layout.asynchronous, layout.accumulate, layout.shard
        first_plans.setdefault((plan.machine, *options, plan.local_batch), plan)
    warned = set()
    for (machine, *_), plan in first_plans.items():
        for fewer, more in itertools.pairwise(_on_more(predictor, plan, offer_of[machine])):
            rates = [each.prediction.examples_per_second for each in (fewer, more)]
            if rates[1] < (1 - _MIN_SLOWDOWN) * rates[0] and machine not in warned:
                warned.add(machine)
                yield (
                    f"{describe(more.layout, more.local_batch, machine)} is slower than on "
                    f"{fewer.layout.devices} ({rates[1]:,.0f} against {rates[0]:,.0f} examples/s): "
                    f"{_largest_term(more)}"
                )


def _on_more(predictor, plan, offer):
    """Yields the plan's strategy and batch on 1, 2, 4, … devices of one machine."""
    for devices in powers_of_two(offer.machine.gpus_per_node):
        layout = dataclasses.replace(plan.layout, data=devices, machines=1, asynchronous=False)
        yield predictor.plan(layout, plan.local_batch, offer)


def _largest_term(plan):
    """Returns the largest term of a step other than computing, in words."""
    others = [term for term in plan.prediction.terms if term.name != "compute"]
    largest = max(others, key=lambda term: term.seconds)
    return f"{largest.name} takes {largest.seconds / plan.prediction.step_seconds:.0%} of a step"
