"""Bytes that a step of a split model, or of sharded replicas, sends from device to device.

    with watched_graphs() as graphs:
        model.fit(train, steps_per_epoch=1)      # its first call
    graphs.devices["replica_1/dense/MatMul"]     # "CPU:1"
    graphs.crossing_bytes(rows=32)               # {("CPU:0", "CPU:1"): 1228800, …}, in a step
    graphs.sharded_bytes(rows=32, replicas=4)    # {"gathered": 49152, "scattered": 49152}

The bytes are read from the optimized graph of the step. A tensor that is needed on another device
is sent there once, regardless of the number of operations that use it.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from kdist.compat.tensorflow import collect_function_graphs
from kdist.parallel.device_groups import short_name
from kdist.training.replica.reduction import GATHER, SCOPE

# The host fetches data and takes timestamps, which devices do not exchange.
_ON_HOST = ("Iterator", "Timestamp", "PyFunc", "EagerPyFunc")

# Name scopes of `tf.gradients`, which split models use, and of gradient tapes.
_SCOPES_OF_GRADIENTS = ("gradients/", "gradient_tape/")


class WatchedGraphs:
    """Optimized graphs of the functions that ran for the first time.

    `devices` is name of an operation -> its device, such as `"CPU:1"`; profiles use these names.
    `hold_a_step` tells whether the graphs include a training step.
    """

    def __init__(self):
        self.devices: Mapping[str, str] = {}
        self.hold_a_step = False
        self._largest = None

    def take(self, functions):
        """Stores the graphs that `collect_function_graphs` yielded."""
        self.devices = {
            node.name: short_name(node.device)
            for function in functions
            for graph in function.partition_graphs
            for node in graph.node
        }
        self.hold_a_step = any(
            scope in name for name in self.devices for scope in _SCOPES_OF_GRADIENTS
        )
        # The largest is the step. Others create random numbers, reset metrics, and so on.
        graphs = [function.post_optimization_graph for function in functions]
        self._largest = max(graphs, key=lambda graph: len(graph.node), default=None)

    def crossing_bytes(self, rows: int) -> dict[tuple[str, str], int] | None:
        """Returns `crossing_bytes` of a step, which is the largest graph; None if nothing ran."""
        return None if self._largest is None else crossing_bytes(self._largest, rows)

    def sharded_bytes(self, rows: int, replicas: int) -> dict[str, int] | None:
        """Returns `sharded_bytes` of a step, which is the largest graph; None if nothing ran."""
        return None if self._largest is None else sharded_bytes(self._largest, rows, replicas)


@contextlib.contextmanager
def watched_graphs() -> Iterator[WatchedGraphs]:
    """Yields `WatchedGraphs` that hold, after the context, the functions that ran in it."""
    graphs = WatchedGraphs()
    with collect_function_graphs() as functions:
        yield graphs
    graphs.take(functions)


def crossing_bytes(graph, rows: int) -> dict[tuple[str, str], int] | None:
    """Returns {(device, other device): bytes that the first sends to the other} for a `GraphDef`.

    Where the first dimension of a tensor is unknown, it is `rows`, the rows of a micro-batch.
    Returns None if another dimension of a sent tensor is unknown, as with gradient accumulation,
    whose rows are only known at run time.
    """
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    for (tensor, there), _ in _sent(_with_shapes(graph)):
        size = _size(tensor, rows)
        if size is None:
            return None
        total[short_name(tensor.op.device), short_name(there)] += size
    return dict(total)


def sharded_bytes(graph, rows: int, replicas: int) -> dict[str, int] | None:
    """Returns the bytes that all replicas send to others in a step whose state is sharded.

    For P bytes of weights on N replicas, they are (N - 1) P for each time that gradients are
    scattered or weights are gathered. Source: Rajbhandari et al., "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", 2020 (arXiv:1910.02054), section 7.

    Args:
        graph: the optimized `GraphDef` of a step on the replicas of this process.
        rows: rows of tensors whose first dimension is unknown.
        replicas: number of replicas of the job.

    Returns:
        The bytes by what they are for, "gathered" and "scattered". An all-reduce of small weights
        counts as both with several workers, and as scattered within a process. None if the size of
        a tensor is unknown.
    """
    with_shapes = _with_shapes(graph)
    # The rows of a batch are sent as well, and are neither.
    own = [
        (kind, tensor, 1)
        for (tensor, _), consumer in _sent(with_shapes)
        for kind, scope in (("scattered", SCOPE), ("gathered", GATHER))
        if scope in consumer.name
    ]
    collectives = [
        (kind, operation.inputs[0], count)
        for operation in with_shapes.get_operations()
        if operation.type in _COLLECTIVES
        for kind, count in _COLLECTIVES[operation.type](tf.get_static_value(operation.inputs[1]))
    ]
    # Each worker has the graph of its own replicas.
    devices = {tensor.op.device for _, tensor, _ in collectives}
    workers = replicas / len(devices) if devices else 1
    total = dict.fromkeys(("gathered", "scattered"), 0.0)
    for kind, tensor, count in own + collectives:
        size = _size(tensor, rows)
        if size is None:
            return None
        total[kind] += size * count * workers
    return {kind: round(size) for kind, size in total.items()}


# How often a device sends the input of a collective of N devices, and what for.
_COLLECTIVES: dict[str, Callable[[int], tuple[tuple[str, float], ...]]] = {
    "CollectiveGatherV2": lambda n: (("gathered", n - 1),),
    "CollectiveAllToAllV2": lambda n: (("scattered", (n - 1) / n),),
    "CollectiveReduceV2": lambda n: (("scattered", (n - 1) / n), ("gathered", (n - 1) / n)),
}


def _with_shapes(graph):
    """Returns a graph with the operations of a `GraphDef`, and the shapes of its tensors."""
    with tf.Graph().as_default() as with_shapes:
        tf.import_graph_def(graph, name="")
    return with_shapes


def _sent(graph):
    """Returns pairs of (a tensor, another device that needs it) and an operation there."""
    sent = {
        (tensor.ref(), consumer.device): consumer
        for consumer in graph.get_operations()
        for tensor in consumer.inputs
        if tensor.op.device != consumer.device and _is_exchanged(tensor)
    }
    return [((ref.deref(), there), consumer) for (ref, there), consumer in sent.items()]


def _size(tensor, rows):
    """Returns the bytes of a tensor; None if unknown."""
    shape = tensor.shape
    if shape.rank and shape[0] is None:
        shape = tf.TensorShape([rows]).concatenate(shape[1:])
    return shape.num_elements() * tensor.dtype.size if shape.is_fully_defined() else None


def _is_exchanged(tensor):
    is_data = tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return is_data and not any(kind in tensor.op.type for kind in _ON_HOST)
