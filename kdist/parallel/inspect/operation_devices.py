"""Devices on which the operations of a step actually ran.

    with operations_that_run() as operations:
        model.train_on_batch(x, y)           # its first step
    {operation.device for operation in operations if operation.type == "MatMul"}

A misplaced operation still computes the right numbers, so that placement needs its own inspection.
The operations are read from the partitions of executed functions, one per device, after
TensorFlow's optimizations.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import tensorflow as tf

from kdist.compat.tensorflow import collect_function_graphs
from kdist.parallel.device_groups import short_name
from kdist.parallel.inspect.activation_memory import held_activations, output_sizes
from kdist.parallel.pipeline.schedule import StageWork, peak_live
from kdist.parallel.pipeline.timeline import recorded_timeline


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
    # Maximum bytes held at one time for the backward pass (see
    # `kdist.parallel.inspect.activation_memory`); None if sizes are unknown, as in loops.
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
