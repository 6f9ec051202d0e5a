"""Hooks for the Keras functions that need cross-replica behavior.

Each hook replaces a function of Keras, or of TensorFlow's gradient tape, of the same name. It first
checks whether a step of kdist runs in this thread (`kdist.training.replica.step.current`). If not,
as always outside a kdist model's `fit`, `evaluate`, and `predict`, it calls the original function.
Most of these functions are private: `tests/compat/test_keras.py` fails if one of them changes.

Three hooks act outside of steps: models are saved outside a multi-worker scope, optimizers are
built outside of replicas, and a gradient that is taken between replicas raises a clear error.
"""

import functools
import pathlib
import traceback

import keras
import tensorflow as tf

from kdist.compat.keras import (
    BaseOptimizer,
    KerasVariable,
    TFOptimizer,
    apply_mask,
    export_module,
    image_module,
    legacy_h5_format,
    loss_module,
    nn_module,
    random_module,
    saving_lib,
)
from kdist.compat.tensorflow import convert_variables_to_numbers, unpartitioned
from kdist.training.replica import batch_norm, own_metrics, unseeded
from kdist.training.replica import step as steps
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.scopes import outside_multi_worker_scope

# Optimizer methods that Keras implements once for one device and once for tf.distribute.
_IMPLEMENTED_TWICE = (
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_update_step",
    "_overwrite_model_variables_with_average_value",
)


# Methods of layers that read or write `Layer._losses`.
_METHODS_ON_LOSSES = ("add_loss", "_get_own_losses", "_clear_losses")

