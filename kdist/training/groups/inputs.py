"""Inputs of `fit`, `evaluate`, and `predict`, in the form that Keras's data adapters accept.

A dataset may pad its last batch, so that all batches have the same size. It then yields a boolean
vector (B,) in place of the sample weights, False for padding. Padding rows reach no loss, metric,
or prediction.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.tensorflow import first_replica
from kdist.training.parameter_server.feeds import IteratorFeed, PipelineFeed
from kdist.training.replica.row_shares import WorkerSlice
from kdist.training.scopes import has_parameter_servers, is_multi_worker, num_local_replicas


@dataclasses.dataclass(frozen=True)
class SlicedIterator:
    """Iterator over this worker's slices of global batches.

    Attributes:
        iterator: the iterator.
        worker_slice: the `WorkerSlice` that it yields; None if batches are whole.
    """

    iterator: Any
    worker_slice: WorkerSlice | None


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


def training_data(x, steps_per_epoch, start, worker_slice=None):
    """Returns (dataset from batch `start` on, steps per epoch) of a training pipeline."""
    if not x.training:
        raise ValueError(
            "fit received an evaluation pipeline, whose last batch contains padding. Train on the "
            "first pipeline that kdist.data.load returns, and pass this one as validation_data"
        )
    return x.dataset(start, **_slice_argument(worker_slice)), steps_per_epoch or x.steps_per_epoch


def evaluation_data(x, steps, worker_slice=None):
    """Returns (data, steps) for `evaluate` or `predict`; `x` may be a pipeline."""
    if not is_pipeline(x):
        return x, steps
    # A training pipeline is endless; one epoch of it is evaluated.
    return x.dataset(**_slice_argument(worker_slice)), steps or (
        x.steps_per_epoch if x.training else None
    )


def _slice_argument(worker_slice):
    return {"part": (worker_slice.worker, worker_slice.workers)} if worker_slice else {}


def unpack_validation_data(data):
    """Returns `validation_data` as (x, y, sample_weight)."""
    if is_pipeline(data):
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
    return keras.tree.map_structure(lambda tensor: tf.boolean_mask(tensor, valid), tensors)
