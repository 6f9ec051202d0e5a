"""Several processes on loopback train as one device does."""

import functools
import json

import keras
import numpy as np
import pytest

import kdist
from kdist.testing import assert_same_weights
from tests.forked import python_tasks
from tests.tiers import seldom

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

def train(model_class, callbacks=(), **options):
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
            *callbacks,
        ],
    )
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "iterations": int(model.optimizer.iterations.numpy()),
        "evaluated": [float(v) for v in model.evaluate(x, y, batch_size=64, verbose=0)],
        "predicted": model.predict(x[:37], batch_size=16, verbose=0).tolist(),
        "files": sorted(os.listdir(directory)),
        "saw_file": getattr(model, "saw_file", None),
    }
"""

TASK = f"""
import json, logging, pathlib, sys, time
arguments = json.loads(sys.argv.pop())
import kdist
import tensorflow as tf
{TRAINING}
warned = []
tf.get_logger().addHandler(logging.Handler())
tf.get_logger().handlers[-1].emit = lambda record: warned.append(record.getMessage())
class SlowFile(keras.callbacks.Callback):
    only_writes = True

    def on_train_end(self, logs=None):
        time.sleep(0.5)
        pathlib.Path(arguments["file"]).touch()

class Model(kdist.Model):
    def fit(self, *args, **options):
        history = super().fit(*args, **options)
        self.saw_file = pathlib.Path(arguments["file"]).exists()
        return history

strategy = kdist.create_strategy("multi_worker", arguments["devices"], cluster_timeout_seconds=60)
with strategy.scope():
    result = train(Model, [SlowFile()], **arguments["options"])
result["warned"] = [text for text in warned if "overhead" in text or "retracing" in text]
print(json.dumps(result))
"""


def assert_trained_alike(result, expected):
    """Weights, logs, evaluations and predictions of a training are those that are expected."""
    assert_same_weights(result["weights"], expected["weights"], 1e-5)
    assert result["iterations"] == expected["iterations"]
    assert result["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(result["history"][name], values, atol=2e-5)
    np.testing.assert_allclose(result["evaluated"], expected["evaluated"], atol=2e-5)
    np.testing.assert_allclose(result["predicted"], expected["predicted"], atol=2e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"steps_per_execution": 4}),
        pytest.param(1, {"accumulate": 2, "steps_per_execution": 7}, marks=pytest.mark.slow),
        *seldom([(1, {}), (1, {"run_eagerly": True}), (1, {"steps_per_execution": "auto"})]),
    ],
    ids=str,
)
def test_two_processes_train_as_one_device(tmp_path, devices, options):
    file = str(tmp_path / "file")
    arguments = json.dumps({"devices": devices, "options": options, "file": file})
    chief, other = python_tasks(TASK, {"worker": 2}, [arguments])
    assert chief.pop("files") == ["log.csv", "model.keras"]
    assert other.pop("files") == []
    assert chief == other
    assert chief["saw_file"], "workers did not wait for a file of the chief"
    assert "run_eagerly" in options or chief["warned"] == []
    expected = reference("accumulate" in options)
    assert_trained_alike(chief, expected)


@functools.cache
def mirrored_reference():
    """Local SGD of two replicas in this process: 4 steps apart, then the mean."""
    names = {}
    exec(TRAINING, names)
    with kdist.create_strategy("mirrored", 2).scope():
        return names["train"](kdist.Model, local_steps=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 4},
        *seldom([({},), ({"steps_per_execution": "auto"},), ({"run_eagerly": True},)]),
    ],
    ids=str,
)
def test_two_processes_train_apart_as_two_devices_do(tmp_path, options):
    options = {"local_steps": 4, **options}
    arguments = json.dumps({"devices": 1, "options": options, "file": str(tmp_path / "file")})
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


@pytest.mark.slow
def test_training_apart_is_something_else():
    with pytest.raises(AssertionError, match="weights differ by"):
        assert_same_weights(mirrored_reference()["weights"], reference(False)["weights"], 1e-3)


def test_the_comparison_is_about_training():
    losses = reference(False)["history"]["loss"]
    assert losses[-1] < losses[0] - 0.05


PIPELINES = """
import keras
import numpy as np
import kdist

