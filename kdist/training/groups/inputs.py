"""Inputs of `fit`, `evaluate`, and `predict`, in the form that Keras's data adapters accept.

A dataset may pad its last batch, so that all batches have the same size. It then yields a boolean
vector (B,) in place of the sample weights, False for padding. Padding rows reach no loss, metric,
or prediction.

Feeds bring batches to the worker of a parameter-server strategy that trains on them. If a
pipeline's examples are in memory, every worker keeps a copy, and receives batch numbers. Otherwise
the coordinator reads each batch and sends it. In both cases each batch of an epoch is used once, by
any idle worker.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.keras import attach, attached_to
from kdist.compat.tensorflow import first_replica
from kdist.training.groups.step_groups import take_up_to
from kdist.training.replica.row_shares import WorkerSlice
from kdist.training.scopes import has_parameter_servers, is_multi_worker, num_local_replicas


@dataclasses.dataclass(frozen=True)
class SlicedIterator:
    """Iterator over this worker's slices of global batches.

    Attributes:
        iterator: the iterator.
        worker_slice: the `WorkerSlice` that it yields.
    """

    iterator: Any
    worker_slice: WorkerSlice


def without_slice(iterator):
    """Returns (plain iterator, the `WorkerSlice` that it yields or None)."""
    if isinstance(iterator, SlicedIterator):
        return iterator.iterator, iterator.worker_slice
    return iterator, None


def worker_slice_of(x, strategy) -> WorkerSlice | None:
    """Returns this worker's slice of each batch of `x`; None if the worker reads whole batches.

    Only pipelines are sliced, and only if a batch has at least one row per worker.
    """
    if not is_pipeline(x) or not is_multi_worker(strategy):
        return None
    own, rows = num_local_replicas(strategy), x.batch.global_size
    workers = strategy.num_replicas_in_sync // own
    return WorkerSlice(first_replica(strategy) // own, workers, rows) if rows >= workers else None


def feed_of(x, strategy, start=0):
    """Returns (function from a dataset to the iterator of its step groups, `WorkerSlice` or None).

    Args:
        x: the data.
        strategy: the model's strategy.
        start: index of the first batch, if `x` is a pipeline. Defaults to 0.
    """
    worker_slice = worker_slice_of(x, strategy)
    if worker_slice:
        return lambda dataset: SlicedIterator(iter(dataset), worker_slice), worker_slice
    if not has_parameter_servers(strategy):
        return iter, None
    if is_pipeline(x) and x.arrays() is not None:
        return lambda _: PipelineFeed(x, start), None
    return lambda dataset: IteratorFeed(iter(dataset)), None


def is_pipeline(x) -> bool:
    """Returns True if `x` has the interface of a `kdist.data` pipeline."""
    return hasattr(x, "steps_per_epoch") and callable(getattr(x, "dataset", None))


def is_batch_source(x) -> bool:
    """Returns True if `x` has the interface of the batches of `kdist.data.from_batches`."""
    return callable(getattr(x, "open_reader", None))


def reader_at(x, position, steps_per_epoch, resumption):
    """Returns the reader of a batch source from a `Position` on.

    Args:
        x: a `kdist.data.BatchSource`.
        position: the position.
        steps_per_epoch: argument of `fit`; None if an epoch is a pass over the source.
        resumption: the `Resumption` of this `fit`, or None.

    Raises:
        ValueError: the source is endless, and there is no `steps_per_epoch`.
    """
    place = resumption and resumption.place
    if not place:
        is_pass = steps_per_epoch is None
        place = {
            "passes": position.epoch if is_pass else 0,
            "batches": position.step if is_pass else position.batch - position.data_start,
        }
    reader = x.open_reader(position.batch, keeps_places=resumption is not None, **place)
    return _checked_end(reader, "steps_per_epoch", steps_per_epoch)


def _checked_end(reader, argument, steps):
    if reader.is_endless and not steps:
        raise ValueError(f"the source repeats its batches without end: pass {argument}")
    return reader


def training_data(x, steps_per_epoch, start, worker_slice):
    """Returns (dataset from batch `start` on, steps per epoch) of a training pipeline."""
    if not x.training:
        raise ValueError(
            "fit received an evaluation pipeline, whose last batch contains padding. Train on the "
            "first pipeline that kdist.data.load returns, and pass this one as validation_data"
        )
    return x.dataset(start, **_slice_argument(worker_slice)), steps_per_epoch or x.steps_per_epoch


def evaluation_data(x, steps, worker_slice):
    """Returns (data, steps) for `evaluate` or `predict`; `x` may be a pipeline."""
    if is_batch_source(x):
        reader = _checked_end(x.open_reader(), "steps (in fit, validation_steps)", steps)
        return reader.dataset(), steps
    if not is_pipeline(x):
        return x, steps
    # A training pipeline is endless; one epoch of it is evaluated.
    in_epoch = x.steps_per_epoch if x.training else None
    return x.dataset(**_slice_argument(worker_slice)), steps or in_epoch


def _slice_argument(worker_slice):
    return {"part": (worker_slice.worker, worker_slice.workers)} if worker_slice else {}


def unpack_validation_data(data):
    """Returns `validation_data` as (x, y, sample_weight)."""
    if is_pipeline(data) or is_batch_source(data):
        return data, None, None
    return keras.utils.unpack_x_y_sample_weight(data)


def as_float(sample_weight):
    """Returns boolean sample weights as floats: only those of a dataset mark padding."""
    is_boolean = getattr(sample_weight, "dtype", None) in (bool, tf.bool)
    return (
        keras.ops.convert_to_numpy(sample_weight).astype("float32") if is_boolean else sample_weight
    )


def with_unknown_batch_size(element_spec):
    """Returns the specification of a batch with its batch size set to None."""

    def open_batch(spec):
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            return None
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    return keras.tree.map_structure(open_batch, element_spec)


def specs_of(batch):
    """Returns the type specifications of a batch of arrays or tensors; None for a missing one."""

    def spec_of(leaf):
        leaf = leaf if tf.is_tensor(leaf) else np.asarray(leaf)
        return tf.type_spec_from_value(leaf)

    return keras.tree.map_structure(lambda leaf: None if leaf is None else spec_of(leaf), batch)


def open_rows(element_spec):
    """Returns, for each leaf of a dataset's elements, whether its number of rows is unknown."""
    return tuple(
        isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank) and spec.shape[0] is None
        for spec in tf.nest.flatten(element_spec)
    )


