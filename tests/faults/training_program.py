"""Training for tests that disturb it: three epochs, with all state that a checkpoint has.

python training_program.py STRATEGY DIRECTORY OUTPUT

Checkpoints go to DIRECTORY. After training, the weights' digest and the history go to OUTPUT, and
the examples of each step to seen/<attempt>/<replica>.txt in the same directory. The environment
variable KDIST_FAULT=NAME:WORKER:STEP causes one fault; see `Fault`. KDIST_MIRROR is the directory
of a slow store to which the run is copied. KDIST_STEP_TIMEOUT_SECONDS is the time limit of a step.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import keras
import tensorflow as tf

import kdist
from tests.faults.slow_store import slow_url

# A step of this model takes a millisecond; the pause lets faults happen during training.
SECONDS_PER_STEP = 0.1
EXAMPLES, BATCH, EPOCHS = 1280, 64, 3


class RecordingModel(kdist.Model):
    """Writes a line for each micro-step of each replica: the step and marks of its examples."""

    def train_step(self, data):
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        marks = marks_of(data[0])
        path = f"file://{self.record_directory}/{replica}.txt"
        tf.print(self.optimizer.iterations.value, marks, output_stream=path, summarize=-1)
        return super().train_step(data)


class Fault(keras.callbacks.Callback):
    """Causes a fault on one worker after one step, once.

    The faults: `raise` an exception, `sleep` forever, set a weight to `nan`, or let Python's clock
    `jump` by a day.
    """

    def __init__(self, given, worker, done):
        super().__init__()
        self._name, on, step = given.split(":")
        self._step, self._is_here = int(step), int(on) == worker
        self._done = done

    def on_train_batch_end(self, batch, logs=None):
        if (
            not self._is_here
            or self._done.exists()
            or self.model.training_state.position.batch < self._step
        ):
            return
        self._done.touch()
        getattr(self, f"_{self._name}")()

    def _raise(self):
        raise RuntimeError("a mistake of the user's")

    def _sleep(self):
        time.sleep(1000)

    def _nan(self):
        weight = self.model.trainable_weights[-1]  # the last one, as a ReLU may hide NaN
        weight.assign(keras.ops.full_like(weight, float("nan")))

    def _jump(self):
        now = time.time
        time.time = lambda: now() + 86400


def marks_of(images):
    """Returns an integer for each image that is invariant to horizontal flips."""
    rows = tf.reduce_sum(tf.cast(images, tf.int64), (2, 3))
    return tf.reduce_sum(rows * tf.range(1, rows.shape[1] + 1, dtype=tf.int64) ** 4, 1)


def pipelines(strategy):
    """Returns augmented training and test data, for steps of two micro-steps.

    The environment variable KDIST_DATA replaces the digits by a directory of images.
    """
    replicas = strategy.num_replicas_in_sync
    batch = kdist.Batch(BATCH // 2 // replicas, replicas, 2)
    operations = "resize(8, 8)|random_flip()" if "KDIST_DATA" in os.environ else "random_flip()"
    return kdist.data.load(
        os.environ.get("KDIST_DATA", "digits"),
        batch=batch,
        examples=EXAMPLES,
        operations=operations,
        cache=False,
    )


def main(kind, directory, output):
    """Trains or resumes."""
    strategy = kdist.create_strategy(
        kind,
        2 if kind == "mirrored" else None,
        step_timeout_seconds=float(os.environ.get("KDIST_STEP_TIMEOUT_SECONDS", "60")),
        allow_remote=True,
    )
    keras.utils.set_random_seed(1)
    train, test = pipelines(strategy)
    with strategy.scope():
        model = _model(train.image_shape)
    worker = kdist.Cluster.resolve().index
    parent = pathlib.Path(output).absolute().parent
    model.record_directory = _new_directory(parent / "seen", worker)
    slow = keras.callbacks.Callback()
    slow.on_train_batch_end = lambda batch, logs: time.sleep(SECONDS_PER_STEP)
    callbacks = [
        kdist.callbacks.Checkpoint(directory, every_steps=5, mirror=_mirror_url()),
        keras.callbacks.ReduceLROnPlateau(patience=0),
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        kdist.callbacks.StopOnNonFiniteLoss(),
        slow,
    ]
    if os.environ.get("KDIST_FAULT"):
        callbacks.append(Fault(os.environ["KDIST_FAULT"], worker, parent / "fault-done"))
    history = model.fit(
        train, validation_data=test, epochs=EPOCHS, callbacks=callbacks, verbose=0
    ).history
    if kdist.strategies.is_chief(strategy):
        weights = b"".join(weight.tobytes() for weight in model.get_weights())
        result = {"digest": hashlib.sha256(weights).hexdigest(), "history": history}
        pathlib.Path(output).write_text(json.dumps(result))


def _mirror_url():
    if "KDIST_MIRROR" not in os.environ:
        return None
    return slow_url(os.environ["KDIST_MIRROR"])


def _new_directory(parent, worker):
    """Creates and returns the directory of this worker's next attempt."""
    attempt = 0
    while (parent / f"{attempt:03d}" / f"worker-{worker}").exists():
        attempt += 1
    (parent / f"{attempt:03d}" / f"worker-{worker}").mkdir(parents=True)
    return parent / f"{attempt:03d}"


def _model(shape):
    layers = keras.layers
    inputs = keras.Input(shape)
    x = layers.Dense(32, activation="relu")(layers.Flatten()(inputs))
    x = layers.Dropout(0.5, seed=3)(layers.BatchNormalization()(x))
    model = RecordingModel(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile(
        keras.optimizers.Adam(1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        accumulate=2,
    )
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
