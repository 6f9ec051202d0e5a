"""Measures how the memory of a process grows during a long training, with and without kdist.

  # all cases, some minutes; from the repository's root
  python -m benchmarks.memory_growth --steps=50000

  # one case, with the Python objects that have become more
  python -m benchmarks.memory_growth --case=Telemetry --objects

A small network trains in epochs of 100 steps on two logical CPU devices, as one `fit`. Each case
runs in a process of its own: plain Keras, with ModelCheckpoint, and under MirroredStrategy; kdist
without callbacks, with each of its callbacks alone, and with all of them. The growth counts from
the first tenth of the steps, when everything is traced and TensorFlow's allocator has reached its
size.
"""

import collections
import gc
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import psutil
from absl import flags

from kdist import program

FLAGS = flags.FLAGS

STEPS_PER_EPOCH = 100
CALLBACKS = (
    "Telemetry",
    "Checkpoint",
    "EpochCheckpoint",
    "EpochSeconds",
    "StopOnNonFiniteLoss",
)
CASES = ("keras", "keras ModelCheckpoint", "keras mirrored", "kdist", *CALLBACKS, "all")

flags.DEFINE_integer("steps", 50_000, "Steps to train in each case.", lower_bound=1000)
flags.DEFINE_enum("case", None, list(CASES), "Measure this case only; all by default.")
flags.DEFINE_bool("objects", False, "List the Python types of which objects were added.")
flags.DEFINE_bool("here", False, "Measure --case in this process.")


def main(_):
    if FLAGS.here:
        print(json.dumps(measure(FLAGS.case, FLAGS.steps)))
        return
    for case in [FLAGS.case] if FLAGS.case else CASES:
        _print(case, _in_own_process(case))


def _in_own_process(case):
    command = [sys.executable, "-m", "benchmarks.memory_growth", "--here", f"--case={case}"]
    run = subprocess.run(
        [*command, f"--steps={FLAGS.steps}"], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def measure(case: str, steps: int) -> dict:
    """Trains in this process.

    Returns:
        "samples", the (step, resident bytes) at the end of epochs, "seconds" of the training, and
        "objects", the Python types with most new objects.
    """
    import keras

    with tempfile.TemporaryDirectory() as directory:
        model, callbacks = _model(case), _callbacks(case, pathlib.Path(directory))
        recorder = _Recorder(keras, steps)
        began = time.perf_counter()
        model.fit(
            _batches(),
            steps_per_epoch=STEPS_PER_EPOCH,
            epochs=steps // STEPS_PER_EPOCH,
            callbacks=[*callbacks, recorder.callback],
            verbose=0,
        )
        seconds = time.perf_counter() - began
    return {"samples": recorder.samples, "seconds": seconds, "objects": recorder.new_objects()}


class _Recorder:
    """Samples the resident memory about a hundred times, and counts objects twice."""

    def __init__(self, keras, steps):
        self._every = max(1, steps // STEPS_PER_EPOCH // 100)
        self._first = steps // STEPS_PER_EPOCH // 10
        self._process = psutil.Process()
        self._before = collections.Counter()
        self.samples = []
        self.callback = keras.callbacks.LambdaCallback(on_epoch_end=self._sample)

    def _sample(self, epoch, logs):
        if epoch == self._first:
            self._before = _objects()
        if epoch % self._every == 0:
            step = (epoch + 1) * STEPS_PER_EPOCH
            self.samples.append((step, self._process.memory_info().rss))

    def new_objects(self):
        """Returns the types with most new objects since the first tenth."""
        return (_objects() - self._before).most_common(12)


def _objects():
    gc.collect()
    return collections.Counter(type(each).__qualname__ for each in gc.get_objects())


def _batches():
    import tensorflow as tf

    rows = tf.random.stateless_normal([1024, 16], [0, 0])
    labels = tf.cast(tf.range(1024) % 10, tf.int32)
    return tf.data.Dataset.from_tensor_slices((rows, labels)).repeat().batch(32)


def _model(case):
    import keras
    import tensorflow as tf

    import kdist

    if case == "keras mirrored":
        _logical_devices(tf)
        strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    elif case.startswith("keras"):
        strategy = tf.distribute.get_strategy()
    else:
        strategy = kdist.create_strategy("mirrored", 2)
    with strategy.scope():
        layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input([16]), *layers])
        if not case.startswith("keras"):
            model = kdist.Model.of(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


def _logical_devices(tf):
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)


def _callbacks(case, directory):
    import keras

    import kdist

    if case == "keras ModelCheckpoint":
        return [keras.callbacks.ModelCheckpoint(directory / "model.keras")]
    arguments = {
        "Telemetry": [directory],
        "Checkpoint": [directory / "checkpoints"],
        "EpochCheckpoint": [directory / "models"],
    }
    names = CALLBACKS if case == "all" else [case] if case in CALLBACKS else []
    return [getattr(kdist.callbacks, name)(*arguments.get(name, [])) for name in names]


def _print(case, found):
    steady = [each for each in found["samples"] if each[0] > FLAGS.steps / 10]
    half = len(steady) // 2
    begin, middle, end = (steady[index][1] / 1e6 for index in (0, half, -1))
    print(
        f"{case:20} {FLAGS.steps:8,} steps in {found['seconds']:6.0f} s, MB at 10 %, 55 %, 100 %: "
        f"{begin:7.1f} {middle:7.1f} {end:7.1f}; growth {end - begin:+6.1f}, "
        f"in the second half {end - middle:+6.1f}",
        flush=True,
    )
    if FLAGS.objects:
        print("  new objects:", ", ".join(f"{kind} {n:,}" for kind, n in found["objects"]))


if __name__ == "__main__":
    program.run(main)
