"""Operations beside what they compute with: for replicas that are on several devices.

    with beside_inputs():
        clipped = tf.clip_by_global_norm(gradients, 1.0)   # each on the device of its gradient

By itself TensorFlow puts all operations of a replica on its one device, and so would move gradients
and slots of layers that are elsewhere there and back.
"""

import contextlib
import math
import weakref

import tensorflow as tf

_captured: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def beside_inputs():
    """Operations that are made meanwhile, in a function, are placed where their inputs are.

    Of several inputs the largest one counts, and a variable before all others. What has no inputs,
    or only single numbers, stays on the device that it would have been on; a `tf.device` within
    counts before this.
    """
    with tf.compat.v1.get_default_graph().device(_device_of_inputs):
        yield


def _device_of_inputs(operation):
    if operation.device:  # a tf.device within has said it
        return operation.device
    found, most = "", 1
    for tensor in operation.inputs:
        size = math.inf if tensor.dtype == tf.resource else _elements(tensor)
        if size > most and (device := device_of(tensor)):
            found, most = device, size
    return found


def _elements(tensor):
    """How many; of an unknown shape, many."""
    count = tensor.shape.num_elements() if tensor.shape.rank is not None else None
    return 1 << 40 if count is None else count


def device_of(tensor) -> str:
    """The device that a tensor of a function is on, as far as is known before it runs; else ""."""
    if not hasattr(tensor, "graph"):
        return tensor.device
    if tensor.op.type == "ReadVariableOp":  # TensorFlow leaves it to the placer
        return device_of(tensor.op.inputs[0])
    outer = _outer(tensor)
    return tensor.device if outer is None else device_of(outer)


def _outer(tensor):
    """What a function has captured as `tensor` from outside; None for all else."""
    graph = tensor.graph
    captures = getattr(graph, "captures", ())
    known = _captured.get(graph)
    if known is None or len(known) != len(captures):
        known = {id(inner): outer for outer, inner in captures}
        _captured[graph] = known
    return known.get(id(tensor))
