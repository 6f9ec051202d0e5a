"""Devices, model, and timing of `fit` for all rivals on TensorFlow."""

import os
import sys
import time
from collections.abc import Callable, Sequence

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # all rivals use the same CPU cores

import keras
import tensorflow as tf

import kdist
from benchmarks.rivals import operations
from benchmarks.rivals.workload import CLASSES, IMAGE_SHAPE, LEARNING_RATE, Workload, report

VERSIONS = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
PRECISIONS = {"float32": "float32", "bfloat16": "mixed_bfloat16"}


def logical_cpus(workload: Workload) -> list[str]:
    """Returns a logical CPU device for each replica, created as in TensorFlow's guides."""
    tf.config.threading.set_intra_op_parallelism_threads(workload.threads_per_operation)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * workload.replicas,
    )
    return [f"CPU:{replica}" for replica in range(workload.replicas)]


def new_model(workload: Workload) -> keras.Model:
    """Returns a model of `kdist.models`; call it in the strategy's scope."""
    return kdist.models.create(
        workload.model,
        input_shape=IMAGE_SHAPE,
        num_classes=CLASSES,
        precision=PRECISIONS[workload.precision],
    )


def as_keras(model: keras.Model) -> keras.Model:
    """Returns the same network as a plain Keras model."""
    return keras.Model.from_config(model.get_config())


def dataset(arrays) -> tf.data.Dataset:
    """Returns an endless dataset of slices of the arrays, so that reading costs almost nothing."""
    return tf.data.Dataset.from_tensor_slices(arrays).repeat().prefetch(tf.data.AUTOTUNE)


def time_fit(
    workload: Workload,
    model: keras.Model,
    more_callbacks: Sequence[keras.callbacks.Callback] = (),
    between: Callable[[], None] = lambda: None,
):
    """Compiles the model, trains it once, and then reports the training time of each turn.

    Args:
        workload: the workload.
        model: the model, not compiled.
        more_callbacks: callbacks of all trainings.
        between: called after the first training.
    """
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=workload.steps_per_call,
    )
    batches = dataset(workload.arrays())

    def fit(*callbacks):
        return model.fit(
            batches,
            steps_per_epoch=workload.steps,
            verbose=0,
            callbacks=[*callbacks, *more_callbacks],
        )

    fit()
    between()
    if workload.profile:
        report_profile(workload, fit)
        return
    clock = _Clock()
    if workload.turns > 1:
        print("ready", flush=True)
    for _ in range(workload.turns):
        if workload.turns > 1:
            sys.stdin.readline()
        history = fit(clock)
        report(workload, clock.seconds, history.history["loss"][-1], VERSIONS)


def report_profile(workload: Workload, train):
    """Reports a run of `train` with its operations."""
    started = time.perf_counter()
    table = operations.during(train)
    report(workload, time.perf_counter() - started, 0.0, VERSIONS, operations=table)


class _Clock(keras.callbacks.Callback):
    """Times epochs only, because tf.data's autotuning may delay the return of `fit`."""

    def on_epoch_begin(self, epoch, logs=None):
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self._began
