"""Split models: what each device of a group has of a model, and what the group takes for a step.

    parts = split_model(known_workload("resnet50"), Layout(pipeline=4, micro_batches=8))
    time = split_seconds(parts, layout, part_seconds, 8, 60e9, hop_seconds=4e-5)

Stages are consecutive layers of about equal time, as `kdist.parallel.suggest` divides them. With
`tensor`, the largest layers are divided. Every number follows from the workload of the whole model.
It assumes that the widths of divided layers are multiples of the degree.
"""

import dataclasses
import functools
import itertools
import math

from kdist.layout import Layout
from kdist.planner.cost.compute import work_totals
from kdist.planner.cost.memory import Memory, bits, estimate_memory
from kdist.planner.cost.update import pipeline_transfer_seconds
from kdist.planner.tables.gpus import find_gpu
from kdist.planner.workload.layers import LayerWork, Workload

# Cuts are searched among this number of places, of about equal time from one to the next.
_MAX_BLOCKS = 64
# Stages are refused if the longest exceeds the mean by this factor: the model has no even cuts.
_MAX_UNEVENNESS = 1.5
# The longest stage may exceed the best balance by this factor if fewer bytes cross then.
MAX_IMBALANCE = 1.1
# Layers are divided, the largest first, until the rest holds at most this fraction of parameters.
MAX_WHOLE_FRACTION = 0.05
_DIVIDED_KINDS = ("convolution", "matmul")
# A recomputed forward pass takes a third of both passes.
_RECOMPUTING = 4 / 3


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """Parts of a model on the devices of a group, whatever the batch is.

    Attributes:
        parts: Work of each stage, or of one of the devices that divide layers.
        received_bytes: Bytes per example that each part receives from the stage before.
        gathered_bytes: Bytes per example that divided layers exchange in the forward pass.
        divided: Number of divided layers.
        temporary_bytes: Bytes per example that a step of the whole model needs in addition to the
            activations that it keeps; an upper bound of those of a part.
    """

    parts: tuple[Workload, ...]
    received_bytes: tuple[float, ...]
    gathered_bytes: float
    divided: int
    temporary_bytes: float

    @functools.cached_property
    def totals(self):
        """Totals of the parts for `micro_step_time`."""
        return [work_totals(part) for part in self.parts]

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of the part with the most of them, in float32."""
        return 4 * max(part.trainable_parameters for part in self.parts)


@dataclasses.dataclass(frozen=True)
class SplitTime:
    """Seconds of one replica's forward and backward passes on the devices of its group.

    Attributes:
        compute: Busiest device.
        bubble: Waiting of that device while a pipeline fills and drains.
        transfers: Activations and their gradients on their way between stages.
        gathering: Inputs and outputs of divided layers, and their gradients.
    """

    compute: float
    bubble: float = 0.0
    transfers: float = 0.0
    gathering: float = 0.0

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.compute + self.bubble + self.transfers + self.gathering


def split_model(workload: Workload, layout: Layout) -> ModelParts | None:
    """Returns the parts of a model under a layout; None if it cannot be split this way.

    Layouts with stages that divide layers, and with branches, are not predicted.
    """
    temporary = max(each for each, _ in workload.peaks) - workload.activation_bytes
    temporary = max(temporary, 0.0)
    if layout.tensor > 1 and layout.pipeline == 1:
        return _divided(workload, layout.tensor, temporary)
    if layout.pipeline == 1 or layout.group_size > layout.pipeline:
        return None
    ends = _stage_ends(workload.layers, layout.pipeline)
    if ends is None:
        return None
    starts = (0, *ends[:-1])
    parts = tuple(
        dataclasses.replace(
            workload,
            layers=workload.layers[start:end],
            input_bytes=0.0 if start else workload.input_bytes,
        )
        for start, end in zip(starts, ends, strict=True)
    )
    received = (0.0, *(workload.layers[end - 1].crossing_bytes or 0.0 for end in ends[:-1]))
    return ModelParts(parts, received, 0.0, 0, temporary)


def split_seconds(
    split: ModelParts,
    layout: Layout,
    part_seconds: list[float],
    rows: float,
    link_bytes_per_s: float,
    hop_seconds: float,
    byte_share: float = 1.0,
) -> SplitTime:
    """Returns the time of a replica's micro-step.

    `part_seconds` are both passes of a micro-batch on each device, and `rows` its examples. A
    pipeline of m micro-batches takes the sum of all stages and m - 1 times the longest: exact for
    GPipe's two sweeps, and for 1F1B if the stages take equally long. `byte_share` is the size of an
    activation relative to that in the workload.
    """
    seconds = [each * (_RECOMPUTING if layout.recompute else 1) for each in part_seconds]
    gathered = 2 * split.gathered_bytes * rows * byte_share / link_bytes_per_s
    return SplitTime(
        compute=layout.micro_batches * max(seconds),
        bubble=sum(seconds) - max(seconds),
        transfers=pipeline_transfer_seconds(
            max(split.received_bytes) * rows * byte_share,
            layout.pipeline,
            layout.micro_batches,
            link_bytes_per_s,
            hop_seconds,
        ),
        gathering=gathered + 4 * split.divided * hop_seconds,
    )


def split_memory(
    split: ModelParts, layout: Layout, rows: int, precision: str, optimizer: str
) -> list[tuple[Workload, Memory]]:
    """Returns the peak memory of the GPU of each part, and the part as a workload of its own.

    `rows` are the examples of a micro-batch. Stage s of S holds the activations of S - s
    micro-batches, or only the inputs of these if it recomputes.
    """
    found = []
    for number, part in enumerate(split.parts):
        live = min(layout.pipeline - number, layout.micro_batches)
        kept = part.activation_bytes * (1 if layout.recompute else live)
        held = kept + live * split.received_bytes[number] + split.temporary_bytes
        part = dataclasses.replace(
            part,
            input_bytes=part.input_bytes * layout.micro_batches,
            peaks=((held, 4 * part.trainable_parameters),),
            peaks_applied=(),
        )
        memory = estimate_memory(
            part,
            rows,
            precision=precision,
            optimizer=optimizer,
            accumulate=layout.micro_batches * layout.accumulate,
            devices=layout.data,
            device="gpu",
        )
        found.append((part, memory))
    return found


def activation_share(workload: Workload, precision: str) -> float:
    """Returns the bytes of an activation under a precision, relative to those of the workload."""
    return bits(precision) / bits(workload.precision)


def _stage_ends(layers, stages):
    """Returns the end of each stage, or None if there are too few places to cut."""
    gpu = find_gpu("V100")  # only the proportions of the times matter
    until = list(itertools.accumulate(_seconds(layer, gpu) for layer in layers))
    blocks: dict[int, int] = {}  # number of a block of equal time -> place of the best cut in it
    for place, layer in enumerate(layers[:-1], 1):
        if layer.crossing_bytes is not None:
            block = int(until[place - 1] / until[-1] * _MAX_BLOCKS)
            best = blocks.setdefault(block, place)
            if layer.crossing_bytes < layers[best - 1].crossing_bytes:
                blocks[block] = place
    places = [0, *blocks.values(), len(layers)]
    if len(places) <= stages:
        return None
    seconds = [until[place - 1] if place else 0.0 for place in places]
    crossing = [layers[place - 1].crossing_bytes or 0.0 for place in places]
    shortest, _ = best_cuts(seconds, stages, [0.0] * len(places), math.inf)
    if shortest > _MAX_UNEVENNESS * until[-1] / stages:
        return None
    _, cuts = best_cuts(seconds, stages, crossing, MAX_IMBALANCE * shortest)
    return (*(places[cut] for cut in cuts), len(layers))


def best_cuts(
    until: list[float], stages: int, crossing: list[float], longest: float
) -> tuple[float, tuple[int, ...]]:
    """Returns (seconds of the longest stage, cuts) with the fewest bytes, then the shortest.

    `until` are the seconds of all operations before each cut, `crossing` the bytes that cross it,
    and `longest` the maximum seconds of a stage.
    """
    count = len(until) - 1
    best: dict[int, tuple] = {0: (0.0, 0.0, ())}  # cut -> bytes, longest stage, cuts before
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


def _divided(workload, degree, temporary):
    """Returns the part of a device that holds a part of the weights of the largest layers."""
    whole = workload.parameters
    chosen: set[int] = set()
    numbered = sorted(enumerate(workload.layers), key=lambda each: -each[1].parameters)
    for number, layer in numbered:
        if whole <= MAX_WHOLE_FRACTION * workload.parameters:
            break
        if layer.kind in _DIVIDED_KINDS and layer.parameters % degree == 0:
            chosen.add(number)
            whole -= layer.parameters
    if not chosen:
        return None
    layers = tuple(
        _part(layer, degree) if number in chosen else layer
        for number, layer in enumerate(workload.layers)
    )
    gathered = sum(_gathered_bytes(workload, number, degree) for number in chosen)
    part = dataclasses.replace(workload, layers=layers)
    return ModelParts((part,), (0.0,), gathered, len(chosen), temporary)


def _part(layer: LayerWork, degree):
    """Returns what one of `degree` devices has of a layer: all of its activations, at most."""
    return dataclasses.replace(
        layer,
        forward_flops=layer.forward_flops / degree,
        backward_flops=layer.backward_flops / degree,
        parameters=layer.parameters / degree,
        trainable_parameters=layer.trainable_parameters / degree,
        weight_shapes=(),
    )


def _gathered_bytes(workload, number, degree):
    """Returns the bytes to and from the first device in a layer's forward pass, at most.

    Divided by rows, inputs are divided and outputs added; by columns the other way round. What
    crosses the cuts before and after a layer is an upper bound of its inputs and outputs, and so is
    what its operations read and write.
    """
    layer, others = workload.layers[number], degree - 1
    before = workload.layers[number - 1].crossing_bytes if number else workload.input_bytes
    after = layer.crossing_bytes
    if before is None or after is None:
        return layer.moved_bytes * others
    moved = min(before / degree + after, before + after / degree)
    return min(moved, layer.moved_bytes) * others


def _seconds(layer, gpu):
    """Returns the seconds of a layer for one example on a GPU."""
    flops = layer.forward_flops + layer.backward_flops
    return flops / (gpu.float32_tflops * 1e12) + layer.moved_bytes / (gpu.bandwidth_gb_s * 1e9)
