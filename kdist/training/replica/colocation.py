"""Colocation of operations with their inputs, for replicas of several devices.

    with colocate_with_inputs():
        clipped = tf.clip_by_global_norm(gradients, 1.0)   # each on the device of its gradient

By default TensorFlow places all operations of a replica on its first device. It would move the
gradients and slots of layers on other devices there and back.
"""

import contextlib
import math
import weakref

import tensorflow as tf

_captured: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def colocate_with_inputs():
    """Returns a context manager that places a function's operations on the device of their inputs.

    The largest input determines the device, and a variable takes precedence over tensors.
    Operations without inputs, or with scalars only, keep their default device. A `tf.device` inside
    the context takes precedence.
    """
    with tf.compat.v1.get_default_graph().device(_device_of_inputs):
        yield


def _device_of_inputs(operation):
    if operation.device:  # set by an inner tf.device
        return operation.device
    found, most = "", 1
    for tensor in operation.inputs:
        size = math.inf if tensor.dtype == tf.resource else _elements(tensor)
        if size > most and (device := device_of(tensor)):
            found, most = device, size
    return found


def _elements(tensor):
    """Returns the number of elements, or a large number if the shape is unknown."""
    count = tensor.shape.num_elements() if tensor.shape.rank is not None else None
    return 1 << 40 if count is None else count


def device_of(tensor) -> str:
    """Returns the device of a function's tensor; "" if it is unknown before the function runs."""
    if not hasattr(tensor, "graph"):
        return tensor.device
    if tensor.op.type == "ReadVariableOp":  # has no device until the function runs
        return device_of(tensor.op.inputs[0])
    outer = outer_tensor(tensor)
    return tensor.device if outer is None else device_of(outer)


def outer_tensor(tensor):
    """Returns the tensor outside a function that it has captured as `tensor`, or None."""
    graph = tensor.graph
    captures = getattr(graph, "captures", ())
    known = _captured.get(graph)
    if known is None or len(known) != len(captures):
        known = {id(inner): outer for outer, inner in captures}
        _captured[graph] = known
    return known.get(id(tensor))
