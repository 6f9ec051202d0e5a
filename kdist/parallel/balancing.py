"""Pieces of a model on stages that take about equally long, or on devices side by side.

balanced_stages(pieces, 4)           # the stage of each piece: [0, 0, 1, …]
branches(pieces, 2)                  # the device of each
"""

import collections
import dataclasses
import itertools
import math

from kdist.parallel.pieces import LINK_BYTES_PER_SECOND, Piece

# Stages may be so much longer than the best balance allows, where that lets fewer bytes cross.
_SLACK = 1.1


def balanced_stages(pieces: list[Piece], stages: int) -> list[int]:
    """The stage of each piece: the longest stage is about as short as can be, few bytes cross.

    Raises:
        ValueError: there are fewer pieces than stages, not counting such as are between two calls
            of one layer.
    """
    if len(pieces) < stages:
        raise ValueError(f"{len(pieces)} layers for {stages} stages: take fewer stages")
    until = [0.0, *itertools.accumulate(piece.seconds for piece in pieces)]
    nowhere = _no_cuts(pieces)
    count = 1 + sum(place not in nowhere for place in range(1, len(pieces)))
    if count < stages:
        raise ValueError(
            f"{count} parts for {stages} stages, as layers that are called again hold together what"
            " is between: take fewer stages"
        )
    crossing = [math.inf if n in nowhere else c for n, c in enumerate(_crossing_bytes(pieces))]
    free = [math.inf if n in nowhere else 0.0 for n in range(len(crossing))]
    shortest = _best_cuts(until, stages, free, math.inf)[0]
    _, cuts = _best_cuts(until, stages, crossing, _SLACK * shortest)
    numbers = []
    for number, (first, end) in enumerate(itertools.pairwise([0, *cuts, len(pieces)])):
        numbers += [number] * (end - first)
    return numbers


def _no_cuts(pieces):
    """Places between two calls of one layer: stages hand on to later ones only."""
    return {
        place
        for number, piece in enumerate(pieces)
        for place in range(number + 1, max(piece.sources, default=0) + 1)
    }


def _crossing_bytes(pieces):
    """For each place to cut, the bytes that are made before it and taken after it."""
    last = list(range(len(pieces)))
    for number, piece in enumerate(pieces):
        for source in piece.sources:
            last[source] = max(last[source], number)
    return [
        sum(p.out_bytes for p, taken in zip(pieces[:cut], last, strict=False) if taken >= cut)
        for cut in range(len(pieces) + 1)
    ]


def _best_cuts(until, stages, crossing, longest):
    """(seconds of the longest stage, where to cut): first the fewest bytes, then the shortest.

    Args:
        until: seconds of all pieces before each place.
        crossing: bytes that cross at each place.
        longest: seconds that no stage may be longer than.
    """
    count = len(until) - 1
    best = {0: (0.0, 0.0, ())}  # place -> bytes, longest stage, cuts
    for number in range(1, stages + 1):
        reached = {}
        ends = [count] if number == stages else range(number, count)
        for end in ends:
            ways = [
                (
                    size + (crossing[end] if end < count else 0.0),
                    max(most, until[end] - until[first]),
                    cuts,
                )
                for first, (size, most, cuts) in best.items()
                if first < end and until[end] - until[first] <= longest * (1 + 1e-9)
                if end == count or crossing[end] < math.inf
            ]
            if ways:
                size, most, cuts = min(ways)
                reached[end] = (size, most, (*cuts, end))
        best = reached
    _, most, cuts = best[count]
    return most, cuts[:-1]


def branches(pieces: list[Piece], devices: int) -> list[int]:
    """The device of each piece, by HEFT; what follows each other without a branch stays together.

    Raises:
        ValueError: nothing would be gained by some of the devices, or a layer is called again.
    """
    for number, piece in enumerate(pieces):
        if max(piece.sources, default=0) >= max(number, 1):
            raise ValueError(
                f"{piece.name!r} is called more than once: branches of such a model are not found; "
                "say in a plan of your own which layers go where"
            )
    chains, chain_of = _chains(pieces)
    where = _first_done(chains, devices)
    used = len(set(where))
    if used < devices:
        raise ValueError(
            f"nothing is gained by more than {used} device{'s' * (used > 1)}: the model has no "
            f"more branches that are longer than handing over their inputs; take branch={used}, "
            "or say in a plan of your own which layers go where"
        )
    return [where[chain] for chain in chain_of]


def _chains(pieces):
    """(pieces that are taken together as one, the number of the one that each is part of)."""
    takers = _takers(pieces)
    chains: list[Piece] = []
    chain_of: list[int] = []
    for piece in pieces:
        if len(piece.sources) == 1 and len(takers[piece.sources[0]]) == 1:
            number = chain_of[piece.sources[0]]
            seconds = chains[number].seconds + piece.seconds
            chains[number] = dataclasses.replace(
                chains[number], seconds=seconds, out_bytes=piece.out_bytes
            )
        else:
            number = len(chains)
            sources = tuple(sorted({chain_of[source] for source in piece.sources}))
            chains.append(dataclasses.replace(piece, sources=sources))
        chain_of.append(number)
    return chains, chain_of


def _first_done(pieces, devices):
    """The device of each piece: the one on which it is done first."""
    takers, to_end = _takers(pieces), [0.0] * len(pieces)
    for number in reversed(range(len(pieces))):
        ahead = [_send(pieces[number]) + to_end[taker] for taker in takers[number]]
        to_end[number] = pieces[number].seconds + max(ahead, default=0.0)
    free, done, where = [0.0] * devices, [0.0] * len(pieces), [0] * len(pieces)
    # Pieces are in an order in which sources come first; ways of equal length keep it.
    for number in sorted(range(len(pieces)), key=lambda n: -to_end[n]):
        piece = pieces[number]
        ends = []
        for here in range(devices):
            arrives = [done[s] + _send(pieces[s]) * (where[s] != here) for s in piece.sources]
            ends.append(max([free[here], *arrives]) + piece.seconds)
        here = ends.index(min(ends))
        where[number], done[number], free[here] = here, ends[here], ends[here]
    return where


def _takers(pieces):
    takers = collections.defaultdict(list)
    for number, piece in enumerate(pieces):
        for source in piece.sources:
            takers[source].append(number)
    return takers


def _send(piece):
    return piece.out_bytes / LINK_BYTES_PER_SECOND
