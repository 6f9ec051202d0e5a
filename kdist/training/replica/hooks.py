"""Hooks for the Keras functions that need cross-replica behavior.

Each hook replaces a function of Keras, or of TensorFlow's gradient tape, of the same name. It first
checks whether a step of kdist runs in this thread (`kdist.training.replica.step.current`). If not,
as always outside a kdist model's `fit`, `evaluate`, and `predict`, it calls the original function.
Most of these functions are private: `tests/compat/test_keras.py` fails if one of them changes.

Some hooks act outside of steps: optimizers are built outside of replicas, gradients and functions
of SavedModels between replicas are those of one device, and a program that clears Keras's session
stays in its scope.
"""

import functools
import pathlib
import re
import traceback
import warnings
import weakref

import keras
import tensorflow as tf

from kdist.compat.keras import (
    MULTI_OPTIMIZERS,
    BaseOptimizer,
    KerasVariable,
    TFOptimizer,
    apply_mask,
    image_module,
    keras_variable_of,
    loss_module,
    nn_module,
    random_module,
)
from kdist.compat.tensorflow import (
    DistributedVariable,
    MirroredVariable,
    ResourceVariable,
    by_autograph,
    call_loaded_functions_between_replicas,
    convert_variables_to_numbers,
    find_handles_between_replicas,
    is_compiled,
    keep_scopes,
    merge_between_replicas,
    slice_variables_between_replicas,
    unpartitioned,
    variable_of_copy,
    with_sizes,
)
from kdist.training import recompute, saving
from kdist.training.replica import batch_norm, own_metrics, unseeded
from kdist.training.replica import step as steps
from kdist.training.replica.dependence import row_count
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.scopes import is_multi_worker
from kdist.training.sharding import weights
from kdist.training.sharding.optimizer_state import OptimizerShards, shards_of, weights_of

# Optimizer methods that Keras implements once for one device and once for tf.distribute.
_IMPLEMENTED_TWICE = (
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_update_step",
    "_overwrite_model_variables_with_average_value",
)


# Strategies whose programs have been told that they take gradients outside of replicas.
_WARNED: weakref.WeakSet = weakref.WeakSet()

# Other methods of layers that read or write `Layer._losses`.
_METHODS_ON_LOSSES = ("_get_own_losses", "_clear_losses")

# Layers each of whose outputs follows from one row, which their operations do not show.
_RECURRENT = (keras.layers.Bidirectional, keras.layers.RNN)
_BY_ROW = (keras.layers.BatchNormalization, keras.layers.TimeDistributed, *_RECURRENT)

# Methods of `SwapEMAWeights` that exchange weights with their moving averages.
_METHODS_ON_AVERAGES = {
    "_tf_swap_variables": OptimizerShards.swap_averages,
    "_tf_finalize_ema_values": OptimizerShards.reset_averages,
}

# Functions of `keras.random` whose first argument is a shape.
_OF_SHAPE = ("beta", "binomial", "gamma", "normal", "randint", "truncated_normal", "uniform")

# oneDNN computes 16 channels at a time with AVX-512, and 8 with AVX2.
_FEW_CHANNELS = 16
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")

# Methods of variables that change some rows, and the functions of their whole values.
_SCATTERS = {
    "scatter_add": tf.tensor_scatter_nd_add,
    "scatter_max": tf.tensor_scatter_nd_max,
    "scatter_min": tf.tensor_scatter_nd_min,
    "scatter_sub": tf.tensor_scatter_nd_sub,
    "scatter_update": tf.tensor_scatter_nd_update,
}
_SCATTERS_ND = {
    "scatter_nd_add": tf.tensor_scatter_nd_add,
    "scatter_nd_sub": tf.tensor_scatter_nd_sub,
    "scatter_nd_update": tf.tensor_scatter_nd_update,
}


