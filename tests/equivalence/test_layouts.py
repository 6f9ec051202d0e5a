"""Layout invariance: equal global batch, seed and data give the weights of one device.

The reference is plain Keras on one device, without a strategy and without kdist. A new layout joins
by a row in LAYOUTS, a new feature by a row in OPTIMIZERS or a model of its own.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import kdist
from kdist.testing import assert_same_weights
from tests.tiers import seldom

STEPS = 20
GLOBAL_BATCH = 64
LAYOUTS = {  # name -> (replicas, local batch, compile arguments)
    "1 x 64": (1, 64, {}),
    "2 x 32": (2, 32, {}),
    "4 x 16": (4, 16, {}),
    "2 x 16, accumulated twice": (2, 16, {"accumulate": 2}),
    "4 x 4, accumulated four times": (4, 4, {"accumulate": 4}),
    "2 x 32, 4 steps a call": (2, 32, {"steps_per_execution": 4}),
    "2 x 32, 7 steps a call": (2, 32, {"steps_per_execution": 7}),
    "2 x 16, accumulated twice, 7 steps a call": (
        *(2, 16),
        {"accumulate": 2, "steps_per_execution": 7},
    ),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    # Adam divides by the gradient's own size: with the usual epsilon of 1e-7 it makes full steps of
    # gradients that are mere rounding, and 20 such steps differ by 7e-5 in float32. In float64,
    # below, the usual epsilon stands.
    "adam": lambda: keras.optimizers.Adam(
        1e-3, epsilon=1e-3 if keras.config.floatx() == "float32" else 1e-7
    ),
}


def examples():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.batch(GLOBAL_BATCH, drop_remainder=True)


def network(model_class, has_batch_norm=True):
    """Returns convolutions with synchronized BatchNormalization, or with LayerNormalization.

    BatchNorm normalises micro-batches where there are any: that is another network.

    The convolutions have no bias: before a BatchNorm its gradient is zero but for rounding, and
    Adam makes a full step of whichever sign the rounding has.
    """
    layers = keras.layers
    keras.utils.set_random_seed(7)
    inputs = keras.Input((8, 8, 1))
    x = inputs
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        if has_batch_norm:
            x = layers.BatchNormalization(synchronized=True, momentum=0.9)(x)
        else:
            x = layers.LayerNormalization()(x)
        x = layers.ReLU()(x)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(10, activation="softmax")(x)
    return model_class(inputs, outputs)


def train(model_class, optimizer, has_batch_norm, **compile_arguments):
    model = network(model_class, has_batch_norm)
    model.compile(
        OPTIMIZERS[optimizer](),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **compile_arguments,
    )
    history = model.fit(examples().take(STEPS), verbose=0)
    evaluated = model.evaluate(examples(), verbose=0, return_dict=True)
    return model, history.history, evaluated


@functools.cache
def reference(optimizer, floatx, has_batch_norm=True):
    assert keras.config.floatx() == floatx
    model, history, evaluated = train(keras.Model, optimizer, has_batch_norm)
    return model.get_weights(), history, evaluated


@pytest.fixture
def floatx(request):
    """float64 separates rounding from errors: a correct layout agrees to the last digits."""
    keras.config.set_floatx(request.param)
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


# Momentum and Adam show all that SGD does, and float64 all that float32 does: every layout meets
# one of the former, the latter are met once.
OFTEN = [
    *zip(LAYOUTS, itertools.cycle(["adam", "momentum"]), itertools.repeat("float64"), strict=False),
    ("4 x 16", "sgd", "float32"),
]
ALL = [
    ("1 x 64", "sgd", "float64"),
    *itertools.product(LAYOUTS, ["momentum", "adam"], ["float64"]),
    *itertools.product(LAYOUTS, ["adam"], ["float32"]),
    ("2 x 32", "sgd", "float64"),
    ("4 x 4, accumulated four times", "sgd", "float64"),
    ("2 x 16, accumulated twice, 7 steps a call", "momentum", "float32"),
]
CASES = [*OFTEN, *seldom(ALL, other_than=OFTEN)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("layout", "optimizer", "floatx"), CASES, indirect=["floatx"])
def test_weights_are_those_of_one_device(layout, optimizer, floatx):
    replicas, local, compile_arguments = LAYOUTS[layout]
    accumulate = compile_arguments.get("accumulate", 1)
    batch = kdist.Batch(local, replicas, accumulate)
    assert batch.global_size == GLOBAL_BATCH
    name = "mirrored" if replicas > 1 else "one_device"
    with kdist.create_strategy(name, replicas).scope():
        model, history, evaluated = train(
            kdist.Model, optimizer, accumulate == 1, **compile_arguments
        )
    weights, reference_history, reference_evaluated = reference(optimizer, floatx, accumulate == 1)

    tolerance = {"float32": 1e-5, "float64": 1e-12}[floatx]
    assert_same_weights(model.get_weights(), weights, tolerance)
    assert int(model.optimizer.iterations.numpy()) == STEPS
    np.testing.assert_allclose(history["loss"], reference_history["loss"], rtol=1e-5)
    assert history["accuracy"] == pytest.approx(reference_history["accuracy"], abs=1e-7)
    assert evaluated["accuracy"] == pytest.approx(reference_evaluated["accuracy"], abs=1e-7)
    assert evaluated["loss"] == pytest.approx(reference_evaluated["loss"], rel=1e-5)


def test_the_comparison_can_fail():
    """A learning rate that differs by a tenth is detected."""
    model = network(keras.Model)
    model.compile(keras.optimizers.SGD(0.09), "sparse_categorical_crossentropy")
    model.fit(examples().take(STEPS), verbose=0)
    with pytest.raises(AssertionError, match="weights differ by"):
        assert_same_weights(model.get_weights(), reference("sgd", "float32")[0], tolerance=1e-5)
