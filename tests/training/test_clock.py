"""Times of steps, input, and callbacks."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.training.groups.clock import StepClock, Times


def slow(dataset, seconds):
    """Returns the dataset with a delay per batch, without parallelism."""

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
    """Collects the times of each epoch."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_epoch_end(self, epoch, logs=None):
        self.times.append(self.model.training_state.clock.take())


def times_of_second_epoch(model, dataset, **options):
    taking = Taking()
    model.fit(dataset, epochs=2, verbose=0, callbacks=[*options.pop("callbacks", []), taking])
    return taking.times[1]


@pytest.mark.fast_cases(1)
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
def test_waiting_for_input_is_measured(mirrored, options):
    times = times_of_second_epoch(compiled(mirrored, **options), data(seconds=0.05))
    assert times.steps == 12
    assert sum(times.step_seconds.values()) == 12
    # Prefetching continues during a step; steps wait for the rest.
    assert 0.5 * 12 * 0.05 < times.input_seconds < times.seconds
    computing = times.seconds - times.input_seconds - times.callback_seconds
    assert computing > 0


def test_prefetching_during_a_step_is_not_waiting(mirrored):
    """Steps take 60 ms and batches 30 ms, so that no step waits."""

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


def test_data_of_unknown_length_is_measured(mirrored):
    def batches():
        for _ in range(6):
            time.sleep(0.05)
            yield np.zeros((8, 4), "float32"), np.zeros(8, "int64")

    signature = (tf.TensorSpec((8, 4), tf.float32), tf.TensorSpec((8,), tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    times = times_of_second_epoch(compiled(mirrored), dataset)
    assert times.steps == 6
    assert times.input_seconds > 3 * 0.05


def test_fast_data_causes_little_waiting(mirrored):
    times = times_of_second_epoch(compiled(mirrored, steps_per_execution=4), data(200))
    assert times.input_seconds < 0.8 * times.seconds  # threads share two cores


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("k", [1, 4])
def test_computation_is_not_waiting(mirrored, k):
    """Convolutions use all threads, so that the time may be read late."""
    x = np.zeros((1024, 28, 28, 1), "float32")
    dataset = tf.data.Dataset.from_tensors((x, np.zeros(1024, "int64"))).repeat(24)
    with mirrored.scope():
        model = kdist.models.lenet((28, 28, 1), 10)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=k)
    times = times_of_second_epoch(model, dataset)
    assert times.steps == 24
    assert times.input_seconds < 0.1 * times.seconds


def test_callbacks_are_measured(mirrored):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)

    times = times_of_second_epoch(compiled(mirrored), data(), callbacks=[Slow()])
    assert 12 * 0.02 <= times.callback_seconds < times.seconds


@pytest.mark.slow
def test_validation_is_not_measured(mirrored):
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


def test_steps_of_other_processes_are_counted_but_not_timed():
    clock = StepClock(times_steps=False)
    clock.note_call(2, 0.5)
    assert clock.take() == Times(2, 0.0, None, 0.0, {})