# Functions that save a model. Any other way to save it, such as pickle, calls one of them.
SAVING = (
    (saving_lib, "save_model"),
    (saving_lib, "_save_model_to_fileobj"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (export_module, "export_saved_model"),
)


def hooks():
    """Returns (owner, name, replacement) of each hook."""
    loss_scale = keras.optimizers.LossScaleOptimizer
    return [
        (loss_module, "scale_loss_for_distribution", _unscaled),
        (loss_module, "unscale_loss_for_distribution", _unscaled),
        (loss_module, "reduce_weighted_values", _reduced),
        (keras.metrics.Mean, "update_state", _mean_update),
        (nn_module, "_compute_moments_sync", _moments),
        (keras.layers.BatchNormalization, "call", _batch_norm),
        (keras.layers.BatchNormalization, "_moments", _masked_moments),
        *((keras.layers.Layer, name, _on_own_losses) for name in _METHODS_ON_LOSSES),
        (random_module, "draw_seed", _seed),
        (image_module, "draw_seed", _seed),
        (KerasVariable, "_direct_assign", _assign),
        (KerasVariable, "assign_add", _assign_add),
        (KerasVariable, "assign_sub", _assign_sub),
        (tf.GradientTape, "gradient", _tape_gradient),
        (tf.nn, "compute_average_loss", _average_loss),
        (tf.nn, "scale_regularization_loss", _regularization_loss),
        (BaseOptimizer, "scale_loss", _scale_loss),
        (BaseOptimizer, "apply", _apply),
        (loss_scale, "scale_loss", _scale_loss),
        (loss_scale, "apply", _apply),
        (keras.optimizers.MultiOptimizer, "apply", _apply),
        (loss_scale, "_tf_apply", _apply_on_copies),
        (TFOptimizer, "_all_reduce_sum_gradients", _already_reduced),
        *((TFOptimizer, name, _per_replica(name)) for name in _IMPLEMENTED_TWICE),
    ]


@functools.cache
def install():
    """Installs the hooks in Keras, once per process."""
    for name in ("gradient", "watch"):
        setattr(tf.GradientTape, name, _explaining(getattr(tf.GradientTape, name)))
    for owner, name, hook in hooks():
        _hook(owner, name, hook)
    KerasVariable.handle = property(_handle)
    convert_variables_to_numbers()
    KerasVariable._initialize = _whole(KerasVariable._initialize)
    for owner, name in SAVING:
        setattr(owner, name, _saving_alone(getattr(owner, name)))


def _hook(owner, name, hook):
    keras_function = getattr(owner, name)
    prepare = _build_first if name == "apply" else None

    @functools.wraps(keras_function)
    def hooked(*args, **kwargs):
        step = steps.current()
        if step is None:
            if prepare is not None:
                prepare(*args, **kwargs)
            return keras_function(*args, **kwargs)
        return hook(step, keras_function, *args, **kwargs)

    setattr(owner, name, hooked)


# Outside of steps.


def _saving_alone(keras_function):
    @functools.wraps(keras_function)
    def saving_alone(*args, **kwargs):
        return outside_multi_worker_scope(functools.partial(keras_function, *args, **kwargs))

    return saving_alone


def _whole(initialize):
    """Returns `initialize` of variables, without partitions: Keras requires whole variables."""

    @functools.wraps(initialize)
    def whole(variable, value):
        with unpartitioned(tf.distribute.get_strategy()):
            return initialize(variable, value)

    return whole


# Losses and metrics.


def _unscaled(step, keras_function, value):
    """Leaves a replica's mean as it is, where Keras divides it by the number of replicas."""
    return value


def _average_loss(step, function, per_example_loss, sample_weight=None, global_batch_size=None):
    """Returns a replica's mean, where TensorFlow divides it by the number of replicas."""
    if global_batch_size is None:
        global_batch_size = tf.shape(per_example_loss)[0]
    return function(per_example_loss, sample_weight, global_batch_size)


def _regularization_loss(step, function, regularization_loss):
    """Returns the sum of losses that do not depend on rows, and whose mean over replicas counts."""
    return tf.reduce_sum(regularization_loss)


def _reduced(
    step, keras_function, values, sample_weight=None, mask=None, reduction="mean", dtype=None
):
    """Returns a loss, corrected for the mean over replicas if it is not a mean over rows."""
    loss = keras_function(values, sample_weight, mask, reduction, dtype)
    if step.is_whole_loss:
        return loss if loss.shape.rank else step.note_mean(loss)
    if loss.shape == (0,) and reduction not in (None, "none"):
        return tf.zeros([], loss.dtype)  # all rows are padding: Keras does not reduce it eagerly
    values = tf.convert_to_tensor(values)
    has_rows = values.shape.rank and (mask is not None or step.has_rows(values))
    if not has_rows and not loss.shape.rank:
        return step.as_mean(loss)  # reduced over rows by the loss function
    step.report_mixed_rows(values)
    if loss.shape.rank:
        return loss  # not reduced
    by_weight = reduction == "mean_with_sample_weight"
    if reduction == "sum":
        loss = step.correct_sum(loss)
    elif mask is not None or (by_weight and sample_weight is not None):
        divisor = _sum_of_weights(sample_weight, mask, loss.dtype) if by_weight else mask
        divisor = tf.reduce_sum(tf.cast(divisor, loss.dtype))
        loss = step.correct_mean(loss, divisor, tf.shape(values)[0])
    return step.note_mean(loss)


def _sum_of_weights(sample_weight, mask, dtype):
    """Returns the weights that the mask keeps, whose sum is Keras's divisor."""
    return apply_mask(sample_weight, mask, dtype=dtype, reduction="mean_with_sample_weight")


def _mean_update(step, keras_function, metric, values, sample_weight=None):
    """Updates a mean; a scalar without weight is one replica's mean and is weighted by its rows."""
    if step.is_dry_run:
        return step.note_use([values])
    values = tf.convert_to_tensor(values)
    if isinstance(sample_weight, int) and not tf.executing_eagerly():
        # Keras weights an output's loss by its rows where they are static. On one device those of
        # `fit` are not, so each batch counts once.
        rows = step.share.micro_rows if step.is_whole_loss else step.share.rows
        sample_weight = None if sample_weight == rows else sample_weight
    if step.is_whole_loss:  # an output's loss, which counts once for all replicas
        weight = 1 if sample_weight is None else sample_weight
        sample_weight = tf.cast(weight, metric.dtype) * step.batch_fraction(metric.dtype)
    elif sample_weight is None and not (values.shape.rank and step.has_rows(values)):
        number = tf.cast(tf.size(values), metric.dtype)  # such as one value per class
        values = step.as_mean(tf.reduce_mean(tf.cast(values, metric.dtype)), is_loss=False)
        sample_weight = number * step.batch_fraction(metric.dtype)
    with step.with_keras_metrics():
        return keras_function(metric, values, sample_weight)


# Layers.


def _batch_norm(step, keras_function, layer, inputs, training=None, mask=None):
    if batch_norm.can_fuse(layer, inputs, training, mask, step.replicas):
        return step.note_layer(batch_norm.fused(layer, inputs))
    return step.note_layer(keras_function(layer, inputs, training=training, mask=mask))


def _on_own_losses(step, keras_function, layer, *args):
    """Calls a method of a layer with the losses that were added on this replica.

    Keras keeps one list. After an all-reduce, it would hold the losses of the last replica.
    """
    shared = layer._losses
    layer.__dict__["_losses"] = step.added.setdefault(id(layer), [])
    try:
        return keras_function(layer, *args)
    finally:
        layer.__dict__["_losses"] = shared


def _moments(step, keras_function, x, axes, keepdims):
    """Returns mean and variance over the rows of all replicas.

    They are combined from each replica's mean and variance. A difference of sums of squares would
    lose half of the digits: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm",
    1979.
    """
    if step.replicas == 1:
        return tf.nn.moments(x, axes, keepdims=keepdims)
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    share = tf.cast(step.share.micro_step_fraction, x.dtype)
    all_mean = step.note_mean(*all_reduce_sum([mean * share]))
    squares = variance + tf.square(mean - all_mean)
    all_variance = step.note_mean(*all_reduce_sum([squares * share]))
    if not keepdims:
        all_mean, all_variance = tf.squeeze(all_mean, axes), tf.squeeze(all_variance, axes)
    return all_mean, all_variance


def _masked_moments(step, keras_function, layer, inputs, mask):
    """Returns the moments of values that a mask keeps. Keras never synchronizes these."""
    if mask is None or not layer.synchronized or step.replicas == 1:
        return keras_function(layer, inputs, mask)
    has_rows = tf.cast(step.share.micro_step_fraction, inputs.dtype) > 0
    kept = tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs))
    kept = tf.logical_and(tf.cast(kept, "bool"), has_rows)

    def sum_of(values):
        return tf.reduce_sum(values, layer._reduction_axes, keepdims=True)

    total = sum_of(tf.where(kept, inputs, 0))
    total, number = all_reduce_sum([total, sum_of(tf.cast(kept, inputs.dtype))])
    number += keras.config.epsilon()
    mean = step.note_mean(total / number)
    difference = tf.where(kept, inputs - mean, 0)
    (squares,) = all_reduce_sum([sum_of(tf.square(difference))])
    return tf.squeeze(mean), tf.squeeze(step.note_mean(squares / number))


