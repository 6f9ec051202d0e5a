"""Split plans found by themselves: stages, branches, divided weights, and which of these.

plan = suggest(model, Layout(pipeline=4))        # {"stem": stage(0), …}
plan = suggest(model, Layout(tensor=4))          # {"block1_ffn_up": column(), …}
plan = suggest(model, devices=4, memory_gb=16)   # and plan.layout
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import keras

from kdist.layout import Layout
from kdist.parallel.balancing import balanced_stages, branches
from kdist.parallel.copies import check_micro_batches
from kdist.parallel.dividing import Divisions, chosen_divisions
from kdist.parallel.pieces import ModelWork
from kdist.parallel.plan_costs import device_bytes, step_seconds
from kdist.parallel.split_plan import (
    Device,
    Division,
    Stage,
    device,
    operations_by_name,
    stage,
)

# A pipeline of S stages is tried with as many micro-batches as S times these.
_MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)
# Plans whose steps are computed to be so close to each other are taken for equally fast.
_NEARLY = 1.1


class Suggestion(dict[str, Stage | Device | Division]):
    """A plan, as `split` takes it, and what it is for.

    Attributes:
        layout: for `create_strategy`.
        gathered: layers that are divided by column and whose parts of an output are joined.
        device_gb: GB (1e9 bytes) that the fullest device holds: weights, gradients, two slots and
            kept activations; temporaries come on top.
        step_seconds: of a step on devices such as `kdist.parallel.plan_costs` has in mind; for
            comparison with other suggestions only.
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
    """A plan for `split` that keeps all devices of a replica about equally busy.

    Stages are pieces of the order in which the model is computed, the longest as short as can be,
    cut where few bytes cross. Branches are given to the device on which they would be done first,
    the longest way to the end counting first: Topcuoglu, Hariri, Wu, "Performance-effective and
    low-complexity task scheduling for heterogeneous computing" (HEFT), 2002. With `tensor`, the
    layers that hold the most are divided, with as few gathers as there can be: columns, then rows
    (`kdist.parallel.dividing`).

    Given `devices` in the place of a layout, all layouts of so many devices are tried, and of those
    that fit one whose step is computed to be (nearly) the shortest is taken: of several, the one
    with the most replicas and the fewest micro-batches.

    Args:
        model: functional or Sequential, built.
        layout: with stages, branches or divided weights; or give `devices`.
        memory_gb: GB (1e9 bytes) of each device; a plan that needs more is refused. None: any.
        batch_size: examples of a step, of all replicas together. Defaults to 32.
        devices: how many there are.
        costs: seconds of each operation, forward and backward, for one example, as
            `kdist.parallel.measure_costs` gives. None: they are computed.

    Raises:
        ValueError: both or neither of `layout` and `devices`; the layout has only replicas, fewer
            layers than stages, no branches that are worth it, nothing that can be divided; `costs`
            lacks an operation; or a device would need more than `memory_gb`.
    """
    if (layout is None) == (devices is None):
        raise ValueError(
            "give a layout, such as kdist.Layout(pipeline=2), or how many devices there are, such "
            "as devices=4: one of both"
        )
    work = ModelWork(model, costs)
    if layout is None:
        return _fastest(work, devices, memory_gb, batch_size)
    if layout.group_size == 1:
        raise ValueError(
            f"{layout} has neither stages nor branches nor divided weights: give pipeline, branch "
            "or tensor"
        )
    found = _suggestion(work, layout, batch_size)
    if memory_gb is not None and found.device_gb > memory_gb:
        raise ValueError(_too_large(found, memory_gb, batch_size))
    return found


def _suggestion(work, layout, batch_size):
    """The plan for one layout."""
    divisions = Divisions()
    if layout.tensor > 1:
        divisions = chosen_divisions(work.model, layout.tensor)
    pieces = work.pieces(divisions)
    numbers = [0] * len(pieces)
    if layout.pipeline > 1:
        numbers = balanced_stages(pieces, layout.pipeline)
    elif layout.branch > 1:
        numbers = branches(pieces, layout.branch)
    if layout.pipeline > 1 and layout.tensor > 1:
        # A column and its rows that are now on two stages are divided otherwise.
        stages = _stages_of(work.model, pieces, numbers)
        divisions = chosen_divisions(work.model, layout.tensor, stages)
        pieces = work.pieces(divisions)
    found = Suggestion(_plan(pieces, numbers, layout, divisions))
    rows = -(-batch_size // layout.data)
    found.layout, found.gathered = layout, tuple(divisions.gathered)
    found.device_gb = max(device_bytes(pieces, numbers, layout, rows)) / 1e9
    found.step_seconds = step_seconds(pieces, numbers, layout, rows)
    return found


def _stages_of(model, pieces, numbers):
    """The stage of each operation; what is nested is on that of the outermost."""
    outer = {piece.name: number for piece, number in zip(pieces, numbers, strict=True)}
    return {name: outer[name.partition("/")[0]] for name in operations_by_name(model)}


def _plan(pieces, numbers, layout, divisions):
    """Exact names -> where they go."""
    places: dict[str, Stage | Device | Division] = {}
    of = dict(zip((piece.name for piece in pieces), numbers, strict=True))
    if layout.group_size > layout.tensor:
        where = stage if layout.pipeline > 1 else device
        places = {name: where(number) for name, number in of.items()}
    for name, how in divisions.how.items():
        number = of[name.partition("/")[0]] if layout.pipeline > 1 else None
        places[name] = Division(how, number)
    return {re.escape(name): place for name, place in places.items()}


def _layouts(devices, batch_size) -> Iterator[Layout]:
    """All of so many devices."""
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r}: a whole number from 1 on")
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
    """Of the plans that fit, the simplest of those with about the shortest step."""
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
        raise ValueError(f"{work.model.name!r} has no plan for devices={devices}{refused}")
    fitting = [each for each in found if memory_gb is None or each.device_gb <= memory_gb]
    if not fitting:
        least = min(found, key=lambda each: each.device_gb)
        raise ValueError(
            f"no layout of {devices} devices fits. {_too_large(least, memory_gb, batch_size)}"
        )
    longest = _NEARLY * min(each.step_seconds for each in fitting)
    return min(
        (each for each in fitting if each.step_seconds <= longest),
        key=lambda each: (-each.layout.data, each.layout.micro_batches, each.step_seconds),
    )


def _too_large(found, memory_gb, batch_size):
    return (
        f"{found.layout} would need {found.device_gb:.3f} GB on its fullest device, "
        f"{found.device_gb - memory_gb:.3f} GB more than memory_gb={memory_gb:g}, with "
        f"batch_size={batch_size}: take a smaller batch, or more devices"
    )
