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

from kdist.training.epochs import up_to


@dataclasses.dataclass(frozen=True)
class Reader:
    """The batches of a group, on the worker.

    Attributes:
        batch: gives the batch of a step of the group, counted from 0.
        first: the first one's number, counted over all workers; an int64 scalar.
        length: how many there are: an int, if the function is traced for so many; else a scalar.
    """

    batch: Callable[[Any], Any]
    first: tf.Tensor
    length: Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a group, on the coordinator.

    Attributes:
        length: how many.
        tensors: that are sent with the group.
        arrays: that every worker has a copy of.
        reader: of tensors, those that are sent and the copies, gives a `Reader`.
        key: equal for groups that one traced function serves.
        signature: shape and type of all that the reader takes.
    """

    length: int
    tensors: Sequence[tf.Tensor]
    arrays: Sequence[np.ndarray]
    reader: Callable[..., Reader]
    key: Any
    signature: Sequence[tf.TensorSpec]


class NumberedFeed:
    """The batches of a pipeline from number `start` on; workers draw them by themselves."""

    def __init__(self, pipeline, start: int = 0):
        self._pipeline, self._next = pipeline, start

    def take(self, length: int, apart: bool = False) -> Batches:
        """The next `length` batches; `apart`, their number is known when the function is traced."""
        first, self._next = self._next, self._next + length
        known = length if apart or length == 1 else None

        def reader(place, *copies):
            first = place[0]

            def batch(number):
                return self._pipeline.batch_of(first + tf.cast(number, tf.int64), copies)

            return Reader(batch, first, known or tf.cast(place[1], tf.int32))

        place, arrays = tf.constant([first, length], tf.int64), self._pipeline.arrays()
        signature = [_spec(place), *(tf.TensorSpec(a.shape, a.dtype) for a in arrays)]
        return Batches(length, [place], arrays, reader, (id(self._pipeline), known), signature)


class SentFeed:
    """The batches of an iterator, read by the coordinator."""

    def __init__(self, iterator):
        self._iterator, self._next = iterator, 0

    def take(self, length: int, apart: bool = False) -> Batches | None:
        """The next `length` batches, or as many as there are; None if there is none."""
        batches = list(up_to(length, self._iterator))
        if not batches:
            return None
        first, self._next = tf.constant(self._next, tf.int64), self._next + len(batches)
        flat = [tf.nest.flatten(batch, expand_composites=True) for batch in batches]
        together = not apart and len(flat) > 1 and _can_be_stacked(flat)
        make = _stacked if together else _side_by_side
        return make(first, flat, self._iterator.element_spec)


def _stacked(first, flat, element_spec):
    """Batches of one shape, each of their tensors on top of the others."""
    stacks = [tf.stack(parts) for parts in zip(*flat, strict=True)]

    def reader(first, *stacks):
        def batch(number):
            parts = [tf.gather(stack, number) for stack in stacks]
            return tf.nest.pack_sequence_as(element_spec, parts, expand_composites=True)

        return Reader(batch, first, tf.shape(stacks[0])[0])

    specs = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in _components(element_spec)]
    return Batches(
        len(flat), [first, *stacks], (), reader, ("stacked", *specs), [_spec(first), *specs]
    )


def _side_by_side(first, flat, element_spec):
    """Batches of any shapes, one after the other."""
    length, width = len(flat), len(flat[0])
    tensors = [first, *(part for parts in flat for part in parts)]

    def reader(first, *tensors):
        def batch(number):
            parts = tensors[number * width : (number + 1) * width]
            return tf.nest.pack_sequence_as(element_spec, parts, expand_composites=True)

        return Reader(batch, first, length)

    specs = [_spec(first), *(_components(element_spec) * length)]
    return Batches(length, tensors, (), reader, ("side by side", *specs), specs)


def _components(element_spec):
    """Of the tensors that a batch is made of; what the data leave open, functions leave open."""
    flat = tf.nest.flatten(element_spec, expand_composites=True)
    return [tf.TensorSpec(spec.shape, spec.dtype) for spec in flat]


def _spec(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _can_be_stacked(flat):
    first = [(part.shape, part.dtype) for part in flat[0]]
    return all([(part.shape, part.dtype) for part in parts] == first for parts in flat)
