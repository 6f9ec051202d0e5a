"""Feeds: how batches reach the worker that trains on them.

If a pipeline's examples are in memory, every worker keeps a copy, and receives batch numbers.
Otherwise the coordinator reads each batch and sends it. In both cases each batch of an epoch is
used once, by any idle worker.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.training.groups.step_groups import take_up_to


@dataclasses.dataclass(frozen=True)
class Reader:
    """Batches of a group, on the worker.

    Attributes:
        batch: function that returns the batch of a step of the group, counted from 0.
        first: number of the first batch, counted over all workers; an int64 scalar.
        length: number of batches: an int if the function is traced for it, else a scalar tensor.
    """

    batch: Callable[[Any], Any]
    first: tf.Tensor
    length: Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of a group, on the coordinator.

    Attributes:
        length: number of batches.
        tensors: tensors that are sent with the group.
        arrays: arrays of which every worker has a copy.
        reader: function from the sent tensors and the copies to a `Reader`.
        key: equal for groups that use the same traced function.
        signature: shapes and types of the arguments of `reader`.
    """

    length: int
    tensors: Sequence[tf.Tensor]
    arrays: Sequence[np.ndarray]
    reader: Callable[..., Reader]
    key: Any
    signature: Sequence[tf.TensorSpec]


class PipelineFeed:
    """Batches of a pipeline from number `start` on, which workers read from their own copy."""

    def __init__(self, pipeline, start: int = 0):
        self._pipeline, self._next = pipeline, start

    def take(self, length: int, separate: bool = False) -> Batches:
        """Returns the next `length` batches.

        Args:
            length: number of batches.
            separate: whether the number must be known when the function is traced.
        """
        first, self._next = self._next, self._next + length
        known = length if separate or length == 1 else None

        def reader(place, *copies):
            first = place[0]

            def batch(number):
                return self._pipeline.batch_at(first + tf.cast(number, tf.int64), copies)

            return Reader(batch, first, known or tf.cast(place[1], tf.int32))

        place, arrays = tf.constant([first, length], tf.int64), self._pipeline.arrays()
        signature = [_spec(place), *(tf.TensorSpec(a.shape, a.dtype) for a in arrays)]
        return Batches(length, [place], arrays, reader, (id(self._pipeline), known), signature)


class IteratorFeed:
    """Batches of an iterator, which the coordinator reads and sends."""

    def __init__(self, iterator):
        self._iterator, self._next = iterator, 0

    def take(self, length: int, separate: bool = False) -> Batches | None:
        """Returns the next `length` batches, or fewer at the end; None if there is none."""
        batches = list(take_up_to(length, self._iterator))
        if not batches:
            return None
        first, self._next = tf.constant(self._next, tf.int64), self._next + len(batches)
        flat = [tf.nest.flatten(batch, expand_composites=True) for batch in batches]
        is_stacked = not separate and len(flat) > 1 and _can_be_stacked(flat)
        make = _stacked if is_stacked else _side_by_side
        return make(first, flat, self._iterator.element_spec)


def _stacked(first, flat, element_spec):
    """Returns batches of equal shapes, stacked along a new first axis."""
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
    """Returns batches of any shapes, as separate tensors."""
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
    """Returns the specifications of a batch's tensors; unknown dimensions stay unknown."""
    flat = tf.nest.flatten(element_spec, expand_composites=True)
    return [tf.TensorSpec(spec.shape, spec.dtype) for spec in flat]


def _spec(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _can_be_stacked(flat):
    first = [(part.shape, part.dtype) for part in flat[0]]
    return all([(part.shape, part.dtype) for part in parts] == first for parts in flat)
