"""How batches reach the worker that takes them.

A pipeline whose examples are in memory: every worker keeps a copy, and is told the numbers of its
batches. Anything else: the coordinator reads it, and sends each batch. Either way each batch of an
epoch is taken once, whichever worker is free.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Reader:
    """The batches of a group, on the worker.

    Attributes:
        batch: gives the batch of a step of the group, counted from 0.
        first: the first one's number, counted over all workers; an int64 scalar.
        length: how many there are, an int32 scalar.
        static_length: the same, as an int.
        is_unrolled: `batch` takes an int only.
    """

    batch: Callable[[Any], Any]
    first: tf.Tensor
    length: tf.Tensor
    static_length: int
    is_unrolled: bool = False


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a group, on the coordinator.

    Attributes:
        length: how many.
        tensors: that are sent with the group.
        arrays: that every worker has a copy of.
        reader: of tensors, those that are sent and the copies, gives a `Reader`.
        key: equal for groups that one traced function serves.
    """

    length: int
    tensors: Sequence[tf.Tensor]
    arrays: Sequence[np.ndarray]
    reader: Callable[..., Reader]
    key: Any

    @property
    def signature(self):
        """Shape and type of all tensors that the reader takes."""
        copies = [tf.TensorSpec(a.shape, tf.as_dtype(a.dtype)) for a in self.arrays]
        return [*self.tensors, *copies]


class NumberedFeed:
    """The batches of a pipeline from number `start` on; workers draw them by themselves."""

    def __init__(self, pipeline, start: int = 0):
        self._pipeline, self._next = pipeline, start

    def take(self, length: int) -> Batches:
        """The next `length` batches."""
        first, self._next = self._next, self._next + length

        def reader(first, length_tensor, *copies):
            def batch(number):
                return self._pipeline.batch_of(first + tf.cast(number, tf.int64), copies)

            return Reader(batch, first, length_tensor, length)

        tensors = tf.constant(first, tf.int64), tf.constant(length)
        return Batches(
            length, tensors, self._pipeline.arrays(), reader, (id(self._pipeline), length)
        )


class SentFeed:
    """The batches of an iterator, read by the coordinator."""

    def __init__(self, iterator):
        self._iterator, self._next = iterator, 0

    def take(self, length: int) -> Batches | None:
        """The next `length` batches, or as many as there are; None if there is none."""
        batches = list(_up_to(length, self._iterator))
        if not batches:
            return None
        first, self._next = self._next, self._next + len(batches)
        structure = batches[0]
        flat = [tf.nest.flatten(batch, expand_composites=True) for batch in batches]
        number = tf.constant(first, tf.int64)
        if len(flat) > 1 and _can_be_stacked(flat):
            return self._stacked(flat, number, structure)
        return self._side_by_side(flat, number, structure)

    def _stacked(self, flat, number, structure):
        length = len(flat)
        tensors = [tf.stack(parts) for parts in zip(*flat, strict=True)]

        def reader(first, *stacks):
            def batch(number):
                parts = [tf.gather(stack, number) for stack in stacks]
                return tf.nest.pack_sequence_as(structure, parts, expand_composites=True)

            return Reader(batch, first, tf.constant(length), length)

        return Batches(length, [number, *tensors], (), reader, _key("stacked", tensors))

    def _side_by_side(self, flat, number, structure):
        length, width = len(flat), len(flat[0])
        tensors = [part for parts in flat for part in parts]

        def reader(first, *tensors):
            def batch(number):
                parts = tensors[number * width : (number + 1) * width]
                return tf.nest.pack_sequence_as(structure, parts, expand_composites=True)

            return Reader(batch, first, tf.constant(length), length, is_unrolled=True)

        return Batches(length, [number, *tensors], (), reader, _key("side by side", tensors))


def _up_to(length, iterator):
    for _ in range(length):
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


def _can_be_stacked(flat):
    first = [(part.shape, part.dtype) for part in flat[0]]
    return all([(part.shape, part.dtype) for part in parts] == first for parts in flat)


def _key(kind, tensors):
    return kind, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
