"""Split plans found by themselves: balanced stages, branches that run side by side.

    plan = suggest(model, Layout(pipeline=4))        # {"stem": stage(0), …}
    plan = suggest(model, Layout(branch=2))

What a layer costs is computed (`kdist.planner.read_workload`), on a device whose arithmetic, memory
and links are in the proportions of a V100 with NVLink; only these proportions matter.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

import keras

from kdist.layout import Layout
from kdist.parallel.split_plan import (
    Device,
    SplitPlan,
    Stage,
    device,
    functional_graph,
    nodes_of,
    stage,
)
from kdist.planner.reading import read_workload
from kdist.training.together import in_another_thread

# Of a V100: https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf
_FLOPS_PER_SECOND = 15.7e12
_BYTES_PER_SECOND = 900e9
_LINK_BYTES_PER_SECOND = 25e9  # one NVLink, one way

# Stages may be so much longer than the best balance allows, where that lets fewer bytes cross.
_SLACK = 1.1


@dataclasses.dataclass(frozen=True)
class Piece:
    """An operation of a model, as a plan places it.

    Attributes:
        name: of the operation.
        seconds: forward and backward, for one example.
        state_bytes: of its weights, their gradients and two slots.
        kept_bytes: that its forward pass leaves for the backward pass, for one example.
        out_bytes: of what it hands on, for one example.
        sources: numbers of the pieces that it takes something from.
    """

    name: str
    seconds: float
    state_bytes: float
    kept_bytes: float
    out_bytes: float
    sources: tuple[int, ...]


def suggest(
    model: keras.Model,
    layout: Layout,
    memory_gb: float | None = None,
    local_batch: int = 1,
) -> SplitPlan:
    """A plan for `split` that keeps all devices of a replica about equally busy.

    Stages are pieces of the order in which the model is computed, the longest as short as can be,
    cut where few bytes cross. Branches are given to the device on which they would be done first,
    the longest way to the end counting first: Topcuoglu, Hariri, Wu, "Performance-effective and
    low-complexity task scheduling for heterogeneous computing" (HEFT), 2002.

    Args:
        model: functional or Sequential, built.
        layout: of stages or of branches.
        memory_gb: GB (1e9 bytes) of each device; a plan that needs more is refused. None: any.
        local_batch: examples of a replica, for `memory_gb`.

    Raises:
        ValueError: the layout has neither stages nor branches, fewer layers than devices, no
            branches that are worth it, or a device would need more than `memory_gb`.
    """
    pieces = pieces_of(model)
    if layout.tensor > 1:
        raise ValueError(
            f"{layout}: which weights are divided, a plan of your own has to say with column(), "
            "row() and heads(); write one, or leave tensor out"
        )
    if layout.pipeline * layout.branch == 1:
        raise ValueError(f"{layout} has neither stages nor branches: give pipeline or branch")
    where: Callable[[int], Stage | Device]
    if layout.pipeline > 1:
        numbers, where = balanced_stages(pieces, layout.pipeline), stage
    else:
        numbers, where = branches(pieces, layout.branch), device
    if memory_gb is not None:
        _check_memory(pieces, numbers, memory_gb, local_batch)
    return {
        re.escape(piece.name): where(number) for piece, number in zip(pieces, numbers, strict=True)
    }


def pieces_of(model: keras.Model) -> list[Piece]:
    """The operations of a model in the order in which they are computed; nested models whole."""
    # It is the work of one replica, also where this is called in the scope of a strategy.
    workload = in_another_thread(functools.partial(read_workload, model))
    prefix = f"{model.name}/" if isinstance(model, keras.Sequential) else ""
    works = collections.defaultdict(list)  # of each operation, with all that is nested in it
    for layer in workload.layers:
        works[layer.name.removeprefix(prefix).partition("/")[0]].append(layer)
    numbers: dict[int, int] = {}
    made: dict[int, int] = {}  # tensor -> the piece that hands it on
    pieces: list[Piece] = []
    for node in nodes_of(functional_graph(model)):
        sources = {made[id(tensor)] for tensor in node.input_tensors if id(tensor) in made}
        number = numbers.setdefault(id(node.operation), len(pieces))
        if number == len(pieces):
            pieces.append(_piece(node, works[node.operation.name], tuple(sorted(sources))))
        made.update({id(tensor): number for tensor in node.outputs})
    return pieces


def _piece(node, own, sources):
    flops = sum(work.forward_flops + work.backward_flops for work in own)
    return Piece(
        node.operation.name,
        flops / _FLOPS_PER_SECOND + sum(work.moved_bytes for work in own) / _BYTES_PER_SECOND,
        4 * 4 * sum(work.parameters for work in own),
        sum(work.kept_bytes for work in own),
        sum(4 * math.prod(size or 1 for size in tensor.shape[1:]) for tensor in node.outputs),
        sources,
    )


def balanced_stages(pieces: list[Piece], stages: int) -> list[int]:
    """The stage of each piece: the longest stage is about as short as can be, few bytes cross.

    Raises:
        ValueError: there are fewer pieces than stages.
    """
    if len(pieces) < stages:
        raise ValueError(f"{len(pieces)} layers for {stages} stages: take fewer stages")
    until = [0.0, *itertools.accumulate(piece.seconds for piece in pieces)]
    crossing = _crossing_bytes(pieces)
    shortest = _best_cuts(until, stages, [0.0] * len(crossing), math.inf)[0]
    _, cuts = _best_cuts(until, stages, crossing, _SLACK * shortest)
    numbers = []
    for number, (first, end) in enumerate(itertools.pairwise([0, *cuts, len(pieces)])):
        numbers += [number] * (end - first)
    return numbers


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
                (size + crossing[end] * (end < count), max(most, until[end] - until[first]), cuts)
                for first, (size, most, cuts) in best.items()
                if first < end and until[end] - until[first] <= longest * (1 + 1e-9)
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
        ValueError: nothing would be gained by some of the devices.
    """
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
    return piece.out_bytes / _LINK_BYTES_PER_SECOND


def _check_memory(pieces, numbers, memory_gb, local_batch):
    needed = collections.Counter()
    for piece, number in zip(pieces, numbers, strict=True):
        needed[number] += piece.state_bytes + piece.kept_bytes * local_batch
    number, most = needed.most_common(1)[0]
    if most > memory_gb * 1e9:
        raise ValueError(
            f"device {number} of a replica would need {most / 1e9:.2f} GB of {memory_gb:g}: halve "
            "the local batch, or take more stages"
        )
