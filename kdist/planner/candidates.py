"""Layouts of a job on machines of an offer: all of them, those that fit in memory, their hours."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from kdist.planner.limits import Limits, Rejected
from kdist.planner.money import on_demand_usd
from kdist.planner.plans import Layout, described
from kdist.planner.predicting import Predictor, gpu_of
from kdist.planner.prices import Offer

_ACCUMULATIONS = (1, 2, 4, 8)
_LOCAL_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout on machines of an offer, as far as it is needed to rank it."""

    layout: Layout
    offer: Offer
    hours: float
    usd_per_hour: float

    @property
    def usd(self):
        """Of the whole run."""
        return on_demand_usd(self.hours, self.usd_per_hour, self.layout.machines)

    def __str__(self):
        return described(self.layout, self.offer.machine)


def candidates(
    predictor: Predictor, fitting: Sequence[tuple[Layout, Offer]], spot: bool
) -> list[Candidate]:
    """On demand, or as spot VMs where these have a price."""
    prices = [offer.spot_usd_per_hour if spot else offer.usd_per_hour for _, offer in fitting]
    priced = [
        (*pair, price) for pair, price in zip(fitting, prices, strict=True) if price is not None
    ]
    if not priced:
        return []
    rates = predictor.rates([(layout, offer.machine) for layout, offer, _ in priced])
    all_hours = (predictor.job.trained_examples / rates / 3600).tolist()
    if spot:
        all_hours = [
            predictor.spot.expected_hours(hours, layout.machines)
            for hours, (layout, *_) in zip(all_hours, priced, strict=True)
        ]
    return [
        Candidate(layout, offer, hours, price)
        for hours, (layout, offer, price) in zip(all_hours, priced, strict=True)
    ]


def within_memory(
    predictor: Predictor, offers: Sequence[Offer], limits: Limits
) -> tuple[list[tuple[Layout, Offer]], list[Rejected]]:
    """Layouts that fit, with their offers, and why others do not."""
    largest = limits.largest_global_batch(predictor.job.examples)
    fitting, too_large = [], []
    for offer in offers:
        available = gpu_of(offer.machine).memory_gb
        for layout in _layouts(predictor, offer, limits, largest):
            needed = predictor.memory(layout).total
            if available and needed > available * 1e9:
                too_large.append((needed / available / 1e9, needed, available, layout, offer))
            else:
                fitting.append((layout, offer))
    if not fitting and not too_large:
        raise ValueError(_no_batch(offers, limits, largest))
    return fitting, _too_large(predictor, too_large)


def _layouts(predictor, offer: Offer, limits: Limits, largest: int) -> Iterator[Layout]:
    """Those with global batches up to `largest`, whether they fit in memory or not.

    Accumulation is for what does not fit at once: of several micro-steps, only the largest local
    batch that fits is worth looking at.
    """
    accumulations = (limits.accumulate,) if limits.accumulate else _ACCUMULATIONS
    for machines, devices in _counts(offer, limits):
        for strategy, local_steps in _ways(machines, devices, limits):
            for accumulate in accumulations:
                layouts = [
                    Layout(strategy, machines, devices, batch, accumulate, local_steps)
                    for batch in sorted(limits.local_batches, reverse=True)
                ]
                layouts = [each for each in layouts if each.batch.global_size <= largest]
                if accumulate == accumulations[0]:
                    yield from layouts
                elif machines * devices > 1:  # without an exchange nothing is saved
                    yield from _first_that_fits(predictor, layouts, offer)


def _first_that_fits(predictor, layouts, offer):
    available = gpu_of(offer.machine).memory_gb
    fits = (
        layout
        for layout in layouts
        if not available or predictor.memory(layout).total <= available * 1e9
    )
    return itertools.islice(fits, 1)


def _counts(offer, limits):
    per = offer.machine.gpus_per_node
    for devices in powers_of_two(per):
        yield 1, devices
    for machines in powers_of_two(limits.max_machines)[1:]:
        yield machines, per


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4 … and `largest` itself."""
    return sorted({*(2**power for power in range(largest.bit_length())), largest})


def _ways(machines, devices, limits):
    """Names of strategies, and their local steps."""
    if machines * devices == 1:
        synchronous = "one_device"
    else:
        synchronous = "mirrored" if machines == 1 else "multi_worker"
    if synchronous in limits.strategies:
        yield synchronous, None
    if "local_sgd" in limits.strategies and machines * devices > 1:
        yield synchronous, _LOCAL_STEPS
    if "parameter_server" in limits.strategies and machines > 1:
        yield "parameter_server", None


def _too_large(predictor, found):
    if not found:
        return []
    _, needed, available, layout, offer = min(found, key=lambda each: each[0])
    reason = (
        f"{layout.local_batch} examples a device do not fit: {needed / 1e9:.1f} GB on "
        f"{available:g} GB ({offer.machine.gpu}); {_smaller(predictor, layout, available)}"
    )
    return [Rejected("memory", len(found), reason)]


def _no_batch(offers, limits, largest):
    if not offers:
        return "no machine is left to choose from; loosen --gpu, --cloud or --machine"
    counts = [
        machines * devices
        for offer in offers
        for machines, devices in _counts(offer, limits)
        if any(_ways(machines, devices, limits))
    ]
    if not counts:
        return (
            f"{', '.join(limits.strategies)} cannot be had on these machines: one_device is for "
            "one device, mirrored and local_sgd need a machine with several GPUs or more machines, "
            "multi_worker and parameter_server several machines (--max_machines)"
        )
    smallest = min(counts) * min(limits.local_batches) * (limits.accumulate or 1)
    return (
        f"no global batch of {largest} or less can be made of local batches from "
        f"{min(limits.local_batches)} on, {limits.accumulate or 1} micro-steps and these machines "
        f"and strategies: raise max_global_batch to {smallest} at least, or lower local_batches"
    )


def _smaller(predictor, layout, available):
    """The largest half, quarter … of a local batch that fits, in words."""
    batch = layout.local_batch // 2
    while batch:
        smaller = dataclasses.replace(layout, local_batch=batch, accumulate=2)
        if predictor.memory(smaller).total <= available * 1e9:
            parts = layout.local_batch // batch
            verb = "halve the local batch" if parts == 2 else f"take a local batch of {batch}"
            return f"{verb} or accumulate {parts}"
        batch //= 2
    return "not even one example does: split the model over devices, or take a larger GPU"
