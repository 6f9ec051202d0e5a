"""Where Keras, running on one replica, would have to know of the others: it asks the step.

Each hook is a Keras function of the same name that first looks whether a step of kdist runs in
this thread (`kdist.training.step.current`). If none does, which is always so outside of a kdist
model's fit, evaluate and predict, Keras's own function is called, unchanged. The functions are
private to Keras; `kdist.training.keras_internals` lists them and its test fails when one of them
is gone.
"""

import functools

import keras
import tensorflow as tf

from kdist.training import batch_norm
from kdist.training import step as steps
from kdist.training.keras_internals import (
    BaseOptimizer,
    KerasVariable,
    TFOptimizer,
    apply_mask,
    image_module,
    loss_module,
    nn_module,
    random_module,
)
from kdist.training.reduction import all_reduce_sum

# Parts of an optimizer's work that Keras writes once for one device and once for tf.distribute.
_WRITTEN_TWICE = (
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_update_step",
    "_overwrite_model_variables_with_average_value",
)


def hooks():
    """(where, name, the function that is asked instead) of each hook."""
    loss_scale = keras.optimizers.LossScaleOptimizer
    return [
        (loss_module, "scale_loss_for_distribution", _unscaled),
        (loss_module, "unscale_loss_for_distribution", _unscaled),
        (loss_module, "reduce_weighted_values", _reduced),
        (keras.metrics.Mean, "update_state", _mean_update),
        (nn_module, "_compute_moments_sync", _moments),
        (keras.layers.BatchNormalization, "call", _batch_norm),
        (random_module, "draw_seed", _seed),
        (image_module, "draw_seed", _seed),
        (KerasVariable, "_direct_assign", _assign),
        (KerasVariable, "assign_add", _assign_add),
        (KerasVariable, "assign_sub", _assign_sub),
        (BaseOptimizer, "scale_loss", _weigh),
        (BaseOptimizer, "apply", _apply),
        (loss_scale, "scale_loss", _weigh),
        (loss_scale, "apply", _apply),
        (keras.optimizers.MultiOptimizer, "apply", _apply),
        (loss_scale, "_tf_apply", _apply_on_copies),
        (TFOptimizer, "_all_reduce_sum_gradients", _already_reduced),
        *((TFOptimizer, name, _alone(name)) for name in _WRITTEN_TWICE),
    ]


@functools.cache
def install():
    """Puts the hooks into Keras; once a process."""
    for owner, name, hook in hooks():
        _hook(owner, name, hook)
    KerasVariable.handle = property(_handle)


def _hook(owner, name, hook):
    kerass_own = getattr(owner, name)

    @functools.wraps(kerass_own)
    def asked_first(*args, **kwargs):
        step = steps.current()
        if step is None:
            return kerass_own(*args, **kwargs)
        return hook(step, kerass_own, *args, **kwargs)

    setattr(owner, name, asked_first)


# Losses and metrics.


def _unscaled(step, kerass_own, value):
    """Keras divides each replica's mean by the number of replicas; here the mean stays a mean."""
    return value


def _reduced(step, kerass_own, values, sample_weight=None, mask=None, reduction="mean", dtype=None):
    """A loss; where it is not a mean over rows, such that the mean by rows is the batch's own."""
    loss = kerass_own(values, sample_weight, mask, reduction, dtype)
    if loss.shape == (0,) and reduction not in (None, "none"):
        return tf.zeros([], loss.dtype)  # all rows are padding: run eagerly, Keras leaves it as is
    if loss.shape.rank or not tf.convert_to_tensor(values).shape.rank:
        return loss  # it is not reduced, or the loss function has done that itself
    if reduction == "sum":
        return step.correct_sum(loss)
    by_weight = reduction == "mean_with_sample_weight"
    if mask is None and not (by_weight and sample_weight is not None):
        return loss
    divisor = _sum_of_weights(sample_weight, mask, loss.dtype) if by_weight else mask
    return step.correct_mean(loss, tf.reduce_sum(tf.cast(divisor, loss.dtype)), tf.shape(values)[0])


