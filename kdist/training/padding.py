"""Evaluation counts each example once, though replicas share batches of any size.

Two things come between. A data set may fill up its last batch, so that all have one size: it then
marks rows by a third component, a boolean `valid` of shape (B,) in the place of sample weights,
False for padding. And of a batch that is too small to share, a replica may get no example at all:
TensorFlow's convolutions fail on an empty batch, so the model is shown one row of zeros instead.
Neither kind of row reaches a loss, a metric or a prediction.
"""

import keras
import tensorflow as tf


def split_mask(sample_weight):
    """(valid, sample weights): a boolean vector marks padding, all else is weights."""
    is_mask = (
        tf.is_tensor(sample_weight)
        and sample_weight.dtype == tf.bool
        and sample_weight.shape.rank == 1
    )
    return (sample_weight, None) if is_mask else (None, sample_weight)


def keep_valid(tensors, valid):
    """The rows of each tensor for which `valid` is True; all rows if it is None."""
    if valid is None:
        return tensors
    return keras.tree.map_structure(lambda tensor: tf.boolean_mask(tensor, valid), tensors)


def may_be_empty(x, replicas: int) -> bool:
    """Whether a replica's share of a batch may have no rows, as far as its shape tells."""
    if replicas == 1:
        return False
    tensors = keras.tree.flatten(x)
    are_dense = all(isinstance(tensor, tf.Tensor) and tensor.shape.rank for tensor in tensors)
    return are_dense and any(tensor.shape[0] is None for tensor in tensors)


def call_on_rows(x, call):
    """`call(x)`, where an empty `x` is shown as one row of zeros that is then taken away."""
    first = keras.tree.flatten(x)[0]
    rows = tf.shape(first)[0]
    missing = tf.cast(tf.equal(rows, 0), tf.int32)

    def fill(tensor):
        paddings = [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1)
        return tf.ensure_shape(tf.pad(tensor, paddings), tensor.shape)

    outputs = call(keras.tree.map_structure(fill, x))
    return keras.tree.map_structure(lambda tensor: tensor[:rows], outputs)
