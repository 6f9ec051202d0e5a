"""Broadcast from the chief, so that the other workers need no access to its disk."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.cluster import heartbeat
from kdist.training.replica.reduction import sums_over_replicas
from kdist.training.scopes import is_multi_worker, this_local_replica


def read_on_chief(
    strategy: tf.distribute.Strategy,
    read: Callable[[], dict[str, Any]],
    error_class: type[Exception],
) -> dict[str, Any]:
    """Returns the result of `read` on the chief on all workers; a collective call.

    Args:
        strategy: the strategy. With one worker, `read` is simply called.
        read: function that returns a dict. Its value "arrays" is a dict of NumPy arrays or None;
            the other values are JSON-serializable.
        error_class: the class of errors that `read` may raise. All workers then raise one.
    """
    if not is_multi_worker(strategy):
        return read()
    chief = strategy.extended.should_checkpoint
    arrays: dict[str, np.ndarray] = {}
    others: dict[str, Any] = {}
    if chief:
        try:
            others = read()
            arrays = others.pop("arrays") or {}
        except error_class as error:
            others = {"error": str(error)}
        others["specs"] = [[name, list(a.shape), a.dtype.name] for name, a in arrays.items()]
    text = _as_integers(np.frombuffer(json.dumps(others).encode(), np.uint8))
    (length,) = _sums(strategy, [np.array([len(text) if chief else 0], np.int32)])
    (text,) = _sums(strategy, [text if chief else np.zeros(length[0], np.int32)])
    others = json.loads(text.tobytes().rstrip(b"\0"))
    if "error" in others:
        raise error_class(others["error"])
    specs = others.pop("specs")
    if not chief:
        arrays = {name: np.zeros(shape, _dtype(dtype)) for name, shape, dtype in specs}
    # A sum of integers with zeros keeps every bit.
    sums = _sums(strategy, [_as_integers(array) for array in arrays.values()])
    arrays = {
        name: _from_integers(part, _dtype(dtype), shape)
        for (name, shape, dtype), part in zip(specs, sums, strict=True)
    }
    return {**others, "arrays": arrays or None}


def wait_for_workers(strategy: tf.distribute.Strategy, name: str):
    """Returns when all workers have called this; with one worker, at once.

    Args:
        strategy: the strategy.
        name: what the workers are doing, for messages about one that hangs.
    """
    if is_multi_worker(strategy):
        with heartbeat.collective(name):
            _sums(strategy, [np.zeros(1, np.int32)])


def _as_integers(array):
    """Returns the bytes of an array as int32 for collective sums, padded with zeros."""
    text = np.ascontiguousarray(array).tobytes()
    return np.frombuffer(text + bytes(-len(text) % 4), np.int32)


def _from_integers(integers, dtype, shape):
    """Returns the array with these bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(integers.tobytes()[:size], dtype).reshape(shape)


def _dtype(name):
    return tf.as_dtype(name).as_numpy_dtype


def _sums(strategy, arrays):
    """Returns the sums over workers of arrays that each worker has."""
    if not arrays:
        return []

    def parts():
        is_first = this_local_replica() == 0
        return [tf.constant(array if is_first else np.zeros_like(array)) for array in arrays]

    return sums_over_replicas(strategy, parts)
