"""Leaves out the rows that only fill up the last batch of an evaluation.

Batches of equal size are what replicas share evenly. The data set marks rows by a third
component, a boolean `valid` of shape (B,), in the place of sample weights: True is an example,
False is padding. Padding is taken out before the forward pass, so that no loss and no metric,
weighted or not, can count it.
"""

import keras
import tensorflow as tf


def drop_padding(data):
    """The batch `(x, y, valid)` without its padding, as `(x, y)`; any other batch as it is.

    Args:
        data: one replica's batch as Keras's steps get it. Each tensor of `x` and `y` has the
            batch as its first axis.
    """
    x, y, valid = keras.utils.unpack_x_y_sample_weight(data)
    if not (tf.is_tensor(valid) and valid.dtype == tf.bool and valid.shape.rank == 1):
        return data
    x, y = keras.tree.map_structure(lambda t: tf.boolean_mask(t, valid), (x, y))
    return keras.utils.pack_x_y_sample_weight(x, y)