def train(model_class, local, replicas, **options):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (100, 6, 6, 1), "uint8")
    source = kdist.data.from_arrays(x, (x[:, 1:3, 1:3].mean((1, 2, 3)) > 128).astype("int32"), 2)
    batch = kdist.Batch(local, replicas, options.get("accumulate", 1))
    operations = "random_crop(5, 5)|random_flip()"
    fit = kdist.data.Pipeline(source, batch, seed=3, operations=operations)
    test = kdist.data.Pipeline(
        source.subset(53, 0), batch, training=False, operations="resize(5, 5)"
    )
    keras.utils.set_random_seed(7)
    inputs = keras.Input((5, 5, 1))
    z = keras.layers.Conv2D(4, 3)(keras.layers.Rescaling(1 / 255)(inputs))
    z = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(z))
    model = model_class(inputs, keras.layers.Dense(2, activation="softmax")(z))
    model.compile(
        keras.optimizers.SGD(0.3, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **options,
    )
    history = model.fit(fit, epochs=3, validation_data=test, verbose=0).history
    images = np.concatenate([x for x, *_ in test.dataset().as_numpy_iterator()])
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "history": {name: [float(v) for v in values] for name, values in history.items()},
        "evaluated": [float(v) for v in model.evaluate(test, verbose=0)],
        "trained": [float(v) for v in model.evaluate(fit, verbose=0)],
        "predicted": model.predict(test, verbose=0).tolist(),
        "of arrays": model.predict(images[:53], verbose=0).tolist(),
        "batch": model.training_state.global_batch_size,
    }
"""

PIPELINE_TASK = f"""
import json, sys
local, devices, options = json.loads(sys.argv.pop())
{PIPELINES}
read = []
own = kdist.data.Pipeline.dataset
def dataset(pipeline, start_step=0, part=None):
    read.append(part)
    return own(pipeline, start_step, *([part] if part else []))
strategy = kdist.create_strategy("multi_worker", devices, cluster_timeout_seconds=60)
with strategy.scope():
    kdist.data.Pipeline.dataset = dataset
    result = train(kdist.Model, local, strategy.num_replicas_in_sync, **options)
print(json.dumps([result, read]))
"""


@functools.cache
def pipeline_reference(local_steps=None):
    """One device with batches of 16; local SGD, whose replicas need to be two, on two."""
    names = {}
    exec(PIPELINES, names)
    replicas = 2 if local_steps else 1
    name = "mirrored" if local_steps else "one_device"
    with kdist.create_strategy(name, replicas).scope():
        return names["train"](kdist.Model, 16 // replicas, replicas, local_steps=local_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "devices", "options"),
    [
        (4, 2, {"steps_per_execution": 4}),
        pytest.param(
            4, 1, {"accumulate": 2, "steps_per_execution": "auto"}, marks=pytest.mark.slow
        ),
        pytest.param(8, 1, {"local_steps": 4, "steps_per_execution": 3}, marks=pytest.mark.slow),
        *seldom([(8, 1, {}), (8, 1, {"run_eagerly": True})]),
    ],
    ids=str,
)
def test_workers_read_their_own_part_of_a_pipeline(local, devices, options):
    """Also of augmented images, and of a last batch with padding: 53 examples, 16 a batch."""
    arguments = json.dumps([local, devices, options])
    (chief, read), (other, read_by_other) = python_tasks(PIPELINE_TASK, {"worker": 2}, [arguments])
    assert [0, 2] in read
    assert [1, 2] in read_by_other
    assert chief == other
    assert chief["batch"] == 16
    expected = pipeline_reference(options.get("local_steps"))
    assert len(chief["predicted"]) == 53
    assert_same_weights(chief["weights"], expected["weights"], 1e-5)
    for name, values in expected["history"].items():
        np.testing.assert_allclose(chief["history"][name], values, atol=2e-5)
    for what in ("evaluated", "trained", "predicted", "of arrays"):
        np.testing.assert_allclose(chief[what], expected[what], atol=2e-5)


EVERY_EXAMPLE = """
import json
import keras, numpy as np, tensorflow as tf
import kdist
strategy = kdist.create_strategy("multi_worker", 1, cluster_timeout_seconds=60)
images = np.arange(48, dtype="uint8").reshape(-1, 1, 1, 1)
pipelines = [
    kdist.data.Pipeline(
        kdist.data.from_arrays(images, np.zeros(48, int), 1), kdist.Batch(4, 2), training=training
    )
    for training in (True, False)
]
seen = []
own = kdist.data.Pipeline.dataset
def dataset(pipeline, *args, **kwargs):
    numbers = []
    seen.append([pipeline.training, numbers])
    def note(x, *others):
        def keep(x):
            numbers.extend(x.ravel().tolist())
            return x
        return (tf.ensure_shape(tf.numpy_function(keep, [x], x.dtype), x.shape), *others)
    return own(pipeline, *args, **kwargs).take(6).map(note, num_parallel_calls=1)