def hooks():
    """Returns (owner, name, replacement) of each hook."""
    loss_scale = keras.optimizers.LossScaleOptimizer
    return [
        (loss_module, "scale_loss_for_distribution", _unscaled),
        (loss_module, "unscale_loss_for_distribution", _unscaled),
        (loss_module, "reduce_weighted_values", _reduced),
        (keras.ops, "shape", _shape),
        (tf, "shape", _not_folded(tf.raw_ops.Shape)),
        (tf, "size", _not_folded(tf.raw_ops.Size)),
        (tf, "constant", _constant),
        (tf, "convert_to_tensor", _converted),
        (tf, "stack", _stacked),
        (keras.metrics.Mean, "update_state", _mean_update),
        (keras.metrics.Sum, "update_state", _sum_update),
        (nn_module, "conv", _conv),
        (nn_module, "_compute_moments_sync", _moments),
        (keras.layers.Layer, "__call__", _layer),
        (type(tf.function(len)), "__call__", _function),
        (keras.layers.BatchNormalization, "call", _batch_norm),
        (keras.layers.BatchNormalization, "_moments", _masked_moments),
        (keras.layers.Layer, "add_loss", _add_loss),
        *((keras.layers.Layer, name, _on_own_losses) for name in _METHODS_ON_LOSSES),
        *((random_module, name, _random) for name in _OF_SHAPE),
        (random_module, "draw_seed", _seed),
        (image_module, "draw_seed", _seed),
        (KerasVariable, "_direct_assign", _assign),
        (KerasVariable, "assign_add", _assign_add),
        (KerasVariable, "assign_sub", _assign_sub),
        *((DistributedVariable, name, _assign_raw) for name in _ASSIGNMENTS),
        *((ResourceVariable, name, _assign_raw_alone) for name in _ASSIGNMENTS),
        *((MirroredVariable, method, _scatter(method)) for method in _SCATTERS),
        (ResourceVariable, "_strided_slice_assign", _assign_slice),
        (tf.GradientTape, "gradient", _tape_gradient),
        (tf.GradientTape, "watch", _tape_watch),
        (tf.nn, "compute_average_loss", _average_loss),
        (tf.nn, "ctc_loss", _ctc_loss),
        (tf.compat.v1.nn, "ctc_loss", _ctc_loss),
        (tf.nn, "scale_regularization_loss", _regularization_loss),
        (BaseOptimizer, "scale_loss", _scale_loss),
        (BaseOptimizer, "apply", _apply),
        (BaseOptimizer, "_clip_gradients", _clip),
        (loss_scale, "scale_loss", _scale_loss),
        (loss_scale, "apply", _apply),
        (loss_scale, "check_finite", _check_finite),
        *((each, "apply", _apply) for each in MULTI_OPTIMIZERS),
        (loss_scale, "_tf_apply", _apply_on_copies),
        (TFOptimizer, "_all_reduce_sum_gradients", _already_reduced),
        *((TFOptimizer, name, _per_replica(name)) for name in _IMPLEMENTED_TWICE),
    ]


@functools.cache
def install():
    """Installs the hooks in Keras, once per process."""
    for owner, name, hook in hooks():
        _hook(owner, name, hook)
    KerasVariable.handle = property(_handle)
    tf.Tensor.shape = property(_with_row_counts(tf.Tensor.shape.fget))
    tf.Tensor.get_shape = _with_row_counts(tf.Tensor.get_shape)
    for method in _SCATTERS_ND:
        setattr(MirroredVariable, method, _scatter_nd(method))
    slice_variables_between_replicas()
    convert_variables_to_numbers()
    find_handles_between_replicas(_check_gradient_between_replicas)
    call_loaded_functions_between_replicas()
    keep_scopes()
    tf.recompute_grad = recompute.recompute_grad
    merge_between_replicas()
    KerasVariable._initialize = _whole(KerasVariable._initialize)
    key_of = TFOptimizer._var_key
    TFOptimizer._var_key = lambda self, variable: key_of(self, weights.stored(variable))
    BaseOptimizer._use_weight_decay = _as_on_one_device(BaseOptimizer._use_weight_decay)
    TFOptimizer.add_variable_from_reference = _whole_slots(TFOptimizer.add_variable_from_reference)
    for name, of_shards in _METHODS_ON_AVERAGES.items():
        method = getattr(keras.callbacks.SwapEMAWeights, name)
        setattr(keras.callbacks.SwapEMAWeights, name, _on_shards(method, of_shards))
    saving.install()


def _hook(owner, name, hook):
    keras_function = getattr(owner, name)
    outside = _OUTSIDE_OF_STEPS.get(name)

    @functools.wraps(keras_function)
    def hooked(*args, **kwargs):
        step = steps.current()
        if step is not None:
            return hook(step, keras_function, *args, **kwargs)
        if outside is not None:
            return outside(keras_function, *args, **kwargs)
        return keras_function(*args, **kwargs)

    setattr(owner, name, hooked)


