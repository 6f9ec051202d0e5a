"""Devices on which the operations of a step actually ran, and the activations that they hold.

    with operations_that_run() as operations:
        model.train_on_batch(x, y)           # its first step
    {operation.device for operation in operations if operation.type == "MatMul"}

A misplaced operation still computes the right numbers, so that placement needs its own inspection.
The operations are read from the partitions of executed functions, one per device, after
TensorFlow's optimizations.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from kdist.compat.tensorflow import collect_function_graphs
from kdist.parallel.device_groups import short_name
from kdist.parallel.pipeline.schedule import StageWork, peak_live
from kdist.parallel.pipeline.timeline import recorded_timeline

_SAME_MEMORY = {
    *("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"),
    *("Snapshot", "_MklReshape"),
}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"}
_ARGUMENTS = {"_Arg", "_DeviceArg"}
# TensorFlow's rewrite of several additions has the output of the last one; its parts do not.
_REWRITTEN_ADDITIONS = re.compile(r"ArithmeticOptimizer/AddOpsRewrite_(?!Leaf|Internal)")
_PIECE = re.compile(r"(forward|recompute|backward)_(\d+)_on_stage_(\d+)/")


@dataclasses.dataclass(frozen=True)
class RanOperation:
    """An operation of an executed function."""

    name: str  # with the scopes of layer and replica
    type: str  # such as `"MatMul"`
    device: str  # such as `"CPU:1"`; with several hosts, such as `"worker:1/CPU:1"`
    function: int  # number of its function
    # Names of the operations, on the same device, that its inputs come from. Tensors of other
    # devices come from operations of type `"_Recv"`.
    inputs: tuple[str, ...]
    # The same with numbers of outputs, such as `"split:1"`. The number 0 may be omitted.
    tensors: tuple[str, ...] = ()
    message: str = ""  # key that both ends of a message between devices share
    grows: float = 1.0  # bytes per output element / bytes per input element of a Cast

    @property
    def is_backward(self) -> bool:
        """True if it belongs to a gradient."""
        return "gradients/" in self.name

    @property
    def computes(self) -> bool:
        """True if it computes something: constants, copies and messages do not."""
        return self.type not in _NOT_COMPUTING


@contextlib.contextmanager
def operations_that_run() -> Iterator[list[RanOperation]]:
    """Yields a list that holds, after the context, the operations of all functions that ran in it.

    Functions that ran before are missing, since TensorFlow reports their graphs only once.
    """
    operations: list[RanOperation] = []
    with collect_function_graphs() as functions:
        yield operations
    for number, function in enumerate(functions):
        for graph in function.partition_graphs:
            operations.extend(_ran(node, number) for node in graph.node)


def groups_of(strategy) -> list[list[str]]:
    """Returns the devices of each replica, such as `[["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]`."""
    return [[short_name(device) for device in group] for group in strategy.groups]


def devices_of(strategy, variable) -> list[str]:
    """Returns the devices of a Keras variable's copies, one per replica."""
    copies = strategy.experimental_local_results(variable.value)
    return [short_name(copy.device) for copy in copies]


