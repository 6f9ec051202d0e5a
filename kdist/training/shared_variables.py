"""Variables on parameter servers, many small ones in a message.

A worker's step reads every variable and sends a gradient for each. Sent alone, a small one costs a
message, and messages cost more than a small model's arithmetic. So small variables of one server
and one type are read as one vector, and written as one.
"""

from collections import defaultdict

import tensorflow as tf

# A larger one is sent alone: copying it would cost more than its message.
_PACK_BELOW_BYTES = 256 * 1024


def pull(variables):
    """The values of small variables, by the place in the list; the others are left out.

    Args:
        variables: TensorFlow's, on any devices.
    """
    values = {}
    for device, numbers in _packs(variables):
        with tf.device(device):
            flat = tf.concat([tf.reshape(variables[n].read_value(), [-1]) for n in numbers], 0)
        values.update(zip(numbers, _unpacked(flat, [variables[n] for n in numbers]), strict=True))
    return values


def brought_to(variables, tensors):
    """The tensors, small ones beside the variables that they belong to.

    Args:
        variables: TensorFlow's.
        tensors: one for each: a tensor of its shape, `tf.IndexedSlices`, or None.
    """
    tensors = list(tensors)
    dense = [
        v if isinstance(t, tf.Tensor) else None for v, t in zip(variables, tensors, strict=True)
    ]
    for device, numbers in _packs(dense):
        if len(numbers) == 1:
            continue
        flat = tf.concat([tf.reshape(tensors[n], [-1]) for n in numbers], 0)
        with tf.device(device):
            parts = _unpacked(flat, [variables[n] for n in numbers])
        for number, part in zip(numbers, parts, strict=True):
            tensors[number] = part
    return tensors


def _packs(variables):
    """(device, numbers of the small variables of one type on it)."""
    packs = defaultdict(list)
    for number, variable in enumerate(variables):
        if variable is not None and _is_small(variable):
            packs[variable.device, variable.dtype].append(number)
    return [(device, numbers) for (device, _), numbers in packs.items()]


def _is_small(variable):
    known = variable.shape.is_fully_defined() and variable.dtype != tf.string
    return known and variable.shape.num_elements() * variable.dtype.size < _PACK_BELOW_BYTES


def _unpacked(flat, like):
    parts = tf.split(flat, [variable.shape.num_elements() for variable in like])
    return [tf.reshape(part, v.shape) for part, v in zip(parts, like, strict=True)]