# Outside of steps.


def _as_on_one_device(use_weight_decay):
    """Returns Keras's `_use_weight_decay`, which finds a weight by the name it has on one device.

    `exclude_from_weight_decay(var_names=…)` searches the names of TensorFlow's variables, such as
    `norm/scale:0`. In kdist's steps, the optimizer passes variables of Keras, such as `scale`. A
    part of a divided layer's weight is `up/shard_0/kernel:0`.
    """

    @functools.wraps(use_weight_decay)
    def as_on_one_device(optimizer, variable):
        if isinstance(variable, KerasVariable):
            variable = weights.stored(variable)._value
        pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
        name = re.sub(r"/shard_\d+/", "/", variable.name)
        if pattern is not None and re.search(pattern, name):
            return False
        return use_weight_decay(optimizer, variable)

    return as_on_one_device


def _on_shards(keras_function, of_shards):
    """Returns a method of a callback that passes sharded optimizers to `of_shards`."""

    @functools.wraps(keras_function)
    def on_shards(callback, optimizer):
        shards = shards_of(optimizer)
        return keras_function(callback, optimizer) if shards is None else of_shards(shards)

    return on_shards


def _whole(initialize):
    """Returns `initialize` of variables, without partitions: Keras requires whole variables."""

    @functools.wraps(initialize)
    def whole(variable, value):
        strategy = tf.distribute.get_strategy()
        if variable.dtype in ("int8", "uint8") and is_multi_worker(strategy):
            raise ValueError(
                f"{variable.path!r} has type {variable.dtype}, as quantized models do, and "
                "TensorFlow does not send this type between workers. Quantize the model outside of "
                "the scope, after the training"
            )
        if not weights.initialize(variable, value):
            with unpartitioned(strategy):
                initialize(variable, value)

    return whole


def _whole_slots(add):
    """Returns a method that creates slots of divided weights without a place next to the weight.

    For optimizers that a program builds before it compiles a model, which divides them.
    """

    @functools.wraps(add)
    def add_slot(optimizer, reference_variable, *args, **kwargs):
        is_divided = isinstance(reference_variable, weights.ShardedVariable)
        create = BaseOptimizer.add_variable_from_reference if is_divided else add
        return create(optimizer, reference_variable, *args, **kwargs)

    return add_slot


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
    if not step.is_whole_loss:
        values, sample_weight = map(step.scaled_by_rows_of_batch, (values, sample_weight))
    loss = keras_function(values, sample_weight, mask, reduction, dtype)
    step.check_loss(values, sample_weight, mask)
    if step.is_whole_loss:
        return loss if loss.shape.rank else step.note_mean(loss)
    if loss.shape == (0,) and reduction not in (None, "none"):
        return tf.zeros([], loss.dtype)  # all rows are padding: Keras does not reduce it eagerly
    values = tf.convert_to_tensor(values)
    has_rows = bool(values.shape.rank) and (mask is not None or step.dependence.has_rows(values))
    # Not of the loss: Keras divides a mask by its mean.
    mixes_rows = any(map(step.mixes_rows, (values, sample_weight, mask)))
    mixes_rows |= has_rows and (step.is_scaled_by_rows(values) or step.are_some_rows(values))
    if not loss.shape.rank and (not has_rows or mixes_rows):
        return step.as_mean(loss)  # not a mean over rows, each of which has its own value
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
        is_of_rows = isinstance(rows, int) and sample_weight == rows
        sample_weight = None if is_of_rows else sample_weight
    if step.is_whole_loss:  # an output's loss, which counts once for all replicas
        weight = 1 if sample_weight is None else sample_weight
        sample_weight = tf.cast(weight, metric.dtype) * step.batch_fraction(metric.dtype)
    elif not values.shape.rank:  # such as a loss, perhaps weighted by its rows
        values = step.as_mean(tf.cast(values, metric.dtype), is_loss=False)
        if sample_weight is None:
            sample_weight = step.batch_fraction(metric.dtype)
    else:
        values = step.scaled_by_rows_of_batch(tf.cast(values, metric.dtype))
        sample_weight = step.scaled_by_rows_of_batch(sample_weight)
        is_of_rows = step.dependence.begins_with_rows(values)
        if sample_weight is None and (step.mixes_rows(values) or not is_of_rows):
            number = tf.cast(tf.shape(values)[0], metric.dtype)
            values = step.as_mean(tf.reduce_mean(values), is_loss=False)
            # The replicas' rows add up. Others, such as one value per class, are equal on all.
            sample_weight = number if is_of_rows else number * step.batch_fraction(metric.dtype)
    with step.with_keras_metrics():
        return keras_function(metric, values, sample_weight)


