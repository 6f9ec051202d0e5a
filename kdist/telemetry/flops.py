"""Floating-point operations of a model, counted from its graph.

training_flops(model)     # of forward and backward pass, for one example
"""

import keras
import tensorflow as tf

# The backward pass computes two products for each one of the forward pass: the gradient of its
# input and that of its weights (Kaplan et al. 2020, section 2.1).
_TRAINING = 3


def training_flops(model: keras.Model) -> float | None:
    """Those of forward and backward pass for one example; None where they cannot be counted.

    A multiplication and an addition are two. Counted are the operations that TensorFlow has
    statistics for, the products and convolutions among them.

    Args:
        model: a built model with inputs of known shapes but for the batch.
    """
    try:
        inputs = keras.tree.map_structure(
            lambda x: tf.TensorSpec([1, *x.shape[1:]], x.dtype), model.inputs
        )
        graph = (
            tf.function(lambda *x: model(list(x) if len(x) > 1 else x[0], training=False))
            .get_concrete_function(*inputs)
            .graph
        )
        options = tf.compat.v1.profiler.ProfileOptionBuilder
        counted = tf.compat.v1.profiler.profile(
            graph, options=options(options.float_operation()).with_empty_output().build()
        )
    except (AttributeError, TypeError, ValueError):  # a model of one's own, of unknown inputs
        return None
    return float(counted.total_float_ops) * _TRAINING or None