def with_open_rows(batch, has_open_rows):
    """Returns a batch whose leaves have an unknown number of rows where `has_open_rows` is True.

    A function that is traced for one batch knows its size, unlike one that fetches its batches.
    Keras weights the loss of each output by a known size, so a smaller last batch would not count.
    """
    leaves = tf.nest.flatten(batch)
    if len(leaves) != len(has_open_rows):
        return batch
    opened = [
        tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]]) if is_open else leaf
        for leaf, is_open in zip(leaves, has_open_rows, strict=True)
    ]
    return tf.nest.pack_sequence_as(batch, opened)


def split_mask(sample_weight):
    """Returns (padding mask or None, sample weights or None): a boolean vector is a mask."""
    is_mask = (
        tf.is_tensor(sample_weight)
        and sample_weight.dtype == tf.bool
        and sample_weight.shape.rank == 1
    )
    return (sample_weight, None) if is_mask else (None, sample_weight)


def keep_valid(tensors, valid):
    """Returns the rows of each tensor for which the mask `valid` is True; all if it is None."""
    if valid is None:
        return tensors
    return keras.tree.map_structure(lambda tensor: _keep_valid(tensor, valid), tensors)


def _keep_valid(tensor, valid):
    attached = attached_to(tensor).items()
    kept = {name: tf.boolean_mask(value, valid) for name, value in attached}
    return attach(tf.boolean_mask(tensor, valid), **kept)


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

    def __init__(self, pipeline, start: int):
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
        self.iterator, self._next = iterator, 0

    def take(self, length: int, separate: bool = False) -> Batches | None:
        """Returns the next `length` batches, or fewer at the end; None if there is none."""
        batches = list(take_up_to(length, self.iterator))
        if not batches:
            return None
        first, self._next = tf.constant(self._next, tf.int64), self._next + len(batches)
        flat = [tf.nest.flatten(batch, expand_composites=True) for batch in batches]
        is_stacked = not separate and len(flat) > 1 and _can_be_stacked(flat)
        make = _stacked if is_stacked else _side_by_side
        return make(first, flat, self.iterator.element_spec)


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
    return list(map(_spec, tf.nest.flatten(element_spec, expand_composites=True)))


def _spec(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _can_be_stacked(flat):
    first = [(part.shape, part.dtype) for part in flat[0]]
    return all([(part.shape, part.dtype) for part in parts] == first for parts in flat)
