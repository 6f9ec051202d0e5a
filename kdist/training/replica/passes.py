"""Forward and backward passes that are a function of their own, without collectives.

XLA compiles such a function, as it cannot compile collectives. Or all replicas of a process call
the one that the first of them traced (`kdist.training.replica.shared_trace`).
"""

import keras
import tensorflow as tf

from kdist.compat.keras import loss_module
from kdist.training.replica import step as steps
from kdist.training.replica.shared_trace import NotSharedError


def train_step(model, data, call):
    """Returns the logs of Keras's `train_step`, whose forward and backward passes are a function.

    Args:
        model: the model.
        data: this replica's rows of a batch.
        call: function of the passes and their arguments, such as `compiled`.
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

    loss, y_pred, gradients = call(forward_and_backward, x, y, sample_weight)
    rows = tf.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
    model._loss_tracker.update_state(loss_module.unscale_loss_for_distribution(loss), rows)
    if weights:
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def shared(function, *args):
    """Returns the outputs of forward and backward passes in a trace that replicas share.

    Raises:
        NotSharedError: the replica has to trace them itself.
    """

    def checked(*args):
        loss, *others = function(*args)
        if not steps.current().dependence.is_mean_or_sum(loss):
            raise NotSharedError("a loss that is neither a mean nor a sum is known by its graph")
        return loss, *others

    step = steps.current()
    return step.shared_trace.call(step, "passes", checked, *args)


def compiled(function, *args):
    """Returns the outputs of forward and backward passes, compiled by XLA.

    Raises:
        ValueError: they contain a collective, as in a synchronized BatchNorm.
    """
    try:
        loss, *others = tf.function(
            function, jit_compile=True, autograph=False, reduce_retracing=True
        )(*args)
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise ValueError(
            "jit_compile=True (--jit_compile): XLA cannot compile a forward pass in which "
            "replicas meet (a synchronized BatchNorm; gather_batch; a loss that is a mean over "
            "a mask or over sample weights). Omit jit_compile, or make BatchNorm per replica "
            "(sync_batch_norm=False)"
        ) from error
    return steps.current().note_mean(loss), *others  # Keras's losses are, and its graph is hidden
