"""A job that loses a worker in mid-epoch, and gets it back, ends with the weights of one device."""

import contextlib

import keras
import numpy as np
import pytest

import kdist
from kdist.testing import assert_same_weights

BATCH = kdist.Batch(local=8, replicas=4)
EPOCHS, EXAMPLES = 2, 320


def compiled(model_class, shape, **options):
    layers = keras.layers
    inputs = keras.Input(shape)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(inputs))
    model = model_class(inputs, layers.Dense(10, activation="softmax")(x))
    rate = kdist.schedules.Ramp(peak=0.1, batch=BATCH, ramp_examples=EXAMPLES)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


class _Lost(Exception):
    pass


class LoseWorker(keras.callbacks.Callback):
    """Raises an exception after a step, counted over all epochs."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self._step:
            raise _Lost


def fit(replicas, directory, lost_after):
    """Trains or resumes until a step; returns the weights, and the history of the last epoch."""
    keras.utils.set_random_seed(3)
    batch = BATCH.on_replicas(replicas)
    train, test = kdist.data.load("digits", batch=batch, examples=EXAMPLES)
    with kdist.create_strategy("mirrored", replicas).scope():
        model = compiled(kdist.Model, train.image_shape, accumulate=batch.accumulate)
    checkpoint = kdist.callbacks.Checkpoint(directory, every_steps=1)
    with contextlib.suppress(_Lost):
        model.fit(
            train,
            validation_data=test,
            epochs=EPOCHS,
            callbacks=[LoseWorker(lost_after), checkpoint],
            verbose=0,
        )
    return model.get_weights(), checkpoint.resumed_from, model.history.history


@pytest.fixture
def float64():
    """float64 separates rounding from errors: a correct division agrees to the last digits."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.mark.slow
def test_four_three_and_four_replicas_equal_one_device(tmp_path, float64):
    keras.utils.set_random_seed(3)
    train, test = kdist.data.load("digits", batch=kdist.Batch(32), examples=EXAMPLES)
    plain = compiled(keras.Model, train.image_shape)
    steps = {"steps_per_epoch": train.steps_per_epoch, "epochs": EPOCHS, "shuffle": False}
    expected = plain.fit(train.dataset(), verbose=0, **steps).history
    evaluated = plain.evaluate(kdist.data.weighted(test), verbose=0, return_dict=True)
    for replicas, lost_after, resumed_after in ((4, 7, None), (3, 14, 6), (4, None, 13)):
        weights, resumed_from, history = fit(replicas, tmp_path, lost_after)
        assert resumed_from == resumed_after
    assert_same_weights(weights, plain.get_weights(), 1e-12)
    for name in expected:
        np.testing.assert_allclose(history[name][-1], expected[name][-1], rtol=1e-6)
    np.testing.assert_allclose(history["val_loss"][-1], evaluated["loss"], rtol=1e-6)
