"""Bytes that a step of a split model sends from device to device.

    with watched_graphs() as graphs:
        model.fit(train, steps_per_epoch=1)      # its first call
    graphs.devices["replica_1/dense/MatMul"]     # "CPU:1"
    graphs.crossing_bytes(rows=32)               # {("CPU:0", "CPU:1"): 1228800, …}, in a step

The bytes are read from the optimized graph of the step. A tensor that is needed on another device
is sent there once, regardless of the number of operations that use it.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping

import tensorflow as tf

from kdist.compat.tensorflow import collect_function_graphs
from kdist.parallel.device_groups import short_name

# The host fetches data and takes timestamps, which devices do not exchange.
_ON_HOST = ("Iterator", "Timestamp", "PyFunc", "EagerPyFunc")


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
        self.hold_a_step = any("gradients/" in name for name in self.devices)
        # The largest is the step. Others create random numbers, reset metrics, and so on.
        graphs = [function.post_optimization_graph for function in functions]
        self._largest = max(graphs, key=lambda graph: len(graph.node), default=None)

    def crossing_bytes(self, rows: int) -> dict[tuple[str, str], int] | None:
        """Returns `crossing_bytes` of a step, which is the largest graph; None if nothing ran."""
        return None if self._largest is None else crossing_bytes(self._largest, rows)


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
    devices = {node.name: node.device for node in graph.node}
    with tf.Graph().as_default() as with_shapes:
        tf.import_graph_def(graph, name="")
    sent = {
        (tensor.ref(), devices[consumer.name])
        for consumer in with_shapes.get_operations()
        for tensor in consumer.inputs
        if devices[tensor.op.name] != devices[consumer.name] and _is_exchanged(tensor)
    }
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    for ref, there in sent:
        tensor = ref.deref()
        size = _size(tensor.shape, rows)
        if size is None:
            return None
        total[short_name(devices[tensor.op.name]), short_name(there)] += size * tensor.dtype.size
    return dict(total)


def _size(shape, rows):
    """Returns the number of elements; None if unknown."""
    if shape.rank and shape[0] is None:
        shape = tf.TensorShape([rows]).concatenate(shape[1:])
    return shape.num_elements() if shape.is_fully_defined() else None


def _is_exchanged(tensor):
    is_data = tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return is_data and not any(kind in tensor.op.type for kind in _ON_HOST)