def _seed(step, keras_function, seed):
    drawn = unseeded.draw(keras_function, seed)
    return step.seed(drawn) if step.seeds_differ else drawn


def _assign(step, keras_function, variable, value):
    """Assigns a variable; counters that TensorFlow keeps on the first replica are kept on each."""
    if step.is_dry_run:
        return step.note_use([value])
    if metric := step.own_metrics.get(id(variable)):
        value = own_metrics.corrected(step, metric, variable, value)
    step.note_written(variable)
    native = variable._value
    if step.has_copies and _is_kept_on_first_replica(native):
        step.local(native).assign(tf.cast(value, native.dtype))
    else:
        keras_function(variable, value)
    return None


def _assign_add(step, keras_function, variable, value):
    return step.assign_add(variable, value, keras_function)


def _assign_sub(step, keras_function, variable, value):
    negative = -tf.convert_to_tensor(value, variable.dtype)
    return step.assign_add(variable, negative, lambda *_: keras_function(variable, value))


def _handle(variable):
    """Returns the handle by which a gradient tape identifies a variable: its own or its copy's."""
    step = steps.current()
    if step is not None:
        return step.handle(variable)
    try:
        return variable.value.handle
    except ValueError as error:
        if not tf.distribute.in_cross_replica_context():
            raise
        raise _on_no_replica(repr(variable.path)) from error


