"""Ranking of candidates and plans, and warnings about devices that make training slower."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from kdist.planner.plans import Plan, describe
from kdist.planner.selection.candidates import Candidate, powers_of_two
from kdist.planner.selection.constraints import Constraints

RANKINGS = ("auto", "time", "money", "both")
# What the first plan of each ranking is called.
CHOICES = {"time": "fastest", "money": "cheapest", "both": "balanced"}
# Number of plans that are checked for slowdowns, and the smallest relative slowdown to report.
_CHECKED_PLANS, _MIN_SLOWDOWN = 20, 0.01
# A smaller global batch suits more learning rates: it is preferred within this fraction of time.
_BATCH_TOLERANCE = 0.02

_KEYS = {
    "time": lambda each: (each.hours, each.usd),
    "money": lambda each: (each.usd, each.hours),
    "both": lambda each: (each.usd * each.hours, each.hours),
}


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
    candidates: Sequence[Candidate], ranking: str, one_machine_first: bool = False
) -> list[Candidate]:
    """Returns the best batch of each machine and strategy, best first.

    Args:
        candidates: candidates that meet the constraints.
        ranking: "time", "money", or "both".
        one_machine_first: whether candidates on one machine come before those on several, which
            are more work to set up and to keep running. Defaults to False.
    """
    found = sorted(_best_batches(candidates), key=_KEYS[ranking])
    if one_machine_first:
        found.sort(key=lambda each: each.layout.machines > 1)
    return found


def _best_batches(candidates) -> Iterator[Candidate]:
    """Yields the fastest batch of each strategy on each machine, or a smaller, similar one."""
    groups: dict[tuple, list[Candidate]] = {}
    for each in candidates:
        layout = each.layout
        counts = layout.machines, layout.devices
        key = (each.offer.machine.name, layout.strategy, layout.local_steps, *counts)
        groups.setdefault(key, []).append(each)
    for group in groups.values():
        hours = min(each.hours for each in group) * (1 + _BATCH_TOLERANCE)
        fast = [each for each in group if each.hours <= hours]
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
        options = layout.local_steps, layout.asynchronous, layout.accumulate
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