kdist.data.Pipeline.dataset = dataset
with strategy.scope():
    inputs = keras.Input((1, 1, 1))
    model = kdist.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(inputs)))
    model.compile(keras.optimizers.SGD(0.0), "mse")
model.fit(pipelines[0], verbose=0)
model.evaluate(pipelines[1], verbose=0)
model.predict(pipelines[1], verbose=0)
print(json.dumps([numbers for _, numbers in seen]))
"""


@pytest.mark.slow
def test_each_example_is_read_by_one_worker_once():
    one, other = python_tasks(EVERY_EXAMPLE, {"worker": 2})
    assert len(one) == len(other) == 3  # fit, evaluate and predict
    for read, read_by_other in zip(one, other, strict=True):
        assert len(read) == len(read_by_other) == 24
        assert sorted(read + read_by_other) == list(range(48))


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
        assert "must be the same on all tasks" in message


# The second worker has drawn other numbers, and receives those of the first.
OTHER_TYPES = """
import json, os
import kdist
layout = kdist.Layout(data=2, shard="optimizer", min_shard_bytes=64)
strategy = kdist.create_strategy(layout)
import keras, numpy as np, tensorflow as tf
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
types = "bfloat16 int8 uint8 int16 uint16 uint32 uint64 float8_e4m3fn float16 int64 bool".split()
numbers = {}
for name in types:
    dtype = tf.as_dtype(name)
    highest = 1 if name == "bool" else dtype.max
    with strategy.scope():
        variable = tf.Variable(np.array([1, 0 if task else highest], dtype.as_numpy_dtype))
    numbers[name] = bool(variable.numpy()[1] == highest)

keras.config.set_dtype_policy("bfloat16")
keras.utils.set_random_seed(1)
with strategy.scope():
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(32, activation="tanh")
    model = kdist.Model(inputs, keras.layers.Dense(3)(hidden(inputs)))
    model.compile("adam", "mse")
x = np.random.default_rng(task).normal(size=(12, 16)).astype("float32")
model.fit(x, x[:, :3], batch_size=4, verbose=0)
predicted = model.predict(x[:7], batch_size=4, verbose=0)
model.quantize("int8")
kernel = hidden.kernel
print(json.dumps([numbers, str(predicted.dtype), kernel.dtype, kernel.numpy().tolist()]))
"""


def test_workers_exchange_numbers_of_all_types():
    """TensorFlow broadcasts and gathers few types."""
    first, second = python_tasks(OTHER_TYPES, {"worker": 2})
    assert first == second
    equal, *types, kernel = first
    assert all(equal.values()), equal
    assert types == ["bfloat16", "int8"]
    assert np.abs(kernel).max() == 127


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
        assert "TensorFlow has already started" in message
        assert "before anything else uses TensorFlow" in message


STOPPED = """
import json, os, signal, subprocess, sys, time
import kdist
strategy = kdist.create_strategy("multi_worker", step_timeout_seconds=3)
import keras, tensorflow as tf
import numpy as np

class StopTheOther(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and not kdist.strategies.is_chief(strategy):
            # Stopped for good, and waked up by another process, so that the test ends.
            subprocess.Popen(["sh", "-c", f"sleep 9; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

with strategy.scope():
    model = kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
x = np.ones((3200, 4), "float32")
try:
    model.fit(x, x[:, :1], batch_size=32, verbose=0, callbacks=[StopTheOther()])
    said = "nothing"
except tf.errors.OpError as error:
    said, at = str(error), time.monotonic()
print(json.dumps([type(said).__name__, said]))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_a_worker_that_stops_is_waited_for_no_longer_than_said():
    chief, other = python_tasks(STOPPED, {"worker": 2}, timeout_seconds=120)
    assert "a step took longer than 3 s: another worker has stopped, died" in chief[1]
    assert "nothing" not in other[1]
