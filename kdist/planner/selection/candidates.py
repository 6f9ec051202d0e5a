"""Candidates: layouts and local batches of a job on machines of an offer that fit in memory."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from kdist.batch import Batch
from kdist.layout import Layout
from kdist.planner.cost.step import on_demand_usd
from kdist.planner.plans import batch_of, describe
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
            predictor.spot.expected_hours(hours, layout.machines)
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

    Split layouts that do not fit are no rejections: they are tried because something else does not.

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
        splits = _split_layouts(predictor, offer, constraints, largest)
        fitting += [(layout, batch, offer) for layout, batch in splits]
    if not fitting and not too_large:
        raise ValueError(_no_layout_message(offers, constraints, largest))
    return fitting, _memory_rejections(predictor, too_large)


def _layouts(predictor, offer, constraints, largest) -> Iterator[tuple[Layout, int]]:
    """Yields layouts with global batches up to `largest`, whether they fit in memory or not.

    Accumulation is for what does not fit at once: with several micro-steps, only the largest local
    batch that fits is a candidate.
    """
    accumulations = (constraints.accumulate,) if constraints.accumulate else _ACCUMULATIONS
    for machines, devices in _device_counts(offer, constraints):
        for options, accumulate in itertools.product(
            _strategies(machines, devices, constraints), accumulations
        ):
            layout = Layout(
                data=machines * devices, machines=machines, accumulate=accumulate, **options
            )
            pairs = [
                (layout, batch)
                for batch in sorted(constraints.local_batches, reverse=True)
                if batch_of(layout, batch).global_size <= largest
            ]
            if accumulate == accumulations[0]:
                yield from pairs
            elif machines * devices > 1:  # without an exchange nothing is saved
                yield from _first_that_fits(predictor, pairs, offer)


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
            "machines, multi_worker and parameter_server several machines (--max_machines)"
        )
    accumulate = constraints.accumulate or 1
    smallest = min(counts) * min(constraints.local_batches) * accumulate
    return (
        f"no global batch of {largest} or less is possible with local batches from "
        f"{min(constraints.local_batches)} on, {accumulate} micro-steps, and these machines and "
        f"strategies: raise max_global_batch to {smallest} at least, or lower local_batches"
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
