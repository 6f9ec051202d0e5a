"""What the chief has read, on all workers: they need not see its disk."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.checkpoint.files import CheckpointError
from kdist.strategies import is_chief
from kdist.training.reduction import sums_over_replicas
from kdist.training.step import this_replica
from kdist.training.together import are_several_workers, replicas_here


def of_chief(strategy: tf.distribute.Strategy, read: Callable[[], dict[str, Any]]):
    """What `read` gives on the chief, on all workers; they have to call it together.

    Args:
        strategy: with one worker, `read` is called and that is all.
        read: gives a dict whose "arrays" are a dict of NumPy arrays or None, and whose other values
            JSON can hold.

    Raises:
        CheckpointError: what `read` raised on the chief, raised by all.
    """
    if not are_several_workers(strategy):
        return read()
    chief = is_chief(strategy)
    arrays: dict[str, np.ndarray] = {}
    rest: dict[str, Any] = {}
    if chief:
        try:
            rest = read()
            arrays = rest.pop("arrays") or {}
        except CheckpointError as error:
            rest = {"error": str(error)}
        rest["specs"] = [[name, list(a.shape), a.dtype.name] for name, a in arrays.items()]
    text = _as_integers(np.frombuffer(json.dumps(rest).encode(), np.uint8))
    (length,) = _sums(strategy, [np.array([len(text) if chief else 0], np.int32)])
    (text,) = _sums(strategy, [text if chief else np.zeros(length[0], np.int32)])
    rest = json.loads(text.tobytes().rstrip(b"\0"))
    if "error" in rest:
        raise CheckpointError(rest["error"])
    specs = rest.pop("specs")
    if not chief:
        arrays = {name: np.zeros(shape, _dtype(dtype)) for name, shape, dtype in specs}
    # As integers: a sum with zeros then keeps every bit.
    sums = _sums(strategy, [_as_integers(array) for array in arrays.values()])
    arrays = {
        name: _from_integers(part, _dtype(dtype), shape)
        for (name, shape, dtype), part in zip(specs, sums, strict=True)
    }
    return {**rest, "arrays": arrays or None}


def _as_integers(array):
    """Its bytes as numbers that collectives can add up, with zeros behind."""
    text = np.ascontiguousarray(array).tobytes()
    return np.frombuffer(text + bytes(-len(text) % 4), np.int32)


def _from_integers(integers, dtype, shape):
    """The array whose bytes they are."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(integers.tobytes()[:size], dtype).reshape(shape)


def _dtype(name):
    return tf.as_dtype(name).as_numpy_dtype


def _sums(strategy, arrays):
    """The sums over workers of arrays that each of them has."""
    if not arrays:
        return []

    def parts():
        is_first = this_replica() % replicas_here(strategy) == 0
        return [tf.constant(array if is_first else np.zeros_like(array)) for array in arrays]

    return sums_over_replicas(strategy, parts)