def _sum_of_weights(sample_weight, mask, dtype):
    """What Keras divides by: the weights where the mask lets them through."""
    return apply_mask(sample_weight, mask, dtype=dtype, reduction="mean_with_sample_weight")


def _mean_update(step, kerass_own, metric, values, sample_weight=None):
    """A scalar without a weight is one replica's mean: it weighs as the replica's rows do."""
    if step.rehearses:
        return None
    if sample_weight is None and not tf.convert_to_tensor(values).shape.rank:
        sample_weight = step.of_batch(metric.dtype)
    return kerass_own(metric, values, sample_weight)


# Layers.


def _batch_norm(step, kerass_own, layer, inputs, training=None, mask=None):
    if batch_norm.can_fuse(layer, inputs, training, mask, step.replicas):
        return batch_norm.fused(layer, inputs)
    return kerass_own(layer, inputs, training=training, mask=mask)


def _moments(step, kerass_own, x, axes, keepdims):
    """Mean and variance over all replicas' rows.

    Of each replica's mean and variance, not of sums of squares, whose difference loses half of the
    digits: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm", 1979.
    """
    if step.replicas == 1:
        return tf.nn.moments(x, axes, keepdims=keepdims)
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    share = tf.cast(step.share.of_micro_step, x.dtype)
    (all_mean,) = all_reduce_sum([mean * share])
    (all_variance,) = all_reduce_sum([(variance + tf.square(mean - all_mean)) * share])
    if not keepdims:
        all_mean, all_variance = tf.squeeze(all_mean, axes), tf.squeeze(all_variance, axes)
    return all_mean, all_variance


def _seed(step, kerass_own, seed):
    drawn = kerass_own(seed)
    return step.seed(drawn) if step.seeds_differ else drawn


def _assign(step, kerass_own, variable, value):
    """A counter that TensorFlow would keep on the first replica is kept on each."""
    if step.rehearses:
        return
    step.note_written(variable)
    native = variable._value
    if step.has_copies and _is_kept_on_first_replica(native):
        step.local(native).assign(tf.cast(value, native.dtype))
    else:
        kerass_own(variable, value)


def _assign_add(step, kerass_own, variable, value):
    return step.assign_add(variable, value, kerass_own)


def _assign_sub(step, kerass_own, variable, value):
    negative = -tf.convert_to_tensor(value, variable.dtype)
    return step.assign_add(variable, negative, lambda *_: kerass_own(variable, value))


def _handle(variable):
    """What a gradient tape knows a variable by: its own, or that of the step's copy."""
    step = steps.current()
    return variable.value.handle if step is None else step.handle(variable)


def _is_kept_on_first_replica(native):
    return (
        isinstance(native, tf.distribute.DistributedValues)
        and native.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


# Optimizers.


def _weigh(step, kerass_own, optimizer, loss):
    if step.applying:
        return kerass_own(optimizer, loss)
    return kerass_own(optimizer, step.weigh(loss, optimizer))


def _apply(step, kerass_own, optimizer, grads, trainable_variables=None):
    if step.applying or not len(grads):
        return kerass_own(optimizer, grads, trainable_variables)
    variables = list(trainable_variables or optimizer._trainable_variables)
    if not optimizer.built:
        step.build(optimizer, variables)
    gradients = step.gradients(optimizer, list(grads), variables)
    if gradients is not None:
        step.apply(lambda g: kerass_own(optimizer, g, variables), optimizer, gradients, variables)
    return None


def _apply_on_copies(step, kerass_own, optimizer, grads, trainable_variables=None):
    """The reduced gradients are finite on all replicas or on none: each can decide by itself."""
    apply = step.part_of_update(
        "_tf_apply", keras.optimizers.LossScaleOptimizer._common_apply, kerass_own
    )
    return apply(optimizer, grads, trainable_variables)


def _already_reduced(step, kerass_own, optimizer, grads_and_vars):
    return list(grads_and_vars)


def _alone(name):
    """Keras's own code for one device, in place of that which updates all copies at once."""
    for_one_device = getattr(BaseOptimizer, name)

    def update(step, kerass_own, optimizer, *args, **kwargs):
        act = step.part_of_update(name, for_one_device, kerass_own)
        return act(optimizer, *args, **kwargs)

    return update
