"""How much a step of a split model sends from device to device.

    with watched_graphs() as graphs:
        model.fit(train, steps_per_epoch=1)      # its first call
    graphs.devices["replica_1/dense/MatMul"]     # "CPU:1"
    graphs.crossing_bytes(rows=32)               # {("CPU:0", "CPU:1"): 1228800, …}, in a step

Read from the graph of the step as TensorFlow has optimized it, with the sizes of its tensors: what
is on one device and taken on another is sent there, once, however many operations take it.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping

import tensorflow as tf

from kdist.parallel.groups import short_name
from kdist.tensorflow_internals import graphs_that_run

# Data are fetched by the host, and the time is taken there: no part of what devices exchange.
_ON_HOST = ("Iterator", "Timestamp", "PyFunc", "EagerPyFunc")


class WatchedGraphs:
    """What TensorFlow has made of the functions that ran for the first time.

    Attributes:
        devices: name of an operation -> its device, such as `"CPU:1"`. Profiles call operations by
            these names.
        hold_a_step: whether a step of training is among them.
    """

    def __init__(self):
        self.devices: Mapping[str, str] = {}
        self.hold_a_step = False
        self._largest = None

    def take(self, functions):
        """Takes what `graphs_that_run` has given."""
        self.devices = {
            node.name: short_name(node.device)
            for function in functions
            for graph in function.partition_graphs
            for node in graph.node
        }
        self.hold_a_step = any("gradients/" in name for name in self.devices)
        # The step; the others make random numbers, reset metrics and the like.
        graphs = [function.post_optimization_graph for function in functions]
        self._largest = max(graphs, key=lambda graph: len(graph.node), default=None)

    def crossing_bytes(self, rows: int) -> dict[tuple[str, str], int] | None:
        """`crossing_bytes` of a step, which is told by its size; None where nothing ran."""
        return None if self._largest is None else crossing_bytes(self._largest, rows)


@contextlib.contextmanager
def watched_graphs() -> Iterator[WatchedGraphs]:
    """A context that gives `WatchedGraphs`, which know at its end what ran in it."""
    graphs = WatchedGraphs()
    with graphs_that_run() as functions:
        yield graphs
    graphs.take(functions)


def crossing_bytes(graph, rows: int) -> dict[tuple[str, str], int] | None:
    """(a device, another) -> bytes that the one sends to the other when a graph runs.

    Args:
        graph: a GraphDef whose operations have devices.
        rows: of a micro-batch; the first dimension of tensors for which TensorFlow leaves it open.

    Returns:
        None if a tensor that is sent leaves more than that open, as with micro-steps
        (`accumulate`), whose rows are known only when they run.
    """
    devices = {node.name: node.device for node in graph.node}
    with tf.Graph().as_default() as with_shapes:
        tf.import_graph_def(graph, name="")
    sent = {
        (tensor.ref(), devices[taker.name])
        for taker in with_shapes.get_operations()
        for tensor in taker.inputs
        if devices[tensor.op.name] != devices[taker.name] and _is_exchanged(tensor)
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
    """How many numbers; None if that is not known."""
    if shape.rank and shape[0] is None:
        shape = tf.TensorShape([rows]).concatenate(shape[1:])
    return shape.num_elements() if shape.is_fully_defined() else None


def _is_exchanged(tensor):
    is_data = tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return is_data and not any(kind in tensor.op.type for kind in _ON_HOST)