def _sum_update(step, keras_function, metric, values, sample_weight=None):
    """Updates a sum; a scalar that is no sum over rows, such as a mean loss, is added once."""
    values = tf.convert_to_tensor(values)
    if not (values.shape.rank or step.is_dry_run or tf.executing_eagerly()):
        mean = step.as_mean(tf.cast(values, metric.dtype), is_loss=False)
        values = tf.math.multiply_no_nan(mean, step.batch_fraction(metric.dtype))
    elif values.shape.rank:
        values = step.scaled_by_rows_of_batch(tf.cast(values, metric.dtype))
        sample_weight = step.scaled_by_rows_of_batch(sample_weight)
    return keras_function(metric, values, sample_weight)


def _ctc_loss(step, function, labels, *args, **options):
    """Records that each value of a CTC loss follows from one row, which its loops do not show."""
    loss = function(labels, *args, **options)
    logits = [options.get("logits"), options.get("inputs"), *args]
    return step.dependence.note_value_of_each_row(next(x for x in logits if x is not None), loss)


# Layers.


def _batch_norm(step, keras_function, layer, inputs, training=None, mask=None):
    with step.normalizing():
        if batch_norm.can_fuse(layer, inputs, training, mask, step.replicas):
            return batch_norm.fused(layer, inputs)
        return keras_function(layer, inputs, training=training, mask=mask)


def _layer(step, keras_function, layer, *args, **kwargs):
    outputs = keras_function(layer, *args, **kwargs)
    if isinstance(layer, _BY_ROW):
        parts = [type(part).__module__ for part in layer._flatten_layers()]
        is_of_keras = all(module.startswith("keras.") for module in parts)
        step_axis = 1 if isinstance(layer, _RECURRENT) else None
        step.dependence.note_layer([args, kwargs], outputs, is_of_keras, step_axis)
    return outputs


def _function(step, call, function, *args, **kwargs):
    """Calls a `tf.function` of the program as Python, because it has a graph of its own.

    Replicas cannot meet in there, and what it computes would be hidden.
    """
    if tf.executing_eagerly() or is_compiled(function):
        return call(function, *args, **kwargs)
    return by_autograph(function)(*args, **kwargs)


def _add_loss(step, keras_function, layer, loss):
    recompute.check_adds_no_loss()
    _on_own_losses(step, keras_function, layer, loss)


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


def _conv(step, keras_function, inputs, kernel, strides=1, padding="valid", *others, **options):
    """Computes a strided convolution by a 1 × 1 kernel from the pixels that it keeps.

    With few channels and one thread per operation, oneDNN's gradient of the kernel writes beyond
    its memory, and the process dies: https://github.com/uxlfoundation/oneDNN/issues/6035.
    """
    *sizes, channels, _ = kernel.shape
    data_format = others[0] if others else options.get("data_format")
    is_last = (data_format or keras.config.image_data_format()) == "channels_last"
    if is_last and set(sizes) == {1} and channels < _FEW_CHANNELS and strides != 1:
        each = [strides] * len(sizes) if isinstance(strides, int) else strides
        inputs = inputs[(slice(None), *(slice(None, None, stride) for stride in each))]
        strides = 1
    return keras_function(inputs, kernel, strides, padding, *others, **options)


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
    all_mean = step.note_mean(*step.add_up([mean * share], all_reduce_sum))
    squares = variance + tf.square(mean - all_mean)
    all_variance = step.note_mean(*step.add_up([squares * share], all_reduce_sum))
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
    total, number = step.add_up([total, sum_of(tf.cast(kept, inputs.dtype))], all_reduce_sum)
    number += keras.config.epsilon()
    mean = step.note_mean(total / number)
    difference = tf.where(kept, inputs - mean, 0)
    (squares,) = step.add_up([sum_of(tf.square(difference))], all_reduce_sum)
    return tf.squeeze(mean), tf.squeeze(step.note_mean(squares / number))


class _SeedOfConstant(int):
    """Seed of random numbers that are equal in all steps and on all replicas."""


