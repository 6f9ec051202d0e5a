"""Reads and writes of variables on parameter servers, with many small ones in one message.

A worker's step reads every variable and sends a gradient for each. A message costs more than the
arithmetic of a small model. Therefore small variables of the same server and type are read and
written as one vector.

The operations of a step on one server form one function. TensorFlow makes a step wait for each of
its writes with a message of its own, but only once for a function.
"""

from collections import defaultdict

import tensorflow as tf

# Larger variables are sent alone: copying them would cost more than a message.
_PACK_BELOW_BYTES = 256 * 1024


def run_on_server(device, function, *tensors):
    """Returns the result of `function`, which runs on `device` as a whole."""

    def there(*tensors):
        with tf.device(device):
            return function(*tensors)

    with tf.device(device):
        return tf.function(there, autograph=False)(*tensors)


def pull(variables, counter=None):
    """Returns (values of small variables by their index, value of `counter`).

    Args:
        variables: TensorFlow variables on any devices.
        counter: variable that is read before all others; optional.
    """
    packs = _packs(variables)
    values, count, flats = {}, None, {}
    if counter is not None:
        # One function for both: control dependencies of a call do not order its operations.
        count, flats[counter.device] = run_on_server(
            counter.device,
            lambda: _read(variables, packs.get(counter.device, []), counter),
        )
    for device in packs.keys() - flats.keys():
        flats[device] = run_on_server(
            device,
            lambda *after, device=device: _read(variables, packs[device], after=after)[1],
            *([] if count is None else [count]),
        )
    for device, some in packs.items():
        for flat, numbers in zip(flats[device], some, strict=True):
            parts = _unpacked(flat, [variables[n] for n in numbers])
            values.update(zip(numbers, parts, strict=True))
    return values, count


def push(variables, tensors, write):
    """Lets each server write to its variables.

    Args:
        variables: TensorFlow variables.
        tensors: one per variable: a tensor of its shape, `tf.IndexedSlices`, or None.
        write: function of a variable and its tensor, on the same server.
    """
    moved = move_to_servers(variables, tensors)
    run_on_servers(variables, moved, lambda number, tensor: write(variables[number], tensor))


def run_on_servers(variables, tensors, act):
    """Calls `act(index, tensor)` for each variable with a tensor, in one function per server."""
    by_device = defaultdict(list)
    for number, (variable, tensor) in enumerate(zip(variables, tensors, strict=True)):
        if tensor is not None:
            by_device[variable.device].append((number, tensor))
    for device, some in by_device.items():

        def act_on_each(some=some):
            for number, tensor in some:
                act(number, tensor)

        run_on_server(device, act_on_each)


def move_to_servers(variables, tensors):
    """Returns the tensors, with small ones moved to the servers of their variables.

    Args:
        variables: TensorFlow variables.
        tensors: one per variable: a tensor of its shape, `tf.IndexedSlices`, or None.
    """
    moved = list(tensors)
    dense = [
        v if isinstance(t, tf.Tensor) else None for v, t in zip(variables, tensors, strict=True)
    ]
    for device, packs in _packs(dense).items():
        for numbers in packs:
            flat = tf.concat([tf.reshape(tensors[n], [-1]) for n in numbers], 0)
            with tf.device(device):
                parts = _unpacked(flat, [variables[n] for n in numbers])
            for number, part in zip(numbers, parts, strict=True):
                moved[number] = part
    return moved


def _packs(variables):
    """Returns a dict: device -> lists of indices of its small variables, one per type."""
    packs = defaultdict(lambda: defaultdict(list))
    for number, variable in enumerate(variables):
        if variable is not None and _is_small(variable):
            packs[variable.device][variable.dtype].append(number)
    return {device: list(by_type.values()) for device, by_type in packs.items()}


def _is_small(variable):
    known = variable.shape.is_fully_defined() and variable.dtype != tf.string
    return known and variable.shape.num_elements() * variable.dtype.size < _PACK_BELOW_BYTES


def _read(variables, packs, counter=None, after=()):
    """Returns (value of the counter, which is read first; each pack as one vector)."""
    count = None if counter is None else counter.read_value()
    with tf.control_dependencies([*after, *([] if count is None else [count])]):
        flats = [
            tf.concat([tf.reshape(variables[n].read_value(), [-1]) for n in numbers], 0)
            for numbers in packs
        ]
    return count, flats


def _unpacked(flat, like):
    parts = tf.split(flat, [variable.shape.num_elements() for variable in like])
    return [tf.reshape(part, v.shape) for part, v in zip(parts, like, strict=True)]
