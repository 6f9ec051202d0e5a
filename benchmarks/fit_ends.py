"""The end of `fit` on endless data: how long TensorFlow takes to destroy the iterator.

  python -m benchmarks.fit_ends

Plain Keras and kdist train in turn on one device. Measured is the time from the last step to the
end of `fit`.
"""

import statistics
import time

import keras
import tensorflow as tf
from absl import app, flags

import kdist
from benchmarks.tables import markdown

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 16, "Trainings with each library.")
flags.DEFINE_float("seconds", 3.0, "Approximate duration of a training.")

STEP_SECONDS = 0.01
SHORT_SECONDS = 0.5


class LastStep(keras.callbacks.Callback):
    """The time of the last step so far; a step lasts at least `STEP_SECONDS`."""

    def on_train_batch_end(self, batch, logs=None):
        """Records the time."""
        time.sleep(STEP_SECONDS)
        self.time = time.perf_counter()


def train(model_class):
    """Trains a model; returns the seconds from the last step to the end."""
    inputs = keras.Input((4,))
    model = model_class(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.zeros([8, 1]))).repeat()
    data = data.map(lambda x, y: (2 * x, y), tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    last = LastStep()
    steps = round(FLAGS.seconds / STEP_SECONDS)
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[last])
    return time.perf_counter() - last.time


def main(_):
    """Prints a table."""
    found = {"Keras": [], "kdist": []}
    for number in range(FLAGS.rounds):
        for name, model_class in (("Keras", keras.Model), ("kdist", kdist.Model)):
            found[name].append(train(model_class))
            print(
                f"round {number + 1} of {FLAGS.rounds}: {name} {found[name][-1]:.3f} s", flush=True
            )
    cells = [["", "trainings", f"over {SHORT_SECONDS} s", "median s", "mean s", "longest s"]]
    for name, seconds in found.items():
        long = sum(value > SHORT_SECONDS for value in seconds)
        values = (statistics.median(seconds), statistics.mean(seconds), max(seconds))
        cells.append([name, str(len(seconds)), str(long), *(f"{value:.3f}" for value in values)])
    print(f"\n{markdown(cells)}")


if __name__ == "__main__":
    app.run(main)
