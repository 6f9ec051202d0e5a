"""Gradient noise scale of models: the numbers of NumPy under a strategy, and no side effects."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.checkpoint.snapshot import capture
from kdist.tuning import gradient_noise_scale
from kdist.tuning.noise_scale import estimate

RNG = np.random.default_rng(0)
X = RNG.standard_normal((96, 5)).astype("float32")
Y = (X @ RNG.standard_normal((5, 1)) + RNG.standard_normal((96, 1))).astype("float32")
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)


def compiled(strategy=None, layers=(), optimizer="sgd"):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = x = keras.Input((5,))
        for layer in layers:
            x = layer()(x)
        regularizer = keras.regularizers.L2(0.05)
        outputs = keras.layers.Dense(1, use_bias=False, kernel_regularizer=regularizer)(x)
        model = kdist.Model(inputs, outputs)
        model.compile(optimizer, "mse")
    return model


def expected(weights, parts):
    """Returns the noise scale of linear regression, whose gradients NumPy computes."""
    x, y = X.astype("float64").reshape(4, parts, -1, 5), Y.reshape(4, parts, -1, 1)
    errors = x @ weights - y
    gradients = 2 * (x * errors).mean(axis=2) + 2 * 0.05 * weights[:, 0]
    squares = (gradients**2).sum(-1)
    return estimate(squares, (gradients.mean(axis=1) ** 2).sum(-1), 24 // parts)


def test_numbers_are_those_of_numpy(strategy):
    model = compiled(strategy)
    found = gradient_noise_scale(model, BATCHES)
    wanted = expected(model.get_weights()[0], 2 * strategy.num_replicas_in_sync)
    assert found.squared_norm == pytest.approx(wanted.squared_norm, rel=1e-4)
    assert found.trace == pytest.approx(wanted.trace, rel=1e-4)
    assert found.interval == pytest.approx(wanted.interval, rel=1e-4)


def test_divided_weights_count():
    found = [
        gradient_noise_scale(compiled(on_two(shard), [lambda: keras.layers.Dense(8)]), BATCHES)
        for shard in ("optimizer", "weights")
    ]
    assert found[1].squared_norm == pytest.approx(found[0].squared_norm, rel=1e-4)
    assert found[1].trace == pytest.approx(found[0].trace, rel=1e-4)


def on_two(shard):
    return kdist.create_strategy(kdist.Layout(data=2, shard=shard, min_shard_bytes=1))


def test_a_smaller_last_batch_is_left_out():
    model = compiled()
    rest = tf.data.Dataset.from_tensor_slices((X[:10], Y[:10])).batch(10)
    assert gradient_noise_scale(model, BATCHES.concatenate(rest)) == gradient_noise_scale(
        model, BATCHES
    )


@pytest.mark.slow
def test_state_does_not_change_and_masks_differ(mirrored):
    layers = [
        lambda: keras.layers.Dense(8),
        lambda: keras.layers.BatchNormalization(),
        lambda: keras.layers.Dropout(0.5, seed=2),
    ]
    model = compiled(mirrored, layers)
    model.fit(X, Y, batch_size=24, verbose=0)
    before = capture(model)
    first = gradient_noise_scale(model, BATCHES)
    after = capture(model)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    assert gradient_noise_scale(model, BATCHES) == first
    # With equal rows everywhere, only the masks make gradients differ.
    x, y = (np.repeat(array[:1], 24, axis=0) for array in (X, Y))
    no_norm = compiled(mirrored, [lambda: keras.layers.Dropout(0.5, seed=2)])
    same = tf.data.Dataset.from_tensors((x, y)).repeat(4)
    assert gradient_noise_scale(no_norm, same).trace > 0.01
    assert gradient_noise_scale(compiled(mirrored), same).trace == pytest.approx(0, abs=1e-4)


def test_what_cannot_be_measured_is_refused(mirrored):
    model = compiled()
    with pytest.raises(ValueError, match="at least 2 rows"):
        gradient_noise_scale(model, [(X[:1], Y[:1])])
    with pytest.raises(ValueError, match="two of both"):
        gradient_noise_scale(model, BATCHES.take(1))
    scaled = compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ValueError, match="loss scale"):
        gradient_noise_scale(scaled, BATCHES)
    with pytest.raises(ValueError, match="compile"):
        gradient_noise_scale(keras.Sequential([keras.layers.Dense(1)]), BATCHES)
