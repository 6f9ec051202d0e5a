"""What fit, evaluate and predict are given, in the form that Keras's data adapters take."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from kdist.tensorflow_internals import first_replica
from kdist.training.share import Part
from kdist.training.together import are_several_workers, replicas_here


@dataclasses.dataclass(frozen=True)
class InParts:
    """An iterator over parts of batches.

    Attributes:
        iterator: gives them.
        part: the `Part` that each of them is; None if they are whole.
    """

    iterator: Any
    part: Part | None


def without_part(iterator):
    """(the iterator itself, the `Part` that its batches are, or None if they are whole)."""
    is_in_parts = isinstance(iterator, InParts)
    return (iterator.iterator, iterator.part) if is_in_parts else (iterator, None)


def part_of(x, strategy) -> Part | None:
    """What this worker reads of each batch of `x`; None if it reads all: it is no pipeline.

    A batch has to have a row for each worker.
    """
    if not is_pipeline(x) or not are_several_workers(strategy):
        return None
    own, rows = replicas_here(strategy), x.batch.global_size
    workers = strategy.num_replicas_in_sync // own
    return Part(first_replica(strategy) // own, workers, rows) if rows >= workers else None


def is_pipeline(x) -> bool:
    """Whether `x` is a pipeline of `kdist.data`, told by what it offers."""
    return hasattr(x, "steps_per_epoch") and callable(getattr(x, "dataset", None))


def training_data(x, steps_per_epoch, start, part=None):
    """(data set from batch number `start` on, steps an epoch) of a training pipeline."""
    if not x.training:
        raise ValueError(
            "fit was given an evaluation pipeline, whose last batch holds padding; train on the "
            "first pipeline that kdist.data.load returns and give this one as validation_data"
        )
    return x.dataset(start, **_rows(part)), steps_per_epoch or x.steps_per_epoch


def evaluation_data(x, steps, part=None):
    """(data, steps) to evaluate or predict on, where `x` may be a pipeline."""
    if not is_pipeline(x):
        return x, steps
    # A training pipeline has no end of its own: one epoch of it is evaluated.
    return x.dataset(**_rows(part)), steps or (x.steps_per_epoch if x.training else None)


def _rows(part):
    return {"part": (part.worker, part.workers)} if part else {}


def unpack(data):
    """`validation_data` as (x, y, sample_weight)."""
    if is_pipeline(data):
        return data, None, None
    return keras.utils.unpack_x_y_sample_weight(data)


def as_float(sample_weight):
    """Boolean weights that the user gives are weights; only a data set marks padding by them."""
    is_boolean = getattr(sample_weight, "dtype", None) in (bool, tf.bool)
    return (
        keras.ops.convert_to_numpy(sample_weight).astype("float32") if is_boolean else sample_weight
    )


def with_open_batch(element_spec):
    """The specification with an unknown batch size, in place of a batch to look at."""

    def open_batch(spec):
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            return None
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    return keras.tree.map_structure(open_batch, element_spec)