def _random(step, keras_function, shape, *args, seed=None, **kwargs):
    """Draws random numbers: with an integer as seed and a shape without rows, a constant.

    An example is the projection of random Fourier features. Where TensorFlow knows the number of
    rows, a shape does not tell what it belongs to, and rows get the same numbers on each replica.
    """
    has_rows = any(map(tf.is_tensor, [shape] if tf.is_tensor(shape) else shape))
    if isinstance(seed, int) and not has_rows:
        seed = _SeedOfConstant(seed)
    return keras_function(shape, *args, seed=seed, **kwargs)


def _seed(step, keras_function, seed):
    drawn = unseeded.draw(keras_function, seed)
    differs = step.seeds_differ and not isinstance(seed, _SeedOfConstant)
    return step.seed(drawn) if differs else drawn


def _assign(step, keras_function, variable, value):
    """Assigns a variable; counters that TensorFlow keeps on the first replica are kept on each."""
    if step.is_dry_run:
        return step.note_use([value])
    recompute.note_change(variable)
    metric = step.own_metrics.get(id(variable))
    if metric is not None:
        value = own_metrics.corrected(step, metric, variable, value)
    step.note_written(variable, value)
    native = variable._value
    if metric is None and not step.is_normalizing:
        value = step.state_of_batch(variable, tf.convert_to_tensor(value, native.dtype))
    if step.has_copies and _is_assigned_on_each(native, step.applying):
        step.local(native).assign(tf.cast(value, native.dtype))
    else:
        with step.assigning():
            keras_function(variable, value)
    return None


def _assign_raw(step, function, native, value, *args, **kwargs):
    """Assigns or adds to a `tf.Variable` of the program."""
    if not (step.applying or step.is_assigning):
        variable = steps.RawVariable(native)
        step.note_written(variable, tf.convert_to_tensor(value, native.dtype))
        value = step.state_of_batch(variable, tf.convert_to_tensor(value, native.dtype))
    if step.applying and step.has_copies and _is_assigned_on_each(native, True):
        return getattr(step.local(native), function.__name__)(value, *args, **kwargs)
    return function(native, value, *args, **kwargs)


def _assign_raw_alone(step, function, native, *args, **kwargs):
    """Assigns or adds to a `tf.Variable` of the program on one device."""
    if not step.is_alone:
        return function(native, *args, **kwargs)
    if "delta" in kwargs:
        args = (kwargs.pop("delta"), *args)
    return _assign_raw(step, function, native, *args, **kwargs)


def _scatter(method):
    """Returns a hook that assigns the whole variable: a step combines what replicas assign."""

    def scatter(step, function, native, sparse_delta, *args, **kwargs):
        if step.applying:
            return function(native, sparse_delta, *args, **kwargs)
        value = native.read_value()
        indices = tf.convert_to_tensor(sparse_delta.indices)
        updates = tf.cast(sparse_delta.values, native.dtype)
        updates = tf.broadcast_to(updates, tf.concat([tf.shape(indices), tf.shape(value)[1:]], 0))
        return native.assign(_SCATTERS[method](value, indices[..., tf.newaxis], updates))

    return scatter


def _scatter_nd(method):
    """Returns a method that assigns a whole variable, where TensorFlow implements none."""

    def scatter_nd(native, indices, updates, name=None):
        updates = tf.cast(updates, native.dtype)
        return native.assign(_SCATTERS_ND[method](native.read_value(), indices, updates))

    return scatter_nd


def _assign_slice(step, function, copy, **arguments):
    if step.applying:
        return function(copy, **arguments)
    return _assign_whole(function, copy, **arguments)


def _assign_whole(function, copy, value, name=None, **where):
    """Assigns a slice of a variable, as in `queue[0].assign(x)`; TensorFlow assigns one copy's."""
    native = variable_of_copy(copy)
    if not isinstance(native, MirroredVariable):
        return function(copy, value=value, name=name, **where)
    before, value = copy.read_value(), tf.cast(value, native.dtype)
    changed = tf.raw_ops.TensorStridedSliceUpdate(input=before, value=value, **where)
    return native.assign(tf.ensure_shape(changed, before.shape))


def _assign_add(step, keras_function, variable, value):
    return step.assign_add(variable, value, keras_function)


def _assign_sub(step, keras_function, variable, value):
    negative = -tf.convert_to_tensor(value, variable.dtype)
    return step.assign_add(variable, negative, lambda *_: keras_function(variable, value))