def _ran(node, function):
    device = short_name(node.device)
    tensors = tuple(name for name in node.input if not name.startswith("^"))
    inputs = tuple(name.partition(":")[0] for name in tensors)
    message = node.attr["tensor_name"].s.decode() if node.op in _MESSAGES else ""
    types = [tf.as_dtype(node.attr[end].type) for end in ("DstT", "SrcT") if node.op == "Cast"]
    grows = types[0].size / types[1].size if types else 1.0
    kind = node.op.removeprefix("_MklNative").removeprefix("_Mkl")  # prefixes of oneDNN's kernels
    return RanOperation(node.name, kind, device, function, inputs, tensors, message, grows)


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Contents of one device, and its operations in one step."""

    device: str  # such as `"CPU:1"`
    weights: int  # number of the layers' variables
    weight_bytes: int
    slot_bytes: int  # of the optimizer's variables
    forward: int  # number of operations that compute in the forward pass
    backward: int  # number of operations that compute gradients
    other: int  # number of other operations, such as updates, sums over replicas and metrics
    received: int  # number of tensors from other devices
    # Maximum bytes held at one time for the backward pass (see `Activations`); None if sizes are
    # unknown, as in loops.
    activation_bytes: int | None = None
    live_micro_batches: int = 1  # maximum number whose activations it held at once


_MESSAGES = {"_Send", "_Recv", "_HostSend", "_HostRecv"}

_NOT_COMPUTING = {
    *("Const", "Identity", "NoOp", "Shape", "Cast", "ReadVariableOp"),
    *("_Send", "_Recv", "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "_HostSend", "_HostRecv"),
}


def profile_devices(model, x, y) -> list[DeviceProfile]:
    """Returns a profile of each device, after training a compiled split model on (x, y).

    It trains one step. With micro-batches it trains two: timestamps in the second one record the
    order in which stages work.
    """
    strategy = model.distribute_strategy
    with operations_that_run() as operations, output_sizes(model) as sizes:
        model.make_train_function(force=True)
        model.train_on_batch(x, y)
    held = held_activations(operations, sizes)
    orders = _stage_orders(model, x, y)
    rows = []
    for device in (device for group in strategy.groups for device in group):
        here = [o for o in operations if o.device == short_name(device)]
        computing = [o for o in here if o.computes]
        backward = [o for o in computing if o.is_backward]
        forward = [o for o in computing if not o.is_backward and _is_forward(model, o)]
        weights = _copies_on(strategy, model.variables, device)
        order = orders[device]
        rows.append(
            DeviceProfile(
                short_name(device),
                len(weights),
                _bytes(weights),
                _bytes(_copies_on(strategy, model.optimizer.variables, device)),
                len(forward),
                len(backward),
                len(computing) - len(forward) - len(backward),
                sum(o.type in ("_Recv", "_HostRecv") for o in here),
                held.peak_bytes(short_name(device), order),
                peak_live(order),
            )
        )
    return rows


def _stage_orders(model, x, y):
    """Returns {device: passes of its stage in a step, in measured order}."""
    strategy = model.distribute_strategy
    layout = strategy.layout
    model.make_train_function(force=True)  # the next call is not inspected
    if layout.micro_batches == 1:
        both = [StageWork(0, 0, False), StageWork(0, 0, True)]
        return {device: both for group in strategy.groups for device in group}
    with recorded_timeline() as timeline:
        model.make_train_function(force=True)
        model.train_on_batch(x, y)
    model.make_train_function(force=True)  # without timestamps
    orders = {}
    for replica, group in enumerate(strategy.groups):
        work = [timed.work for timed in timeline.steps(replica)[-1]]
        for index, device in enumerate(group):
            orders[device] = [each for each in work if each.stage == index // layout.tensor]
    return orders


def _is_forward(model, operation):
    """Returns whether an operation is in the (numbered) scope of the model, or of a stage."""
    scope = rf"\b({re.escape(model.name)}(_\d+)?|(forward|recompute)_\d+_on_stage_\d+)/"
    return re.search(scope, operation.name) is not None


def _copies_on(strategy, variables, device):
    copies = (c for v in variables for c in strategy.experimental_local_results(v.value))
    return [copy for copy in copies if copy.device == device]


def _bytes(variables):
    return sum(variable.shape.num_elements() * variable.dtype.size for variable in variables)


class Activations:
    """Bytes that each device holds per micro-batch. Without a pipeline there is only number 0.

    `kept` is {(device, micro-batch): bytes} held since the forward pass, `computed_again` the same
    since a second forward pass. `unknown` are the devices that hold tensors of unknown size, such
    as the lists of loops.

    They are counted in the executed graphs, after TensorFlow's optimizations: tensors of the
    forward pass that an operation of a gradient reads. Tensors that share memory, such as a
    reshaped one, count once. Not counted are weights, tensors computed from weights alone, tensors
    of which a gradient only needs the shape, temporaries of operations, the step's batch, and
    workspaces of oneDNN and cuDNN.
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