def _explaining(method):
    """Returns a method of a tape whose error about variables of TensorFlow says what to write."""

    @functools.wraps(method)
    def explaining(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except ValueError as error:
            is_known = "outside the replica context" in str(error)
            if not (is_known and tf.distribute.in_cross_replica_context()):
                raise
            raise _on_no_replica("a tf.Variable") from error

    return explaining


def _on_no_replica(variable):
    strategy = tf.distribute.get_strategy()
    return ValueError(
        f"{_users_line()}: a gradient with respect to {variable} is computed in the scope of "
        f"{type(strategy).__name__}, but on none of its {strategy.num_replicas_in_sync} replicas, "
        "which have a copy each. Call the step with `strategy.run(step, args=(x, y))` in a "
        "`tf.function`, on the batches of `strategy.experimental_distribute_dataset(dataset)`. Or "
        "override `train_step` of the model, and call `fit`. What one device computes, such as an "
        "image that is optimized, belongs outside of the scope"
    )


def _users_line():
    """Returns the file and line of the program that called TensorFlow, Keras, or kdist."""
    packages = [pathlib.Path(module.__file__).parent for module in (tf, keras)]
    packages.append(pathlib.Path(__file__).parents[2])
    for frame in reversed(traceback.extract_stack()):
        path = pathlib.Path(frame.filename)
        is_users = not any(path.is_relative_to(package) for package in packages)
        if is_users and not path.name.startswith("__autograph_generated"):
            return f"{frame.filename}:{frame.lineno}"
    return "this program"


def _is_kept_on_first_replica(native):
    return (
        isinstance(native, tf.distribute.DistributedValues)
        and native.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


# Optimizers.


def _build_first(optimizer, grads, trainable_variables=None):
    """Builds an optimizer outside of the replicas, before a program's own loop calls `apply`.

    Keras creates its variables within the replicas. If a `tf.function` calls them, TensorFlow may
    put its first call into a `tf.cond`, where collectives fail. Outside of the scope in which the
    optimizer was created, Keras cannot create them at all.
    """
    if not optimizer.built and isinstance(trainable_variables, list | tuple):
        _build(optimizer, list(trainable_variables))


def _build(optimizer, variables):
    def build(strategy):
        with tf.init_scope(), strategy.scope():
            optimizer.build(variables)

    strategy, replica = tf.distribute.get_strategy(), tf.distribute.get_replica_context()
    if not tf.distribute.has_strategy():
        own = optimizer._distribution_strategy
        if own is not strategy:
            build(own)
    elif replica is None:
        build(strategy)
    else:
        replica.merge_call(build)


def _scale_loss(step, keras_function, optimizer, loss):
    if step.applying:
        return keras_function(optimizer, loss)
    return keras_function(optimizer, step.scale_loss(loss, optimizer))


def _tape_gradient(
    step, keras_function, tape, target, sources, output_gradients=None, unconnected_gradients=None
):
    unconnected_gradients = unconnected_gradients or tf.UnconnectedGradients.NONE

    def gradient(target, sources, output_gradients):
        return keras_function(tape, target, sources, output_gradients, unconnected_gradients)

    if step.applying:
        return gradient(target, sources, output_gradients)
    if output_gradients is not None:
        found = gradient(target, sources, output_gradients)
        return step.product_gradient(found, target, sources, output_gradients)
    return step.tape_gradient(gradient, target, sources)


def _apply(step, keras_function, optimizer, grads, trainable_variables=None):
    if step.applying or not len(grads):
        return keras_function(optimizer, grads, trainable_variables)
    variables = list(trainable_variables or optimizer._trainable_variables)
    if not optimizer.built:
        step.build(optimizer, variables)
    gradients = step.gradients(optimizer, list(grads), variables)
    if gradients is not None:
        step.apply(
            lambda g: keras_function(optimizer, g, variables), optimizer, gradients, variables
        )
    return None


def _apply_on_copies(step, keras_function, optimizer, grads, trainable_variables=None):
    """Decides on each replica: the reduced gradients are finite on all replicas or on none."""
    apply = step.optimizer_method(
        "_tf_apply", keras.optimizers.LossScaleOptimizer._common_apply, keras_function
    )
    return apply(optimizer, grads, trainable_variables)


def _already_reduced(step, keras_function, optimizer, grads_and_vars):
    return list(grads_and_vars)


def _per_replica(name):
    """Returns a hook with Keras's code for one device instead of that which updates all copies."""
    for_one_device = getattr(BaseOptimizer, name)

    def update(step, keras_function, optimizer, *args, **kwargs):
        act = step.optimizer_method(name, for_one_device, keras_function)
        return act(optimizer, *args, **kwargs)

    return update
