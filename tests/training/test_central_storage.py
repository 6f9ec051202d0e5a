"""`central_storage` on several devices: what `mirrored` computes, with one copy of each variable.

The features of `tests/equivalence/test_features.py` are tested there.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.testing import assert_same_weights
from tests.tiers import seldom


def training(strategy, rows=21, **compile_arguments):
    """Returns (weights, logs) of a model with a large table, state per replica, and a metric."""
    keras.utils.set_random_seed(3)
    with kdist.create_strategy(*strategy).scope():
        inputs = keras.Input((5,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(3000, 30)(inputs))  # above 256 KB
        x = keras.layers.BatchNormalization(momentum=0.5)(x)
        model = kdist.Model(inputs, keras.layers.Dense(2, activation="softmax")(x))
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1, name="top")]
        model.compile(
            keras.optimizers.Adam(0.05),
            "sparse_categorical_crossentropy",
            metrics=metrics,
            **compile_arguments,
        )
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 3000, (rows, 5)), draw.integers(0, 2, rows)
    fitted = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
    return model.get_weights(), [*fitted.values(), evaluated, model.optimizer.iterations.numpy()]


@pytest.mark.parametrize(
    ("devices", "options"),
    seldom([(2, {}), (4, {"steps_per_execution": 3}), (4, {"accumulate": 2})]),
    ids=str,
)
def test_it_computes_what_mirrored_computes(devices, options):
    weights, logs = training(("central_storage", devices), **options)
    expected, expected_logs = training(("mirrored", devices), **options)
    assert_same_weights(weights, expected, 1e-5)
    for values, others in zip(logs, expected_logs, strict=True):
        np.testing.assert_allclose(values, others, atol=1e-5)


@pytest.mark.parametrize("row", [0, 3], ids=["first replica", "last replica"])
def test_the_first_nonfinite_step_is_known(row):
    x = np.ones((16, 2), "float32")
    x[8 + row] = np.nan
    with kdist.create_strategy("central_storage", 2).scope():
        model = kdist.Model.of(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4), verbose=0)
    assert model.training_state.first_nonfinite_step() == 3


class Centered(keras.layers.Layer):
    """Subtracts a moving mean that it has just updated, or a mean of all rows so far."""

    def __init__(self, moving, **options):
        super().__init__(**options)
        self._moving = moving

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, x):
        mean = keras.ops.mean(x, 0)
        if self._moving:
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        else:
            self.mean.assign_add(0.1 * mean)
        return x - self.mean


@pytest.mark.parametrize("moving", [True, False], ids=["assign", "assign_add"])
def test_no_gradient_passes_through_an_assigned_variable(moving):
    """Steps on copies of variables, also those of parameter servers, compute what Keras does."""

    def trained(kind, strategy, **options):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            inputs = keras.Input((3,))
            x = Centered(moving)(keras.layers.Dense(4, activation="tanh")(inputs))
            model = kind(inputs, keras.layers.Dense(1)(x))
            model.compile(keras.optimizers.SGD(0.5), "mse", **options)
        # The replicas have the same rows, so that their means are those of the batch.
        x = np.random.default_rng(0).normal(1, 1, (2, 1, 4, 3)).repeat(2, 1).reshape(16, 3)
        model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = trained(keras.Model, tf.distribute.get_strategy())
    strategy = kdist.create_strategy("central_storage", 2)
    weights = trained(kdist.Model, strategy, loss_reduction="mean")
    assert_same_weights(weights, expected, 1e-6)
