"""A plain Keras script, run unchanged and with one added line."""

import subprocess
import sys

import numpy as np
import pytest

from tests.forked import python

THE_LINE = "import keras"
WITH_KDIST = "import keras, kdist; kdist.patch_keras()"

SCRIPT = f"""
import json, sys, tempfile
{THE_LINE}
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
devices = DEVICES
strategy = tf.distribute.MirroredStrategy([f"CPU:{{n}}" for n in range(devices)])


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(16, activation="tanh")
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.out(self.hidden(x))


class OwnStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {{metric.name: metric.result() for metric in self.metrics}}


def functional():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))


def sequential():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3, "softmax")]
    return keras.Sequential(layers)


class Count(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1


rng = np.random.default_rng(0)
x, y = rng.normal(size=(101, 8)).astype("float32"), rng.integers(0, 3, 101)
results = {{}}
for new_model in (functional, sequential, Subclassed, OwnStep):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = new_model()
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    count, directory = Count(), tempfile.mkdtemp()
    callbacks = [
        count,
        keras.callbacks.EarlyStopping("loss", min_delta=1.0, patience=3),
        keras.callbacks.ReduceLROnPlateau("loss", min_delta=1.0, patience=1),
        keras.callbacks.ModelCheckpoint(directory + "/last.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(directory + "/log.csv"),
    ]
    history = model.fit(
        x, y, batch_size=32, epochs=6, validation_split=0.2, callbacks=callbacks, verbose=0
    )
    results[new_model.__name__] = {{
        "batches": count.batches,
        "history": history.history,
        "evaluated": model.evaluate(x, y, batch_size=32, verbose=0),
        "predicted": model.predict(x, batch_size=32, verbose=0).tolist(),
        "lines": open(directory + "/log.csv").read().count("\\n"),
    }}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def on_one_device():
    return python(SCRIPT.replace("DEVICES", "1"))


@pytest.mark.exhaustive
def test_one_line_makes_two_devices_train_as_one(on_one_device):
    assert SCRIPT.count(f"{THE_LINE}\n") == 1
    script = SCRIPT.replace(f"{THE_LINE}\n", f"{WITH_KDIST}\n").replace("DEVICES", "2")
    found = python(script)
    for name, expected in on_one_device.items():
        assert found[name]["batches"] == expected["batches"]
        assert found[name]["lines"] == expected["lines"]
        assert found[name]["history"].keys() == expected["history"].keys()
        for metric, values in expected["history"].items():
            np.testing.assert_allclose(found[name]["history"][metric], values, atol=1e-5)
        np.testing.assert_allclose(found[name]["evaluated"], expected["evaluated"], atol=1e-5)
        np.testing.assert_allclose(found[name]["predicted"], expected["predicted"], atol=1e-5)


@pytest.mark.slow
def test_kdists_own_models_still_train_afterwards():
    code = """
import json, keras, kdist, numpy as np
early = keras.Sequential([keras.layers.Dense(1)])
kdist.patch_keras()
kdist.patch_keras()
x = np.ones((8, 4), "float32")
losses = []
inputs = keras.Input((4,))
for model in (
    early,
    kdist.Model(inputs, keras.layers.Dense(1)(inputs)),
    kdist.Model.of(keras.Sequential([keras.layers.Dense(1)])),
):
    model.compile("sgd", "mse", accumulate=2)
    losses.append(model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"])
print(json.dumps(losses))
"""
    for first, last in python(code):
        assert last < first


def the_line_of(code, text):
    """Runs a program, and returns the one line of its log that contains a text."""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    (line,) = [line for line in process.stderr.splitlines() if text in line]
    return line


@pytest.mark.slow
def test_a_model_outside_of_the_scope_is_reported_once():
    code = """
import kdist
import keras
import numpy as np

strategy = kdist.create_strategy("mirrored", devices=2)
kdist.patch_keras()

def train(name):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name=name)
    model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0)

train("outside")
with strategy.scope():
    train("inside")
with kdist.create_strategy("one_device").scope():
    train("intended")
del strategy
"""
    assert the_line_of(code, "strategy.scope()").startswith("kdist: 'outside' trains on one device")


@pytest.mark.slow
def test_a_model_that_keras_alone_trains_is_reported_once():
    code = """
import kdist
import keras
import numpy as np

strategy = kdist.create_strategy("mirrored", devices=2)

def train(model_class, name, times=1):
    with strategy.scope():
        model = model_class([keras.Input((2,)), keras.layers.Dense(1)], name=name)
        model.compile("sgd", "mse")
    for _ in range(times):
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0)

train(keras.Sequential, "plain", times=2)
kdist.patch_keras()
train(keras.Sequential, "patched")
"""
    assert the_line_of(code, "by Keras alone").startswith("kdist: 'plain' is trained")


@pytest.mark.slow
def test_a_model_of_keras_2_is_reported_once():
    code = """
import sys
import types

import tensorflow as tf
import kdist

class Model:  # as that of tf_keras, which is not installed with kdist
    name = "legacy"

    def __init__(self):
        self.distribute_strategy = tf.distribute.get_strategy()

    def make_train_function(self, force=False):
        return self.name

sys.modules["tf_keras"] = types.SimpleNamespace(Model=Model)
for _ in range(2):
    strategy = kdist.create_strategy("mirrored", devices=2)
with strategy.scope():
    model = Model()
for _ in range(2):
    assert model.make_train_function(force=True) == "legacy"
"""
    line = the_line_of(code, "by Keras alone")
    assert line.startswith("kdist: 'legacy' is trained")
    assert "Keras 2" in line
