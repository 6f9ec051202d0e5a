"""Variables on parameter servers, many small ones in a message.

A worker's step reads every variable and sends a gradient for each. Sent alone, a small one costs a
message, and messages cost more than a small model's arithmetic. So small variables of one server
and one type are read as one vector, and written as one.

What a server does for a step is one function there. TensorFlow has each step wait for all that
it wrote, one message for each write; for a function it waits once.
"""

from collections import defaultdict

import tensorflow as tf

# A larger one is sent alone: copying it would cost more than its message.
_PACK_BELOW_BYTES = 256 * 1024


def on_server(device, function, *tensors):
    """What `function` gives, which runs on `device` as a whole."""

    def there(*tensors):
        with tf.device(device):
            return function(*tensors)

    with tf.device(device):
        return tf.function(there, autograph=False)(*tensors)


def pull(variables, counter=None):
    """(values of small variables by their place in the list, the value of `counter`).

    Args:
        variables: TensorFlow's, on any devices.
        counter: a variable that is read before all others.
    """
    packs = _packs(variables)
    values, count, flats = {}, None, {}
    if counter is not None:
        # Together, as a function does not wait for what only its call waits for.
        count, flats[counter.device] = on_server(
            counter.device,
            lambda: _read(variables, packs.get(counter.device, []), counter),
        )
    for device in packs.keys() - flats.keys():
        flats[device] = on_server(
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
    """Has each server write to its variables.

    Args:
        variables: TensorFlow's.
        tensors: one for each: a tensor of its shape, `tf.IndexedSlices`, or None.
        write: is given a variable and its tensor, beside it.
    """
    beside = brought_to(variables, tensors)
    on_their_servers(variables, beside, lambda number, tensor: write(variables[number], tensor))


def on_their_servers(variables, tensors, act):
    """Calls `act(number, tensor)` for each variable that has one, in one function a server."""
    by_device = defaultdict(list)
    for number, (variable, tensor) in enumerate(zip(variables, tensors, strict=True)):
        if tensor is not None:
            by_device[variable.device].append((number, tensor))
    for device, some in by_device.items():

        def act_on_each(some=some):
            for number, tensor in some:
                act(number, tensor)

        on_server(device, act_on_each)


def brought_to(variables, tensors):
    """The tensors, small ones beside the variables that they belong to.

    Args:
        variables: TensorFlow's.
        tensors: one for each: a tensor of its shape, `tf.IndexedSlices`, or None.
    """
    beside = list(tensors)
    dense = [
        v if isinstance(t, tf.Tensor) else None for v, t in zip(variables, tensors, strict=True)
    ]
    for device, packs in _packs(dense).items():
        for numbers in packs:
            flat = tf.concat([tf.reshape(tensors[n], [-1]) for n in numbers], 0)
            with tf.device(device):
                parts = _unpacked(flat, [variables[n] for n in numbers])
            for number, part in zip(numbers, parts, strict=True):
                beside[number] = part
    return beside


def _packs(variables):
    """Device -> lists of the numbers of its small variables, those of one type together."""
    packs = defaultdict(lambda: defaultdict(list))
    for number, variable in enumerate(variables):
        if variable is not None and _is_small(variable):
            packs[variable.device][variable.dtype].append(number)
    return {device: list(by_type.values()) for device, by_type in packs.items()}


def _is_small(variable):
    known = variable.shape.is_fully_defined() and variable.dtype != tf.string
    return known and variable.shape.num_elements() * variable.dtype.size < _PACK_BELOW_BYTES


def _read(variables, packs, counter=None, after=()):
    """(the counter, read first, each pack as one vector)."""
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
