"""Several processes on loopback train as one device does."""

import functools
import json

import keras
import numpy as np
import pytest

import kdist
from kdist.testing import assert_same_weights, python_tasks

# What each task does, and what plain Keras does on one device: the same lines.
TRAINING = """
import os, tempfile
import keras
import numpy as np
from sklearn.datasets import load_digits

def network(model_class, has_batch_norm, synchronized=True):
    layers = keras.layers
    keras.utils.set_random_seed(7)
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, use_bias=False)(inputs)
    if has_batch_norm:
        x = layers.BatchNormalization(synchronized=synchronized, momentum=0.9)(x)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    return model_class(inputs, layers.Dense(10, activation="softmax")(x))

def train(model_class, **options):
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).reshape(-1, 8, 8, 1).astype("float32")[:357], y[:357]
    model = network(model_class, "accumulate" not in options, "local_steps" not in options)
    model.compile(
        keras.optimizers.SGD(0.3, momentum=0.9, global_clipnorm=0.5),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
        **options,
    )
    directory = tempfile.mkdtemp()
    history = model.fit(
        x, y, batch_size=64, epochs=4, validation_split=0.1, verbose=0,
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=2),
            keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1),
            keras.callbacks.CSVLogger(directory + "/log.csv"),
            keras.callbacks.ModelCheckpoint(directory + "/model.keras"),
        ],
    )
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "iterations": int(model.optimizer.iterations.numpy()),
        "evaluated": [float(v) for v in model.evaluate(x, y, batch_size=64, verbose=0)],
        "predicted": model.predict(x[:37], batch_size=16, verbose=0).tolist(),
        "files": sorted(os.listdir(directory)),
    }
"""

TASK = f"""
import json, sys
arguments = json.loads(sys.argv.pop())
import kdist
{TRAINING}
strategy = kdist.create_strategy("multi_worker", arguments["devices"], cluster_timeout_seconds=60)
with strategy.scope():
    result = train(kdist.Model, **arguments["options"])
print(json.dumps(result))
"""


@functools.cache
def reference(accumulates):
    """Plain Keras on one device. Micro-batches have no counterpart there; the network differs."""
    names = {}
    exec(TRAINING, names)
    if not accumulates:
        return names["train"](keras.Model)
    whole_network = names["network"]
    names["network"] = lambda model_class, *_: whole_network(model_class, False)
    return names["train"](keras.Model)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {"steps_per_execution": 4}),
        (1, {"accumulate": 2, "steps_per_execution": 7}),
        (1, {"run_eagerly": True}),
        (1, {"steps_per_execution": "auto"}),
    ],
    ids=str,
)
def test_two_processes_train_as_one_device(devices, options):
    arguments = json.dumps({"devices": devices, "options": options})
    chief, other = python_tasks(TASK, {"worker": 2}, [arguments])
    assert chief.pop("files") == ["log.csv", "model.keras"]
    assert other.pop("files") == []
    assert chief == other
    expected = reference("accumulate" in options)
    assert_same_weights(chief["weights"], expected["weights"], 1e-5)
    assert chief["iterations"] == expected["iterations"]
    assert chief["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(chief["history"][name], values, atol=2e-5)
    np.testing.assert_allclose(chief["evaluated"], expected["evaluated"], atol=2e-5)
    np.testing.assert_allclose(chief["predicted"], expected["predicted"], atol=2e-5)


@functools.cache
def mirrored_reference():
    """Local SGD of two replicas in this process: 4 steps apart, then the mean."""
    names = {}
    exec(TRAINING, names)
    with kdist.create_strategy("mirrored", 2).scope():
        return names["train"](kdist.Model, local_steps=4)


@pytest.mark.parametrize(
    "options",
    [{}, {"steps_per_execution": 4}, {"steps_per_execution": "auto"}, {"run_eagerly": True}],
    ids=str,
)
def test_two_processes_train_apart_as_two_devices_do(options):
    arguments = json.dumps({"devices": 1, "options": {"local_steps": 4, **options}})
    chief, other = python_tasks(TASK, {"worker": 2}, [arguments])
    for result in (chief, other):
        result.pop("files")
    assert chief == other
    expected = mirrored_reference()
    assert_same_weights(chief["weights"], expected["weights"], 1e-5)
    assert chief["iterations"] == expected["iterations"]
    for name, values in expected["history"].items():
        np.testing.assert_allclose(chief["history"][name], values, atol=2e-5)
    np.testing.assert_allclose(chief["evaluated"], expected["evaluated"], atol=2e-5)
    np.testing.assert_allclose(chief["predicted"], expected["predicted"], atol=2e-5)


def test_training_apart_is_something_else():
    with pytest.raises(AssertionError, match="weights differ by"):
        assert_same_weights(mirrored_reference()["weights"], reference(False)["weights"], 1e-3)


def test_the_comparison_is_about_training():
    losses = reference(False)["history"]["loss"]
    assert losses[-1] < losses[0] - 0.05


UNLIKE = """
import json, sys
import kdist
index = json.loads(__import__("os").environ["TF_CONFIG"])["task"]["index"]
sys.argv.append(f"--learning_rate=0.{index}")
try:
    kdist.create_strategy("multi_worker", cluster_timeout_seconds=60)
except ValueError as error:
    print(json.dumps([str(error)]))
"""


def test_tasks_with_other_flags_are_refused():
    for (message,) in python_tasks(UNLIKE, {"worker": 2}):
        assert "the command line is --learning_rate=0.1 on worker 1" in message
        assert "has to be the same on all tasks" in message


LATE = """
import json
import kdist, tensorflow as tf
tf.constant(0)
try:
    kdist.create_strategy("multi_worker")
except RuntimeError as error:
    print(json.dumps([str(error)]))
"""


def test_after_tensorflow_has_started_it_is_too_late():
    for (message,) in python_tasks(LATE, {"worker": 2}):
        assert "TensorFlow has started" in message
        assert "before anything else runs on it" in message
