"""What a plan is computed to take: seconds of a step, bytes of each device.

For devices in the proportions of a V100 with NVLink (`kdist.parallel.pieces`). What counts
nothing here: that a device reaches less of its peak with fewer rows at a time, and waiting for
input. Good for comparing layouts with each other; how long a step takes, `kdist.plan` predicts.
"""

from collections.abc import Sequence

from kdist.layout import Layout
from kdist.parallel.dividing import STATE_BYTES
from kdist.parallel.pieces import BYTES_PER_SECOND, LINK_BYTES_PER_SECOND, Piece
from kdist.parallel.schedule import peak_live, simulated_timeline, stage_order
from kdist.planner.cost.compute_constants import known_compute_constants
from kdist.planner.cost.exchange import all_reduce_seconds, pipeline_transfer_seconds

# Of all passes over weights in a step: two read them, one writes gradients, and an optimizer with
# two slots reads gradient, weight and slots, and writes weight and slots (planner/cost/compute.py).
_WEIGHT_PASSES = 9
# A message's latency between devices of one machine.
_HOP_SECONDS = 5e-6


def device_bytes(
    pieces: Sequence[Piece], numbers: Sequence[int], layout: Layout, rows: int
) -> list[float]:
    """The most that the (first) device of each stage, or each device of branches, holds.

    Weights, gradients, two slots, and the activations of the micro-batches that are under way (who
    recomputes: what a stage takes of each, and all of one); of more than one micro-batch also the
    sum of their gradients. Temporaries are not counted.

    Args:
        pieces: of the model.
        numbers: the stage or device of each.
        layout: the degrees.
        rows: of a replica in a step.
    """
    held = [0.0] * (layout.pipeline * layout.branch)
    kept = list(held)
    sums = 1 / 4 if layout.micro_batches > 1 else 0.0
    for piece, number in zip(pieces, numbers, strict=True):
        held[number] += piece.state_bytes * (1 + sums)
        kept[number] += piece.kept_bytes
    taken = [0.0, *_boundary_bytes(pieces, numbers, layout.pipeline)] if layout.recompute else []
    for number in range(len(held)):
        share = _live_share(layout, number)
        if layout.recompute:
            held[number] += taken[number] * rows * share
            share = 1 / layout.micro_batches
        held[number] += kept[number] * rows * share
    return held


def _live_share(layout, number):
    """The share of a replica's rows whose activations a stage holds at once."""
    if layout.pipeline == 1:
        return 1.0
    order = stage_order(layout.schedule, layout.pipeline, layout.micro_batches, number)
    return peak_live(order) / layout.micro_batches


def step_seconds(
    pieces: Sequence[Piece], numbers: Sequence[int], layout: Layout, rows: int
) -> float:
    """Forward, backward, exchange of gradients, and update.

    Args:
        pieces: as of `device_bytes`; and so are `numbers`, `layout` and `rows`.
    """
    state = [0.0] * (layout.pipeline * layout.branch)
    for piece, number in zip(pieces, numbers, strict=True):
        state[number] += piece.state_bytes
    weights = max(state) / STATE_BYTES * 4
    update = weights * _WEIGHT_PASSES / BYTES_PER_SECOND
    exchange = 0.0
    if layout.data > 1:
        exchange = float(
            all_reduce_seconds(weights, layout.data, LINK_BYTES_PER_SECOND, _HOP_SECONDS)
        )
    passes = _stages_seconds if layout.pipeline > 1 else _devices_seconds
    return passes(pieces, numbers, layout, rows) + exchange + update


def _stages_seconds(pieces, numbers, layout, rows):
    micro_rows = rows / layout.micro_batches
    seconds = [
        _passes_seconds([p for p, n in zip(pieces, numbers, strict=True) if n == stage], micro_rows)
        for stage in range(layout.pipeline)
    ]
    # A backward pass takes about twice as long as the forward pass.
    timeline = simulated_timeline(
        layout.schedule,
        layout.micro_batches,
        [each / 3 for each in seconds],
        [2 * each / 3 for each in seconds],
        layout.recompute,
    )
    sent = pipeline_transfer_seconds(
        max(_boundary_bytes(pieces, numbers, layout.pipeline)) * micro_rows,
        layout.pipeline,
        layout.micro_batches,
        LINK_BYTES_PER_SECOND,
        _HOP_SECONDS,
    )
    return max(timed.end for timed in timeline) + sent


def _passes_seconds(pieces, rows):
    """Both passes of operations on one device, by itself or waiting for the host to launch them."""
    launching = known_compute_constants().launch_ms_per_layer * 1e-3 * len(pieces)
    return max(sum(piece.seconds for piece in pieces) * rows, launching)


def _boundary_bytes(pieces, numbers, stages):
    """What crosses into each stage but the first, for one example."""
    crossing = [0.0] * stages
    for number, piece in enumerate(pieces):
        later = [numbers[n] for n, each in enumerate(pieces) if number in each.sources]
        for stage in range(numbers[number] + 1, max(later, default=0) + 1):
            crossing[stage] += piece.out_bytes
    return crossing[1:]


def _devices_seconds(pieces, numbers, layout, rows):
    """Each piece as soon as its device is free and what it takes has arrived."""
    free, done = [0.0] * layout.branch, []
    for piece, here in zip(pieces, numbers, strict=True):
        arrives = [
            done[source]
            + (2 * pieces[source].out_bytes * rows / LINK_BYTES_PER_SECOND + 2 * _HOP_SECONDS)
            * (numbers[source] != here)
            for source in piece.sources
            if source < len(done)  # of a layer that is called again, the first call counts
        ]
        free[here] = max([free[here], *arrives]) + piece.seconds * rows
        done.append(free[here])
    each = [[p for p, n in zip(pieces, numbers, strict=True) if n == d] for d in set(numbers)]
    return max(*free, *(_passes_seconds(own, rows) for own in each))