def _with_row_counts(shape):
    """Returns a method of tensors, one of whose sizes the program reads as a number of rows."""

    @functools.wraps(shape)
    def shape_of(tensor):
        static, step = shape(tensor), steps.current()
        if step is None or not row_count.is_called_by_program() or not static.rank:
            return static
        sizes = tuple(static)
        counted = row_count.with_counts(step, tensor, sizes)
        if counted is not sizes:
            return with_sizes(static, counted)
        return row_count.with_hidden_count(step, tensor, static)

    return shape_of


def _shape(step, keras_function, x):
    """Returns the sizes of a tensor, one of which may be a `RowCount`."""
    return row_count.with_counts(step, x, keras_function(x))


def _not_folded(operation):
    """Returns a hook for `tf.shape` or `tf.size`, whose result is no constant where it has rows."""

    def shape_or_size(step, function, input, out_type=None, name=None):
        if _has_static_rows(step, input):
            return operation(input=input, out_type=out_type or tf.int32, name=name)
        return function(input, out_type, name)

    return shape_or_size


def _has_static_rows(step, value):
    if not row_count.is_called_by_program() or not isinstance(value, tf.Tensor):
        return False
    rank = value.shape.rank
    return bool(rank) and row_count.axis_of_static_rows(step, value, tuple(value.shape)) is not None


def _constant(step, function, value, dtype=None, shape=None, name="Const"):
    """Returns a constant; a tensor for numbers that are computed from that of the rows."""
    if isinstance(value, row_count.RowNumber) and shape is None:
        return value.__tf_tensor__(dtype, name)
    packed = row_count.packed(value, dtype)
    if packed is not value:
        return packed if shape is None else tf.reshape(packed, shape)
    return function(value, dtype, shape, name)


def _converted(step, function, value, dtype=None, dtype_hint=None, name=None):
    """Returns a tensor, no constant for numbers that are computed from that of the rows."""
    return function(row_count.packed(value, dtype), dtype, dtype_hint, name)


def _stacked(step, function, values, axis=0, name="stack"):
    """Returns a tensor, no constant for numbers that are computed from that of the rows."""
    packed = row_count.packed(values, None)
    return packed if packed is not values and not axis else function(values, axis, name)


def _handle(variable):
    """Returns the handle by which a gradient tape identifies a variable: its own or its copy's."""
    step = steps.current()
    if step is not None:
        return step.handle(variable)
    return variable.value.handle


def _check_gradient_between_replicas():
    """Warns that a gradient is taken outside of replicas, or raises an error in multi-worker jobs.

    On the devices of one process such a step computes what one device computes: on the first copy
    of the variables, with the whole batch. The optimizer updates all copies.
    """
    strategy = tf.distribute.get_strategy()
    if is_multi_worker(strategy):
        raise ValueError(_on_no_replica("The replicas would differ", strategy))
    if strategy not in _WARNED:
        _WARNED.add(strategy)
        warnings.warn(
            _on_no_replica("The numbers are right, but one device computes them all", strategy),
            stacklevel=2,
        )


