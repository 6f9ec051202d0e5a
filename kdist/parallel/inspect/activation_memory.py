"""Bytes of activations that devices hold for the backward pass.

They are counted in the executed graphs, after TensorFlow's optimizations: tensors of the forward
pass that an operation of a gradient reads. Tensors that share memory, such as a reshaped one, count
once. Not counted are weights, tensors computed from weights alone, tensors of which a gradient only
needs the shape, temporaries of operations, the step's batch, and workspaces of oneDNN and cuDNN.
"""

import collections
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from kdist.parallel.pipeline.schedule import StageWork

_SAME_MEMORY = {
    *("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"),
    *("Snapshot", "_MklReshape"),
}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"}
_ARGUMENTS = {"_Arg", "_DeviceArg"}
# TensorFlow's rewrite of several additions has the output of the last one; its parts do not.
_REWRITTEN_ADDITIONS = re.compile(r"ArithmeticOptimizer/AddOpsRewrite_(?!Leaf|Internal)")
_PIECE = re.compile(r"(forward|recompute|backward)_(\d+)_on_stage_(\d+)/")


class Activations:
    """Bytes that each device holds per micro-batch. Without a pipeline there is only number 0.

    `kept` is {(device, micro-batch): bytes} held since the forward pass, `computed_again` the same
    since a second forward pass. `unknown` are the devices that hold tensors of unknown size, such
    as the lists of loops.
    """

    def __init__(self):
        self.kept = collections.Counter()
        self.computed_again = collections.Counter()
        self.unknown: set[str] = set()

    def peak_bytes(self, device: str, order: Sequence[StageWork]) -> int | None:
        """Returns the maximum bytes that a device holds in an order of passes; None if unknown."""
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
    """Yields a dictionary that holds, after the context, the bytes of operations' outputs.

    It covers all steps of `model` that are traced in the context: name of an operation -> bytes of
    each output, None if unknown.
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
    """Returns the tensors of forward passes that gradients and second forward passes read.

    The operations are those of a step, as `operations_that_run` yields them. `sizes` is name of an
    operation -> bytes of each output, None if unknown.
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


def _memory_of(tensor, consumer, nodes):
    """Returns (operation on the same device that owns a tensor's memory, number of its output)."""
    name, _, output = tensor.partition(":")
    source = nodes.get((consumer.function, consumer.device, name))
    while source is not None and source.type in _SAME_MEMORY and source.tensors:
        name, _, output = source.tensors[0].partition(":")
        source = nodes.get((source.function, source.device, name))
    return source, int(output or 0)


def _is_of_weights(operation, nodes, known):
    """Returns whether an operation depends on constants and variables alone.

    `nodes` is (function, device, name) -> operation; `known` caches results.
    """
    key = operation.function, operation.device, operation.name
    if key not in known:
        known[key] = operation.type in ("Const", "ReadVariableOp")
        sources = [nodes.get((*key[:2], tensor.partition(":")[0])) for tensor in operation.tensors]
        if sources and not known[key]:
            known[key] = all(each and _is_of_weights(each, nodes, known) for each in sources)
    return known[key]


def _size(operation, output, sizes, sent, nodes):
    """Returns the bytes of an output; for a received tensor, those of the sent one."""
    name = operation.name
    if operation.message:
        name, _, number = sent.get((operation.function, operation.message), "").partition(":")
        output = int(number or 0)
    found = sizes.get(name) or sizes.get(_REWRITTEN_ADDITIONS.sub("", name))
    if found is None and operation.type == "Cast":  # TensorFlow has moved it
        source, number = _memory_of(operation.tensors[0], operation, nodes)
        size = source and _size(source, number, sizes, sent, nodes)
        return None if size is None else int(size * operation.grows)
    if found is None:
        return None
    is_workspace = output >= len(found) or ("FusedBatchNorm" in operation.type and output > 2)
    return 0 if is_workspace else found[output]
