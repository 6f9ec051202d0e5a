"""Unfreezing and moving averages during a training, also one that is resumed."""

import contextlib

import keras
import numpy as np
import pytest

from kdist.callbacks import AveragedWeights, Checkpoint, Unfreeze
from kdist.strategies import create_strategy
from tests.callbacks.test_checkpoint import (
    Interrupt,
    Interruption,
    assert_equal,
    built,
    pipelines,
)

AFTER_EPOCHS = 2


class InterruptValidation(Interrupt):
    """Stops in validation, like a crash."""

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_test_batch_begin(self, batch, logs=None):
        super().on_train_batch_end(batch)


class Note(keras.callbacks.Callback):
    """Notes the weights after each epoch; other callbacks keep the clock of the first one."""

    def __init__(self):
        super().__init__()
        self.epochs = {}

    def on_train_begin(self, logs=None):
        self._clock = self.model.training_state.clock

    def on_epoch_end(self, epoch, logs=None):
        assert self.model.training_state.clock is self._clock
        self.epochs[epoch] = {weight.path: weight.numpy() for weight in self.model.weights}


def fine_tune(strategy, *callbacks, stop=None):
    """Returns the model, its history, and the weights after each epoch."""
    keras.utils.set_random_seed(3)
    keras.utils.clear_session(free_memory=False)
    train, test = pipelines(strategy.num_replicas_in_sync, 32 // strategy.num_replicas_in_sync)
    with strategy.scope():
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)
        sgd = keras.optimizers.SGD(rate, momentum=0.9, use_ema=True, ema_momentum=0.8)
        model = built(train.image_shape, sgd)
        model.optimizer.build(model.trainable_variables)
    frozen = [layer for layer in model.layers if layer.name in ("dense", "batch_normalization")]
    for layer in frozen:
        layer.trainable = False
    note = Note()
    own = [AveragedWeights(), Unfreeze(frozen, AFTER_EPOCHS), note]
    start = {weight.path: weight.numpy() for weight in model.weights}
    with contextlib.suppress(Interruption):
        model.fit(
            train,
            validation_data=test,
            epochs=AFTER_EPOCHS + 1,
            callbacks=[*([stop] if stop else []), *own, *callbacks],
            verbose=0,
        )
    return model, model.history.history, {-1: start, **note.epochs}


@pytest.fixture(scope="module")
def whole():
    """Model, history, and weights of a training that nothing interrupts."""
    return fine_tune(create_strategy("mirrored", 2))


@pytest.mark.slow
def test_frozen_layers_stay_and_are_trained_later_with_fixed_statistics(whole):
    _, _, weights = whole

    def changes(name, first, last):
        (path,) = (path for path in weights[-1] if path.endswith(name))
        return not np.array_equal(weights[first][path], weights[last][path])

    for name in ("dense/kernel", "dense/bias", "normalization/gamma"):
        assert not changes(name, -1, AFTER_EPOCHS - 1)
        assert changes(name, AFTER_EPOCHS - 1, AFTER_EPOCHS)
    assert changes("dense_1/kernel", -1, 0)
    assert not changes("moving_mean", -1, AFTER_EPOCHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "interruption",
    [Interrupt(25), InterruptValidation(30)],
    ids=["after unfreezing", "in the last validation"],
)
def test_a_resumed_training_is_bit_equal(tmp_path, mirrored, whole, interruption):
    fine_tune(mirrored, Checkpoint(tmp_path, every_steps=1), interruption)
    checkpoint = Checkpoint(tmp_path)
    resumed, history, _ = fine_tune(mirrored, checkpoint)
    assert checkpoint.resumed_from > 20
    assert history == whole[1]
    assert_equal(resumed, whole[0])


def test_a_training_that_stops_before_has_the_averages_that_were_validated(mirrored):
    stop = keras.callbacks.EarlyStopping(min_delta=1e9, patience=0)
    model, history, weights = fine_tune(mirrored, stop=stop)
    _, test = pipelines(2, 16)
    assert len(history["loss"]) == AFTER_EPOCHS
    results = model.evaluate(test, return_dict=True, verbose=0)
    assert results["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)
    for weight in model.weights:
        np.testing.assert_array_equal(weight.numpy(), weights[AFTER_EPOCHS - 1][weight.path])
