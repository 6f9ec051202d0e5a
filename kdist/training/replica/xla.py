"""XLA with several replicas: compiles the forward and backward passes, not the collectives."""

import keras
import tensorflow as tf

from kdist.compat.keras import loss_module
from kdist.training.replica import step as steps


def train_step(model, data):
    """Returns the logs of Keras's `train_step`, with forward and backward passes compiled by XLA.

    Raises:
        ValueError: the forward pass contains a collective, as in a synchronized BatchNorm.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    weights = model.trainable_weights

    def forward_and_backward(x, y, sample_weight):
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
            scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
        return loss, y_pred, tape.gradient(scaled, weights)

    loss, y_pred, gradients = _compiled(forward_and_backward)(x, y, sample_weight)
    loss = steps.current().note_mean(loss)  # Keras's losses are, and its graph is hidden
    rows = tf.shape(keras.tree.flatten(x)[0])[0]
    model._loss_tracker.update_state(loss_module.unscale_loss_for_distribution(loss), rows)
    if weights:
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _compiled(function):
    compiled = tf.function(function, jit_compile=True, autograph=False, reduce_retracing=True)

    def call(*args):
        try:
            return compiled(*args)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise ValueError(
                "jit_compile=True (--jit_compile): XLA cannot compile a forward pass in which "
                "replicas meet (a synchronized BatchNorm; gather_batch; a loss that is a mean over "
                "a mask or over sample weights). Omit jit_compile, or make BatchNorm per replica "
                "(sync_batch_norm=False)"
            ) from error

    return call
