"""Enumerates layouts, batches and machines, rejects what cannot be, and ranks the rest.

found = search(Predictor(job), known_offers(), Limits(max_usd=100))
found.best, found.plans, found.rejected, found.warnings
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from kdist.planner.candidates import Candidate, candidates, powers_of_two, within_memory
from kdist.planner.limits import Limits, Rejected, impossible, within_limits
from kdist.planner.plans import Plan, describe
from kdist.planner.predicting import Predictor
from kdist.planner.prices import Offer

# Of how many plans, from the first on, it is asked whether more devices make them slower; and what
# share of the rate is more than nothing.
_LOOKED_AT, _CLEARLY = 20, 0.01
# A smaller global batch asks less of learning rates; it is taken for so small a part of the time.
_NEARLY = 0.02
RANKINGS = ("auto", "time", "money", "both")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        plans: the best batch of each machine and strategy, best first.
        ranking: "time", "money" or "both": what best means.
        pareto: those of `plans` that no other beats in both time and money.
        rejected: why others are not among them.
        warnings: such as more devices that make it slower.
        global_batch_limit: the most examples behind an update that were looked at.
    """

    plans: tuple[Plan, ...]
    ranking: str
    pareto: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    warnings: tuple[str, ...]
    global_batch_limit: int

    @property
    def best(self) -> Plan:
        """The first."""
        return self.plans[0]


def search(
    predictor: Predictor,
    offers: Iterable[Offer],
    limits: Limits = Limits(),  # noqa: B008 - frozen
    ranking: str = "auto",
) -> Found:
    """The plans within the limits, best first.

    Args:
        predictor: of the job.
        offers: machines to choose from.
        limits: what a plan has to keep to.
        ranking: "time", "money", or "both": time × money, so that half the time is worth twice the
            money. "auto" is time where only money is limited, money where only time is, else both.

    Raises:
        ValueError: no plan keeps to the limits; the message says which one to loosen, and by how
            much.
    """
    if ranking not in RANKINGS:
        raise ValueError(f"ranking is one of {', '.join(RANKINGS)}, not {ranking!r}")
    offers = list(offers)
    ranking = _auto(limits) if ranking == "auto" else ranking
    fitting, rejections = within_memory(predictor, offers, limits)
    found = candidates(predictor, fitting, limits.spot)
    kept, out_of_limits = within_limits(found, limits)
    if not kept:
        others = candidates(predictor, fitting, not limits.spot)
        raise ValueError(impossible(found, others, rejections, limits))
    best = sorted(_best_of_each_kind(kept), key=_KEYS[ranking])
    plans = tuple(predictor.plan(each.layout, each.offer, limits.spot) for each in best)
    return Found(
        plans=plans,
        ranking=ranking,
        pareto=pareto(plans),
        rejected=(*rejections, *out_of_limits),
        warnings=tuple(_slower_with_more(predictor, plans[:_LOOKED_AT], offers)),
        global_batch_limit=limits.largest_global_batch(predictor.job.examples),
    )


def _best_of_each_kind(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Of each way to train on each machine the fastest batch, or a smaller one nearly as fast."""
    kinds: dict[tuple, list[Candidate]] = {}
    for each in found:
        layout = each.layout
        kind = (each.offer.machine.name, str(layout), layout.machines, layout.devices)
        kinds.setdefault(kind, []).append(each)
    for each_kind in kinds.values():
        hours = min(each.hours for each in each_kind) * (1 + _NEARLY)
        fast = [each for each in each_kind if each.hours <= hours]
        yield min(fast, key=lambda each: (each.layout.batch.global_size, each.hours))


def pareto(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Those that no other beats in time and money at once, the cheapest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.usd, plan.hours)):
        if not front or plan.hours < front[-1].hours:
            front.append(plan)
    return tuple(front)


_KEYS = {
    "time": lambda each: (each.hours, each.usd),
    "money": lambda each: (each.usd, each.hours),
    "both": lambda each: (each.usd * each.hours, each.hours),
}


def _auto(limits):
    if limits.max_usd is not None and limits.max_hours is None:
        return "time"
    if limits.max_hours is not None and limits.max_usd is None:
        return "money"
    return "both"


def _slower_with_more(predictor, plans, offers):
    """A sentence for each machine on which more devices give fewer examples a second.

    Of the same way to train, at the same local batch: a global batch that is limited makes more
    devices slower as well, but not by what they are.
    """
    offer_of = {offer.machine: offer for offer in offers}
    groups: dict[tuple, Plan] = {}
    for plan in plans:
        layout = plan.layout
        way = layout.local_steps, layout.strategy == "parameter_server", layout.accumulate
        key = (plan.machine, *way, layout.local_batch)
        groups.setdefault(key, plan)
    said = set()
    for (machine, *_), plan in groups.items():
        for fewer, more in itertools.pairwise(_on_more(predictor, plan, offer_of[machine])):
            rates = [each.prediction.examples_per_second for each in (fewer, more)]
            if rates[1] < (1 - _CLEARLY) * rates[0] and machine not in said:
                said.add(machine)
                yield (
                    f"{describe(more)} is slower than on {fewer.layout.batch.replicas} "
                    f"({rates[1]:,.0f} against {rates[0]:,.0f} examples/s): {_largest_term(more)}"
                )


def _on_more(predictor, plan, offer):
    """The plan's way to train and its batch on 1, 2, 4 … devices of one machine."""
    for devices in powers_of_two(offer.machine.gpus_per_node):
        layout = dataclasses.replace(
            plan.layout,
            strategy="one_device" if devices == 1 else "mirrored",
            machines=1,
            devices=devices,
        )
        yield predictor.plan(layout, offer)


def _largest_term(plan):
    """What besides computing takes most of a step."""
    others = [term for term in plan.prediction.terms if term.name != "compute"]
    largest = max(others, key=lambda term: term.seconds)
    return f"{largest.name} takes {largest.seconds / plan.prediction.step_seconds:.0%} of a step"
