"""Fails if Keras changes a private interface that kdist/compat/keras.py lists."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import api_export

import kdist
from kdist.compat import keras as keras_internals
from kdist.training.replica import hooks
from kdist.training.trainer import Trainer


@pytest.mark.parametrize("name", keras_internals.TRAINER_MEMBERS)
def test_trainer_members(name):
    assert hasattr(keras_internals.TensorFlowTrainer(), name)


@pytest.mark.parametrize("name", keras_internals.LAYER_MEMBERS)
def test_layer_members(name):
    assert hasattr(keras.layers.Layer(), name)


@pytest.mark.parametrize("name", keras_internals.FUNCTIONAL_MEMBERS)
def test_functional_members(name):
    inputs = keras.Input((1,))
    assert hasattr(keras.Model(inputs, keras.layers.Dense(1)(inputs)), name)


def test_adafactor_has_sums_of_rows_and_columns():
    weights = [keras.Variable(np.ones(shape)) for shape in ((4, 3), (5,))]
    optimizer = keras.optimizers.Adafactor()
    optimizer.build(weights)
    assert [tuple(each[0].shape) for each in (optimizer._r, optimizer._c)] == [(4,), (3,)]
    assert len(optimizer._r) == len(optimizer._c) == len(weights)


@pytest.mark.parametrize("name", keras_internals.OPTIMIZER_MEMBERS)
def test_optimizer_members(name):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build([keras.Variable(np.ones(1))])
    assert hasattr(optimizer, name)


@pytest.mark.parametrize("name", keras_internals.OPTIMIZER_STATE)
def test_optimizer_state(name):
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=2)
    optimizer.build([keras.Variable(np.ones(1))])
    state = getattr(optimizer, name)
    known = {id(variable) for variable in optimizer.variables}
    assert all(id(variable) in known for variable in keras.tree.flatten(state))


PARAMETERS_OF_HOOKED = {
    "gradient": ["self", "target", "sources", "output_gradients", "unconnected_gradients"],
    "watch": ["self", "tensor"],
    f"{tf.nn.__name__}.ctc_loss": [
        "labels",
        "logits",
        "label_length",
        "logit_length",
        "logits_time_major",
        "unique",
        "blank_index",
        "name",
    ],
    f"{tf.compat.v1.nn.__name__}.ctc_loss": [
        "labels",
        "inputs",
        "sequence_length",
        "preprocess_collapse_repeated",
        "ctc_merge_repeated",
        "ignore_longer_outputs_than_inputs",
        "time_major",
        "logits",
    ],
    "compute_average_loss": ["per_example_loss", "sample_weight", "global_batch_size"],
    "scale_regularization_loss": ["regularization_loss"],
    "scale_loss_for_distribution": ["value"],
    "unscale_loss_for_distribution": ["value"],
    "reduce_weighted_values": ["values", "sample_weight", "mask", "reduction", "dtype"],
    "update_state": ["self", "values", "sample_weight"],
    "call": ["self", "inputs", "training", "mask"],
    "add_loss": ["self", "loss"],
    "_get_own_losses": ["self"],
    "_clear_losses": ["self"],
    "_moments": ["self", "inputs", "mask"],
    "_compute_moments_sync": ["x", "axes", "keepdims"],
    f"{keras.ops.__name__}.shape": ["x"],
    "shape": ["input", "out_type", "name"],
    "size": ["input", "out_type", "name"],
    "constant": ["value", "dtype", "shape", "name"],
    "convert_to_tensor": ["value", "dtype", "dtype_hint", "name"],
    "stack": ["values", "axis", "name"],
    "beta": ["shape", "alpha", "beta", "dtype", "seed"],
    "binomial": ["shape", "counts", "probabilities", "dtype", "seed"],
    "draw_seed": ["seed"],
    "gamma": ["shape", "alpha", "dtype", "seed"],
    "normal": ["shape", "mean", "stddev", "dtype", "seed"],
    "randint": ["shape", "minval", "maxval", "dtype", "seed"],
    "truncated_normal": ["shape", "mean", "stddev", "dtype", "seed"],
    "uniform": ["shape", "minval", "maxval", "dtype", "seed"],
    "conv": ["inputs", "kernel", "strides", "padding", "data_format", "dilation_rate"],
    "Layer.__call__": ["self", "args", "kwargs"],
    "Function.__call__": ["self", "args", "kwds"],
    "ResourceVariable.assign": ["self", "value", "use_locking", "name", "read_value"],
    "ResourceVariable.assign_add": ["self", "delta", "use_locking", "name", "read_value"],
    "ResourceVariable.assign_sub": ["self", "delta", "use_locking", "name", "read_value"],
    "DistributedVariable.assign": ["self", "value", "use_locking", "name", "read_value"],
    "DistributedVariable.assign_add": ["self", "value", "use_locking", "name", "read_value"],
    "DistributedVariable.assign_sub": ["self", "value", "use_locking", "name", "read_value"],
    "MirroredVariable.scatter_add": ["self", "sparse_delta", "use_locking", "name"],
    "MirroredVariable.scatter_max": ["self", "args", "kwargs"],
    "MirroredVariable.scatter_min": ["self", "args", "kwargs"],
    "MirroredVariable.scatter_sub": ["self", "sparse_delta", "use_locking", "name"],
    "MirroredVariable.scatter_update": ["self", "args", "kwargs"],
    "_strided_slice_assign": [
        "self",
        "begin",
        "end",
        "strides",
        "value",
        "name",
        "begin_mask",
        "end_mask",
        "ellipsis_mask",
        "new_axis_mask",
        "shrink_axis_mask",
    ],
    "assign_add": ["self", "value"],
    "assign_sub": ["self", "value"],
    "_direct_assign": ["self", "value"],
    "scale_loss": ["self", "loss"],
    "apply": ["self", "grads", "trainable_variables"],
    "_clip_gradients": ["self", "grads"],
    "check_finite": ["self", "grads"],
    "_tf_apply": ["self", "grads", "trainable_variables"],
    "_all_reduce_sum_gradients": ["self", "grads_and_vars"],
    "_apply_weight_decay": ["self", "variables"],
    "_backend_increment_gradient_accumulators": ["self", "grads", "acc_grads"],
    "_backend_update_step": ["self", "grads", "trainable_variables", "learning_rate"],
    "_overwrite_model_variables_with_average_value": ["self", "trainable_variables"],
}
HOOKED = [(owner, name) for owner, name, _ in hooks.hooks()]


@pytest.mark.parametrize(("owner", "name"), HOOKED)
def test_signatures_of_hooked_functions(owner, name):
    keras_function = inspect.unwrap(getattr(owner, name))
    assert keras_function.__module__.startswith(("keras.", "tensorflow."))
    known = PARAMETERS_OF_HOOKED.get(f"{owner.__name__}.{name}") or PARAMETERS_OF_HOOKED[name]
    assert list(inspect.signature(keras_function).parameters) == known


def test_every_hook_is_installed_once():
    hooks.install()
    for owner, name in HOOKED:
        hooked = getattr(owner, name)
        assert hooked.__code__.co_name == "hooked"
        assert hooked.__wrapped__.__code__ is not hooked.__code__


def test_keras_outside_kdist_is_unchanged():
    """Outside kdist, Keras still clips gradients before it adds them up."""
    strategy = kdist.create_strategy("mirrored", 2)
    with strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        optimizer.build([variable])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.constant([3.0, 0.0])], [variable]))

    step()
    np.testing.assert_allclose(variable.numpy(), [-2.0, 0.0])


@pytest.mark.parametrize("name", keras_internals.SWAP_EMA_MEMBERS)
def test_swap_ema_members(name):
    assert hasattr(keras.callbacks.SwapEMAWeights(), name)


@pytest.mark.parametrize("name", keras_internals.EPOCH_ITERATOR_MEMBERS)
def test_epoch_iterator_members(name):
    assert hasattr(keras_internals.TFEpochIterator, name)


def test_epoch_iterator_state():
    iterator = keras_internals.TFEpochIterator(
        distribute_strategy=Trainer().distribute_strategy,
        x=np.ones((1, 1)),
        steps_per_execution=2,
    )
    assert {
        "steps_per_epoch",
        "steps_per_execution",
        "_current_iterator",
        "_steps_seen",
        "_num_batches",
        "data_adapter",
    } <= set(vars(iterator))


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_signatures_are_those_of_keras(name):
    ours = inspect.signature(getattr(Trainer, name))
    assert ours == inspect.signature(getattr(keras_internals.TensorFlowTrainer, name))


def test_files_name_a_class_by_the_export_table():
    assert api_export.REGISTERED_OBJS_TO_NAMES[keras.Sequential] == "keras.Sequential"
    assert type(keras.Model(x := keras.Input((1,)), x)) is keras_internals.Functional


def test_reduce_per_replica_takes_a_strategy_and_a_reduction():
    parameters = inspect.signature(keras_internals.reduce_per_replica).parameters
    assert list(parameters) == ["values", "strategy", "reduction"]


@pytest.mark.parametrize("name", ["_tf_swap_variables", "_tf_finalize_ema_values"])
def test_methods_that_swap_averages(name):
    method = getattr(keras.callbacks.SwapEMAWeights, name)
    assert list(inspect.signature(method).parameters) == ["self", "optimizer"]
