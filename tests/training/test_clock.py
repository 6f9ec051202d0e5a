"""Where the time of training goes."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.training.clock import StepClock, Times


def slow(dataset, seconds):
    """The data set, each batch of which takes so long to make, one after the other."""

    def wait(x):
        time.sleep(seconds)
        return x

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.map(
        lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape), y)
    ).with_options(options)


def data(batches=12, seconds=0.0):
    x = np.random.default_rng(0).normal(size=(8 * batches, 4)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(8 * batches) % 3)).batch(8, True)
    return slow(dataset, seconds) if seconds else dataset


def compiled(strategy, **options):
    with strategy.scope():
        inputs = keras.Input((4,))
        model = kdist.Model(inputs, keras.layers.Dense(3, activation="softmax")(inputs))
        model.compile("sgd", "sparse_categorical_crossentropy", **options)
    return model


class Taking(keras.callbacks.Callback):
    """Takes the times at the end of each epoch."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_epoch_end(self, epoch, logs=None):
        self.times.append(self.model.clock.take())


def times_of_second_epoch(model, dataset, **options):
    taking = Taking()
    model.fit(dataset, epochs=2, verbose=0, callbacks=[*options.pop("callbacks", []), taking])
    return taking.times[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_execution": 4},
        {"steps_per_execution": 4, "run_eagerly": True},
        {"accumulate": 2, "steps_per_execution": 5},
        {"local_steps": 2, "steps_per_execution": 4},
    ],
    ids=str,
)
def test_waiting_for_input_is_seen(mirrored, options):
    times = times_of_second_epoch(compiled(mirrored, **options), data(seconds=0.05))
    assert times.steps == 12
    assert sum(times.step_seconds.values()) == 12
    # Reading goes on while a step computes; what is left is waited for.
    assert 0.5 * 12 * 0.05 < times.input_seconds < times.seconds
    computing = times.seconds - times.input_seconds - times.callback_seconds
    assert computing > 0


def test_what_is_read_while_a_step_computes_is_not_waited_for(mirrored):
    """Steps of 60 ms, batches of 30 ms: nothing to wait for, whoever reads them."""

    class Slow(keras.layers.Layer):
        def call(self, x):
            def wait(x):
                time.sleep(0.06)
                return x

            same = tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)
            return x + tf.stop_gradient(same - x)

    inputs = keras.Input((4,))
    model = kdist.Model(inputs, keras.layers.Dense(3)(Slow()(inputs)))
    model.compile("sgd", "mse", steps_per_execution=12)
    x = np.zeros((96, 4), "float32")
    dataset = slow(tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(8, True), 0.03)
    times = times_of_second_epoch(model, dataset.prefetch(4))
    assert times.seconds > 12 * 0.06
    assert times.input_seconds < 0.25 * times.seconds


def test_data_without_a_known_end_are_timed_as_well(mirrored):
    def batches():
        for _ in range(6):
            time.sleep(0.05)
            yield np.zeros((8, 4), "float32"), np.zeros(8, "int64")

    signature = (tf.TensorSpec((8, 4), tf.float32), tf.TensorSpec((8,), tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    times = times_of_second_epoch(compiled(mirrored), dataset)
    assert times.steps == 6
    assert times.input_seconds > 3 * 0.05


def test_fast_data_are_hardly_waited_for(mirrored):
    times = times_of_second_epoch(compiled(mirrored, steps_per_execution=4), data(200))
    assert times.input_seconds < 0.5 * times.seconds


@pytest.mark.parametrize("k", [1, 4])
def test_computing_is_not_taken_for_waiting(mirrored, k):
    """Data that are there at once: while convolutions take all threads, the clock is read late."""
    x = np.zeros((1024, 28, 28, 1), "float32")
    dataset = tf.data.Dataset.from_tensors((x, np.zeros(1024, "int64"))).repeat(24)
    with mirrored.scope():
        model = kdist.models.lenet((28, 28, 1), 10)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=k)
    times = times_of_second_epoch(model, dataset)
    assert times.steps == 24
    assert times.input_seconds < 0.1 * times.seconds


def test_callbacks_are_seen(mirrored):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)

    times = times_of_second_epoch(compiled(mirrored), data(), callbacks=[Slow()])
    assert 12 * 0.02 <= times.callback_seconds < times.seconds


def test_validation_is_no_training(mirrored):
    taking = Taking()
    compiled(mirrored).fit(
        data(), epochs=2, verbose=0, validation_data=data(seconds=0.1), callbacks=[taking]
    )
    assert taking.times[1].seconds < 12 * 0.1
    assert taking.times[1].steps == 12


def test_a_clock_that_does_not_run():
    clock = StepClock()
    clock.note_call(2, 0.5)
    clock.note_call(1, 0.25)
    clock.note_call(1, 0.7)
    time.sleep(0.01)
    times = clock.take()
    assert times == Times(4, 0.0, None, 0.0, times.step_seconds)
    assert list(times.step_seconds.values()) == [3, 1]
    np.testing.assert_allclose(list(times.step_seconds), [0.25, 0.7], rtol=0.01)
    assert clock.take() == Times(0, 0.0, None, 0.0, {})


def test_steps_that_others_make_are_counted_without_their_time():
    clock = StepClock(times_steps=False)
    clock.note_call(2, 0.5)
    assert clock.take() == Times(2, 0.0, None, 0.0, {})
