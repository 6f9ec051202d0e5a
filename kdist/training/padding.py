"""A data set may fill up its last batch, so that all batches have one size.

It then marks rows by a third component, a boolean `valid` of shape (B,) in the place of sample
weights, False for padding. No such row reaches a loss, a metric or a prediction.
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
