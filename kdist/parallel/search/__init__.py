"""Finds placements automatically: stages, branches, divided weights, and the layout itself."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import keras

from kdist.layout import Layout
from kdist.parallel.pipeline.micro_batches import check_micro_batches
from kdist.parallel.placement import (
    Device,
    Division,
    Stage,
    device,
    operations_by_name,
    stage,
)
from kdist.parallel.search.costs import (
    LINK_BYTES_PER_SECOND,
    ModelWork,
    OperationCost,
    device_bytes,
    step_seconds,
)
from kdist.parallel.search.divide import Divisions, choose_divisions
from kdist.planner.cost.split import MAX_IMBALANCE, best_cuts

# Pipelines of S stages are tried with S times these numbers of micro-batches.
_MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)
# Placements count as equally fast if their predicted steps are within this factor.
_EQUALLY_FAST = 1.1


class Suggestion(dict[str, Stage | Device | Division]):
    """A placement for `kdist.parallel.split`, and its predicted costs.

    Attributes:
        layout: layout for `kdist.create_strategy`.
        gathered: layers that are divided by column and whose output is gathered.
        device_gb: GB (1e9 bytes) on the fullest device: weights, gradients, two slots and kept
            activations, without temporaries.
        step_seconds: predicted seconds of a step on V100s with NVLink. Use it only to compare
            suggestions.

    Example:
        kdist.devices.find_devices(4)  # before the model, which starts TensorFlow
        plain = kdist.models.lenet(input_shape=(28, 28, 1), num_classes=10)
        placement = kdist.parallel.suggest(plain, devices=4)
        with kdist.create_strategy(placement.layout).scope():
            model = kdist.parallel.split(plain, placement)
    """

    layout: Layout
    gathered: tuple[str, ...]
    device_gb: float
    step_seconds: float


def suggest(
    model: keras.Model,
    layout: Layout | None = None,
    memory_gb: float | None = None,
    batch_size: int = 32,
    *,
    devices: int | None = None,
    costs: Mapping[str, float] | None = None,
) -> Suggestion:
    """Returns a placement for `split` that keeps the devices of a replica about equally busy.

    Stages cut the order of computation such that the longest stage is short and few bytes cross.
    Branches are assigned to the device on which they end first, the longest path to the end first:
    Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for
    heterogeneous computing" (HEFT), 2002. With `tensor`, the largest layers are divided with few
    gathers: columns, then rows (`kdist.parallel.search.divide`).

    With `devices` instead of a layout, all layouts of that many devices are tried. Among those that
    fit and whose predicted step is nearly the shortest, the one with the most replicas and then the
    fewest micro-batches is chosen.

    Args:
        model: built functional or Sequential model.
        layout: layout with stages, branches or divided weights. Pass this or `devices`.
        memory_gb: GB (1e9 bytes) of each device. A placement that needs more is refused. None
            (default) for no limit.
        batch_size: examples per step over all replicas. Defaults to 32.
        devices: number of devices. Logical CPU devices must exist before the model, because
            TensorFlow starts with it: call `kdist.devices.find_devices` first.
        costs: seconds of each operation's forward and backward pass, per example, as
            `kdist.parallel.measure_costs` returns. None (default) to compute them.

    Returns:
        A `Suggestion`.

    Raises:
        ValueError: if both or neither of `layout` and `devices` are passed; if the layout has only
            replicas, more stages than layers, branches that are not worth it, or nothing that can
            be divided; if `costs` lacks an operation; or if a device would need more than
            `memory_gb`.

    Example:
        suggest(model, kdist.Layout(pipeline=4))         # {"stem": stage(0), …}
        suggest(model, kdist.Layout(tensor=4))           # {"block1_ffn_up": column(), …}
        suggest(model, devices=4, memory_gb=16).layout
    """
    if (layout is None) == (devices is None):
        raise ValueError(
            "pass either a layout, such as kdist.Layout(pipeline=2), or the number of devices, "
            "such as devices=4"
        )
    work = ModelWork(model, costs)
    if layout is None:
        return _fastest(work, devices, memory_gb, batch_size)
    if layout.group_size == 1:
        raise ValueError(
            f"{layout} has neither stages nor branches nor divided weights. Set pipeline, branch "
            "or tensor"
        )
    found = _suggestion(work, layout, batch_size)
    if memory_gb is not None and found.device_gb > memory_gb:
        raise ValueError(_too_large(found, memory_gb, batch_size))
    return found


def _suggestion(work, layout, batch_size):
    """Returns the suggestion for one layout."""
    divisions = Divisions()
    if layout.tensor > 1:
        divisions = choose_divisions(work.model, layout.tensor)
    operations = work.operation_costs(divisions)
    numbers = [0] * len(operations)
    if layout.pipeline > 1:
        numbers = balance_stages(operations, layout.pipeline)
    elif layout.branch > 1:
        numbers = assign_branches(operations, layout.branch)
    if layout.pipeline > 1 and layout.tensor > 1:
        # A column and its rows may now be on two stages, which needs other divisions.
        stages = _stages_of(work.model, operations, numbers)
        divisions = choose_divisions(work.model, layout.tensor, stages)
        operations = work.operation_costs(divisions)
    found = Suggestion(_placement(operations, numbers, layout, divisions))
    rows = -(-batch_size // layout.data)
    found.layout, found.gathered = layout, tuple(divisions.gathered)
    found.device_gb = max(device_bytes(operations, numbers, layout, rows)) / 1e9
    found.step_seconds = step_seconds(operations, numbers, layout, rows)
    return found


def _stages_of(model, operations, numbers):
    """Returns the stage of each operation; nested ones are on that of the outermost model."""
    outer = {each.name: number for each, number in zip(operations, numbers, strict=True)}
    return {name: outer[name.partition("/")[0]] for name in operations_by_name(model)}


def _placement(operations, numbers, layout, divisions):
    """Returns a placement with exact names."""
    places: dict[str, Stage | Device | Division] = {}
    number_of = dict(zip((each.name for each in operations), numbers, strict=True))
    if layout.group_size > layout.tensor:
        where = stage if layout.pipeline > 1 else device
        places = {name: where(number) for name, number in number_of.items()}
    for name, how in divisions.how.items():
        number = number_of[name.partition("/")[0]] if layout.pipeline > 1 else None
        places[name] = Division(how, number)
    return {re.escape(name): place for name, place in places.items()}


def _layouts(devices, batch_size) -> Iterator[Layout]:
    """Yields all layouts of a number of devices."""
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r} must be an integer of 1 or more")
    for data in _divisors(devices):
        group = devices // data
        if group > 1:
            yield Layout(data=data, branch=group)
        for pipeline in _divisors(group):
            stages = Layout(data=data, pipeline=pipeline, tensor=group // pipeline)
            yield stages
            for times in _MICRO_BATCHES_PER_STAGE:
                if pipeline > 1 and times * pipeline <= batch_size // data:
                    yield dataclasses.replace(stages, micro_batches=times * pipeline)


def _divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def _fastest(work, devices, memory_gb, batch_size):
    """Returns the simplest of the suggestions that fit and have nearly the shortest step."""
    found, refused = [], ""
    for layout in _layouts(devices, batch_size):
        if layout.data > batch_size:
            continue
        try:
            check_micro_batches(work.model, layout)
            found.append(_suggestion(work, layout, batch_size))
        except ValueError as error:  # too few layers, no branches, nothing to divide
            refused = f"{refused}; {layout}: {error}"
    if not found:
        raise ValueError(f"{work.model.name!r} has no placement for devices={devices}{refused}")
    fitting = [each for each in found if memory_gb is None or each.device_gb <= memory_gb]
    if not fitting:
        least = min(found, key=lambda each: each.device_gb)
        raise ValueError(
            f"no layout of {devices} devices fits. {_too_large(least, memory_gb, batch_size)}"
        )
    longest = _EQUALLY_FAST * min(each.step_seconds for each in fitting)
    return min(
        (each for each in fitting if each.step_seconds <= longest),
        key=lambda each: (-each.layout.data, each.layout.micro_batches, each.step_seconds),
    )


def _too_large(found, memory_gb, batch_size):
    return (
        f"{found.layout} would need {found.device_gb:.3f} GB on its fullest device, "
        f"{found.device_gb - memory_gb:.3f} GB more than memory_gb={memory_gb:g}, with "
        f"batch_size={batch_size}. Use a smaller batch, or more devices"
    )


def balance_stages(operations: list[OperationCost], stages: int) -> list[int]:
    """Returns the stage of each operation, for a nearly minimal longest stage and few transfers.

    Raises ValueError if there are fewer operations than stages. Operations between two calls of one
    layer count as one.
    """
    if len(operations) < stages:
        raise ValueError(f"{len(operations)} layers for {stages} stages. Use fewer stages")
    until = [0.0, *itertools.accumulate(operation.seconds for operation in operations)]
    excluded = _excluded_cuts(operations)
    count = 1 + sum(place not in excluded for place in range(1, len(operations)))
    if count < stages:
        raise ValueError(
            f"{count} parts for {stages} stages, because a layer that is called again must be on "
            "one stage with everything in between. Use fewer stages"
        )
    crossing = [
        math.inf if n in excluded else size for n, size in enumerate(_crossing_bytes(operations))
    ]
    free = [math.inf if n in excluded else 0.0 for n in range(len(crossing))]
    shortest = best_cuts(until, stages, free, math.inf)[0]
    _, cuts = best_cuts(until, stages, crossing, MAX_IMBALANCE * shortest)
    numbers = []
    for number, (first, end) in enumerate(itertools.pairwise([0, *cuts, len(operations)])):
        numbers += [number] * (end - first)
    return numbers


def _excluded_cuts(operations):
    """Returns the cuts between two calls of one layer, since stages only pass tensors forward."""
    return {
        place
        for number, operation in enumerate(operations)
        for place in range(number + 1, max(operation.sources, default=0) + 1)
    }


def _crossing_bytes(operations):
    """Returns, for each cut, the bytes that are produced before it and needed after it."""
    last = list(range(len(operations)))
    for number, operation in enumerate(operations):
        for source in operation.sources:
            last[source] = max(last[source], number)
    return [
        sum(o.out_bytes for o, use in zip(operations[:cut], last, strict=False) if use >= cut)
        for cut in range(len(operations) + 1)
    ]


def assign_branches(operations: list[OperationCost], devices: int) -> list[int]:
    """Returns the device of each operation, by HEFT; chains without branches stay on one device.

    Raises ValueError if some devices would not shorten the step, or a layer is called again.
    """
    for number, operation in enumerate(operations):
        if max(operation.sources, default=0) >= max(number, 1):
            raise ValueError(
                f"{operation.name!r} is called more than once, and branches of such a model cannot "
                "be found. Write a placement yourself"
            )
    chains, chain_of = _chains(operations)
    where = _first_done(chains, devices)
    used = len(set(where))
    if used < devices:
        raise ValueError(
            f"nothing is gained by more than {used} device{'s' * (used > 1)}: the model has no "
            f"further branches that take longer than sending their inputs. Use branch={used}, or "
            "write a placement yourself"
        )
    return [where[chain] for chain in chain_of]


def _chains(operations):
    """Returns (chains of operations without branches, number of each operation's chain)."""
    consumers = _consumers(operations)
    chains: list[OperationCost] = []
    chain_of: list[int] = []
    for operation in operations:
        if len(operation.sources) == 1 and len(consumers[operation.sources[0]]) == 1:
            number = chain_of[operation.sources[0]]
            seconds = chains[number].seconds + operation.seconds
            chains[number] = dataclasses.replace(
                chains[number], seconds=seconds, out_bytes=operation.out_bytes
            )
        else:
            number = len(chains)
            sources = tuple(sorted({chain_of[source] for source in operation.sources}))
            chains.append(dataclasses.replace(operation, sources=sources))
        chain_of.append(number)
    return chains, chain_of


def _first_done(chains, devices):
    """Returns the device of each chain: the one on which it ends first."""
    consumers, to_end = _consumers(chains), [0.0] * len(chains)
    for number in reversed(range(len(chains))):
        ahead = [_send_seconds(chains[number]) + to_end[each] for each in consumers[number]]
        to_end[number] = chains[number].seconds + max(ahead, default=0.0)
    free, done, where = [0.0] * devices, [0.0] * len(chains), [0] * len(chains)
    # Sources come first in the order of chains, which a stable sort keeps for equal lengths.
    for number in sorted(range(len(chains)), key=lambda n: -to_end[n]):
        chain = chains[number]
        ends = []
        for here in range(devices):
            arrivals = [
                done[s] + _send_seconds(chains[s]) * (where[s] != here) for s in chain.sources
            ]
            ends.append(max([free[here], *arrivals]) + chain.seconds)
        here = ends.index(min(ends))
        where[number], done[number], free[here] = here, ends[here], ends[here]
    return where


def _consumers(operations):
    consumers = collections.defaultdict(list)
    for number, operation in enumerate(operations):
        for source in operation.sources:
            consumers[source].append(number)
    return consumers


def _send_seconds(operation):
    return operation.out_bytes / LINK_BYTES_PER_SECOND