def _on_no_replica(consequence, strategy):
    return (
        f"{_users_line()}: a gradient is computed in the scope of {type(strategy).__name__}, but "
        f"on none of its {strategy.num_replicas_in_sync} replicas. {consequence}. Call the step "
        "with `strategy.run(step, args=(x, y))` in a `tf.function`, on the batches of "
        "`strategy.experimental_distribute_dataset(dataset)`. Or decorate the step "
        "with `@kdist.step(strategy)` and run it by `kdist.session`. What one device computes, "
        "such as an image that is optimized, belongs outside of the scope"
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


def _is_assigned_on_each(native, is_updating):
    """Returns True if each replica assigns its own copy, where TensorFlow would combine values.

    It would keep that of the first replica, or add up updates, which are equal on all replicas.
    """
    if not isinstance(native, tf.distribute.DistributedValues):
        return False
    aggregation, kinds = native.aggregation, tf.VariableAggregation
    return aggregation == kinds.ONLY_FIRST_REPLICA or (is_updating and aggregation != kinds.NONE)


# Optimizers.


def _apply_outside(keras_function, optimizer, grads, trainable_variables=None):
    """Applies the gradients of a program's own loop with an optimizer that is built before.

    Keras creates its variables within the replicas. If a `tf.function` calls them, TensorFlow may
    put its first call into a `tf.cond`, where collectives fail. Outside of the scope in which the
    optimizer was created, Keras cannot create them at all.
    """
    if not optimizer.built and isinstance(trainable_variables, list | tuple):
        _build(optimizer, list(trainable_variables))
    return keras_function(optimizer, grads, trainable_variables)


def _tf_apply_outside(keras_function, optimizer, grads, trainable_variables=None):
    """Applies scaled gradients; between replicas, which Keras refuses, as on one device."""
    if tf.distribute.in_cross_replica_context():
        return optimizer._common_apply(grads, trainable_variables)
    return keras_function(optimizer, grads, trainable_variables)


def _scaled_outside(keras_function, value):
    """Divides a loss by the number of replicas in these only, where the program adds losses up."""
    return value if tf.distribute.in_cross_replica_context() else keras_function(value)


def _assign_slice_outside(function, copy, **arguments):
    if tf.distribute.has_strategy() and tf.distribute.get_replica_context():
        return function(copy, **arguments)
    return _assign_whole(function, copy, **arguments)


def _assign_outside(keras_function, variable, value):
    recompute.note_change(variable)
    keras_function(variable, value)


def _add_loss_outside(keras_function, layer, loss):
    recompute.check_adds_no_loss()
    keras_function(layer, loss)


# What hooks call instead outside of steps, by name.
_OUTSIDE_OF_STEPS = {
    "apply": _apply_outside,
    "_direct_assign": _assign_outside,
    "_strided_slice_assign": _assign_slice_outside,
    "_tf_apply": _tf_apply_outside,
    "add_loss": _add_loss_outside,
    "scale_loss_for_distribution": _scaled_outside,
    "unscale_loss_for_distribution": _scaled_outside,
}


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
    loss = step.scale_loss(loss, optimizer)
    # What is known of the loss, such as that it is a mean, holds for its product, too. The graph is
    # not read if the program runs eagerly, or declares what its losses are.
    scaled = tf.convert_to_tensor(keras_function(optimizer, loss))
    noted = step.dependence.noted(loss)
    return scaled if noted is None else step.dependence.note(scaled, noted)


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
        flat = keras.tree.flatten(sources)
        step.dependence.note_product_gradients(flat, found, target, output_gradients)
        return found
    return step.tape_gradient(gradient, target, sources)


def _tape_watch(step, keras_function, tape, tensor):
    return keras_function(tape, step.watched(tensor))


def _apply(step, keras_function, optimizer, grads, trainable_variables=None):
    if step.applying or not len(grads):
        return keras_function(optimizer, grads, trainable_variables)
    variables = list(map(keras_variable_of, trainable_variables or weights_of(optimizer)))
    step.check_scope(variables)
    if not optimizer.built:
        step.build(optimizer, variables)
    gradients = step.gradients(optimizer, list(grads), variables)
    if gradients is not None:
        step.apply(functools.partial(keras_function, optimizer), optimizer, gradients, variables)
    return None


def _apply_on_copies(step, keras_function, optimizer, grads, trainable_variables=None):
    """Decides on each replica: the reduced gradients are finite on all replicas or on none."""
    apply = step.optimizer_method(
        "_tf_apply", keras.optimizers.LossScaleOptimizer._common_apply, keras_function
    )
    return apply(optimizer, grads, trainable_variables)


def _check_finite(step, keras_function, optimizer, grads):
    return step.are_finite(optimizer, keras_function(optimizer, grads))


def _clip(step, keras_function, optimizer, grads):
    return step.clipped(keras_function, optimizer, grads)


def _already_reduced(step, keras_function, optimizer, grads_and_vars):
    return list(grads_and_vars)


def _update_step(optimizer, gradients, variables, learning_rate):
    """Updates weights like Keras's code for one device, which calls `update_step`.

    As on one device, `update_step` receives variables of TensorFlow. Their names, by which an
    optimizer of a program may choose a learning rate, contain the names of layers.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        optimizer.update_step(gradient, variable.value, learning_rate)


def _per_replica(name):
    """Returns a hook with Keras's code for one device instead of that which updates all copies."""
    is_update = name == "_backend_update_step"
    for_one_device = _update_step if is_update else getattr(BaseOptimizer, name)

    def update(step, keras_function, optimizer, *args, **kwargs):
        act = step.optimizer_method(name, for_one_device, keras_function)
        return act(optimizer, *args, **kwargs)

    return update
