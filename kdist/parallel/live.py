"""Bytes of activations that devices hold for the backward pass.

They are counted in the graphs that ran, after TensorFlow's own optimizations: what an operation of
a gradient takes that none has made is held from one pass to the other. Tensors that share memory,
such as a reshaped one, count once; weights, and what is computed of weights alone, do not count.
What a gradient needs shapes of only is not held either. What operations need while they run is not
in it, nor is the batch that the step is given, nor workspaces of oneDNN and cuDNN.
"""

import collections
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from kdist.parallel.schedule import Work

_SAME_MEMORY = {
    *("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"),
    *("Snapshot", "_MklReshape"),
}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"}
_ARGUMENTS = {"_Arg", "_DeviceArg"}
# What TensorFlow makes of several additions gives what the last one would; its parts do not.
_ADDED_TOGETHER = re.compile(r"ArithmeticOptimizer/AddOpsRewrite_(?!Leaf|Internal)")
_PIECE = re.compile(r"(forward|recompute|backward)_(\d+)_on_stage_(\d+)/")


class Activations:
    """What each device holds of each micro-batch; without stages there is one, number 0.

    Attributes:
        kept: {(device, micro-batch): bytes} that wait since the forward pass.
        computed_again: as much, of those that wait since a second forward pass.
        unknown: devices that hold something whose size is not known, such as the lists of loops.
    """

    def __init__(self):
        self.kept = collections.Counter()
        self.computed_again = collections.Counter()
        self.unknown: set[str] = set()

    def peak_bytes(self, device: str, order: Sequence[Work]) -> int | None:
        """The most that a device holds at one time; None where that is not known.

        Args:
            device: such as `"CPU:1"`.
            order: what its stage has done, one after the other.
        """
        live = peak = 0
        for work in order:
            at = device, work.micro_batch
            if work.is_backward:
                live -= self.kept[at] + self.computed_again[at]
            else:
                live += self.computed_again[at] if work.is_again else self.kept[at]
            peak = max(peak, live)
        return None if device in self.unknown else peak


@contextlib.contextmanager
def output_sizes(model) -> Iterator[dict[str, list]]:
    """Gives a dictionary that holds, after the block, bytes of what operations give.

    Of the operations of all steps of `model` that are traced in the block: an operation's name ->
    bytes of each of its outputs, None where that is not known.
    """
    sizes: dict[str, list] = {}
    graphs, own = [], model.train_step

    def train_step(data):
        graphs.append(tf.compat.v1.get_default_graph())
        return own(data)

    model.train_step = train_step
    try:
        yield sizes
    finally:
        del model.train_step
    for graph in graphs:
        for operation in graph.get_operations():
            sizes[operation.name] = [_bytes_of(tensor) for tensor in operation.outputs]


def _bytes_of(tensor):
    if not tensor.shape.is_fully_defined() or tensor.dtype in (tf.variant, tf.resource):
        return None
    return tensor.shape.num_elements() * tensor.dtype.size


def held_activations(operations: Iterable, sizes: Mapping[str, list]) -> Activations:
    """What gradients, and second forward passes, take of forward passes.

    Args:
        operations: of a step, as `kdist.parallel.placement.operations_that_run` gives them.
        sizes: an operation's name -> bytes of each of its outputs, None where that is not known.
    """
    nodes = {(o.function, o.device, o.name): o for o in operations}
    sent = {(o.function, o.message): o.tensors[0] for o in operations if o.message and o.tensors}
    found = Activations()
    counted: set[tuple] = set()
    known: dict[tuple, bool] = {}
    for o in operations:
        match = _PIECE.search(o.name)
        is_again = not o.is_backward and match is not None and match[1] == "recompute"
        if o.type in _SHAPES or not (o.is_backward or is_again):
            continue
        for tensor in o.tensors:
            source, output = _memory_of(tensor, o, nodes)
            if source is None or source.is_backward or source.type in _ARGUMENTS:
                continue
            if _is_of_weights(source, nodes, known):
                continue
            was_again = any("recompute_" in name for name in (source.name, *source.tensors))
            key = source.function, source.device, source.name, output
            if key in counted or (is_again and was_again):
                continue
            counted.add(key)
            size = _size(source, output, sizes, sent, nodes)
            if size is None:
                found.unknown.add(o.device)
            bytes_of = found.computed_again if was_again else found.kept
            bytes_of[o.device, int(match[2]) if match else 0] += size or 0
    return found


def _memory_of(tensor, taker, nodes):
    """(the operation on the same device that made what a tensor's memory holds, which output)."""
    name, _, output = tensor.partition(":")
    source = nodes.get((taker.function, taker.device, name))
    while source is not None and source.type in _SAME_MEMORY and source.tensors:
        name, _, output = source.tensors[0].partition(":")
        source = nodes.get((source.function, source.device, name))
    return source, int(output or 0)


def _is_of_weights(operation, nodes, known):
    """Whether it is made of constants and variables alone.

    Args:
        known: remembers.
    """
    key = operation.function, operation.device, operation.name
    if key not in known:
        known[key] = operation.type in ("Const", "ReadVariableOp")
        sources = [nodes.get((*key[:2], tensor.partition(":")[0])) for tensor in operation.tensors]
        if sources and not known[key]:
            known[key] = all(each and _is_of_weights(each, nodes, known) for each in sources)
    return known[key]


def _size(operation, output, sizes, sent, nodes):
    """Bytes of an output; of what came from another device, of what was sent."""
    name = operation.name
    if operation.message:
        name, _, number = sent.get((operation.function, operation.message), "").partition(":")
        output = int(number or 0)
    found = sizes.get(name) or sizes.get(_ADDED_TOGETHER.sub("", name))
    if found is None and operation.type == "Cast":  # TensorFlow has it in another place than asked
        source, number = _memory_of(operation.tensors[0], operation, nodes)
        size = source and _size(source, number, sizes, sent, nodes)
        return None if size is None else int(size * operation.grows)
    if found is None:
        return None
    is_workspace = output >= len(found) or ("FusedBatchNorm" in operation.type and output > 2)
    return 0 if is_workspace else found[output]
