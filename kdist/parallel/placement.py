"""Where a step's operations really ran.

with operations_that_run() as operations:
    model.train_on_batch(x, y)           # its first step
{operation.device for operation in operations if operation.type == "MatMul"}

Every misplacement gives the right numbers, so placement has to be looked at. What is read here is
not what was asked for but the parts into which TensorFlow has cut the functions that ran, one for
each device, after its own optimizations.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import tensorflow as tf

from kdist.parallel.groups import short_name
from kdist.parallel.live import held_activations, output_sizes
from kdist.parallel.schedule import Work, peak_live
from kdist.parallel.timeline import recorded_timeline
from kdist.tensorflow_internals import graphs_that_run


@dataclasses.dataclass(frozen=True)
class RanOperation:
    """An operation of a function that has run.

    Attributes:
        name: with the scopes of layer and replica.
        type: such as `"MatMul"`.
        device: such as `"CPU:1"`; where there are several hosts, such as `"worker:1/CPU:1"`.
        function: the number of the function that it is part of.
        inputs: names of the operations, on the same device, whose outputs it takes; messages from
            other devices come from operations of type `"_Recv"`.
        tensors: the same, with the number of the output, such as `"split:1"`; the first may leave
            it out.
        message: what a message between devices is known by at both ends; else empty.
        grows: bytes of an element that it gives / of one that it takes, of a Cast; else 1.
    """

    name: str
    type: str
    device: str
    function: int
    inputs: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    message: str = ""
    grows: float = 1.0

    @property
    def is_backward(self) -> bool:
        """Whether it is part of a gradient."""
        return "gradients/" in self.name

    @property
    def computes(self) -> bool:
        """Whether it computes: constants, copies and messages are where they are needed."""
        return self.type not in _IDLE


@contextlib.contextmanager
def operations_that_run() -> Iterator[list[RanOperation]]:
    """Gives a list that holds, after the block, the operations of all functions that ran in it.

    Of functions that have run before, TensorFlow keeps no graphs: they are not in the list.
    """
    operations: list[RanOperation] = []
    with graphs_that_run() as functions:
        yield operations
    for number, function in enumerate(functions):
        for graph in function.partition_graphs:
            operations.extend(_ran(node, number) for node in graph.node)


def groups_of(strategy) -> list[list[str]]:
    """The devices of each replica, such as `[["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]`."""
    return [[short_name(device) for device in group] for group in strategy.groups]


def devices_of(strategy, variable) -> list[str]:
    """The devices of a Keras variable's copies, one for each replica."""
    copies = strategy.experimental_local_results(variable.value)
    return [short_name(copy.device) for copy in copies]


def _ran(node, function):
    device = short_name(node.device)
    tensors = tuple(name for name in node.input if not name.startswith("^"))
    inputs = tuple(name.partition(":")[0] for name in tensors)
    message = node.attr["tensor_name"].s.decode() if node.op in _MESSAGES else ""
    types = [tf.as_dtype(node.attr[end].type) for end in ("DstT", "SrcT") if node.op == "Cast"]
    grows = types[0].size / types[1].size if types else 1.0
    kind = _plain_type(node.op)
    return RanOperation(node.name, kind, device, function, inputs, tensors, message, grows)


def _plain_type(kind):
    """The type of an operation for which TensorFlow has chosen a kernel of oneDNN."""
    return kind.removeprefix("_MklNative").removeprefix("_Mkl")


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """What lies on one device, and ran there in one step.

    Attributes:
        device: such as `"CPU:1"`.
        weights: variables of layers.
        weight_bytes: of these.
        slot_bytes: of the optimizer's variables beside them.
        forward: operations that compute in the forward pass.
        backward: those that compute gradients.
        other: all others that compute, such as updates, sums over replicas and metrics.
        received: tensors that came from other devices.
        activation_bytes: what it held at most, at one time, for the backward pass (see
            `kdist.parallel.live`); None where sizes are not known, such as in loops.
        live_micro_batches: the most micro-batches whose activations it held at one time.
    """

    device: str
    weights: int
    weight_bytes: int
    slot_bytes: int
    forward: int
    backward: int
    other: int
    received: int
    activation_bytes: int | None = None
    live_micro_batches: int = 1


_MESSAGES = {"_Send", "_Recv", "_HostSend", "_HostRecv"}

# Operations that compute nothing.
_IDLE = {
    *("Const", "Identity", "NoOp", "Shape", "Cast", "ReadVariableOp"),
    *("_Send", "_Recv", "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "_HostSend", "_HostRecv"),
}


def what_lies_where(model, x, y) -> list[OnDevice]:
    """Trains a compiled model on (x, y), and says what is on each device and ran there in a step.

    It is trained for one step, and by micro-batches for two: in the second, time stamps say in
    which order stages work.

    Args:
        model: made by `kdist.parallel.split`.
        x: inputs (B, …).
        y: targets (B, …).
    """
    strategy = model.distribute_strategy
    with operations_that_run() as operations, output_sizes(model) as sizes:
        model.make_train_function(force=True)
        model.train_on_batch(x, y)
    held = held_activations(operations, sizes)
    orders = _orders_of_work(model, x, y)
    rows = []
    for device in (device for group in strategy.groups for device in group):
        here = [o for o in operations if o.device == short_name(device)]
        computing = [o for o in here if o.computes]
        backward = [o for o in computing if o.is_backward]
        forward = [o for o in computing if not o.is_backward and _is_of(model, o)]
        weights = _copies_on(strategy, model.variables, device)
        order = orders[device]
        rows.append(
            OnDevice(
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


def _orders_of_work(model, x, y):
    """device -> what its stage did in a step, one after the other, as measured."""
    strategy = model.distribute_strategy
    layout = strategy.layout
    model.make_train_function(force=True)  # whatever comes next is not looked at
    if layout.micro_batches == 1:
        both = [Work(0, 0, False), Work(0, 0, True)]
        return {device: both for group in strategy.groups for device in group}
    with recorded_timeline() as timeline:
        model.make_train_function(force=True)
        model.train_on_batch(x, y)
    model.make_train_function(force=True)  # without time stamps
    orders = {}
    for replica, group in enumerate(strategy.groups):
        work = [timed.work for timed in timeline.steps(replica)[-1]]
        for index, device in enumerate(group):
            orders[device] = [each for each in work if each.stage == index // layout.tensor]
    return orders


def _is_of(model, operation):
    """Whether it is in the scope of the model's layers, or of a stage; Keras numbers its calls."""
    scope = rf"\b({re.escape(model.name)}(_\d+)?|(forward|recompute)_\d+_on_stage_\d+)/"
    return re.search(scope, operation.name) is not None


def _copies_on(strategy, variables, device):
    copies = (c for v in variables for c in strategy.experimental_local_results(v.value))
    return [copy for copy in copies if copy.device == device]


def _bytes(variables):
    return sum(variable.shape.num_elements() * variable.dtype.size for variable in variables)
