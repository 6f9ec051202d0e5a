"""Balances a model's operations over stages, or over devices that run side by side."""

import collections
import dataclasses
import itertools
import math

from kdist.parallel.search.costs import LINK_BYTES_PER_SECOND, OperationCost
from kdist.planner.cost.split import MAX_IMBALANCE, best_cuts


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
