"""Parameter servers: one step after the other they train as one device; all at once, they learn."""

import json

import pytest

from tests.equivalence.test_workers import TRAINING, assert_trained_alike, reference
from tests.forked import python_tasks
from tests.tiers import seldom

TASK = f"""
import json, sys
arguments = json.loads(sys.argv.pop())
import kdist
strategy = kdist.create_strategy("parameter_server", cluster_timeout_seconds=60)
{TRAINING}
with strategy.scope():
    result = train(kdist.Model, max_staleness=0, **arguments["options"])
print(json.dumps(result))
"""


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        pytest.param(2, {"steps_per_execution": 4}, marks=pytest.mark.slow),
        *seldom(
            [
                (1, {}),
                (1, {"accumulate": 2, "steps_per_execution": 7}),
                (1, {"steps_per_execution": "auto"}),
            ]
        ),
    ],
    ids=str,
)
def test_one_step_after_the_other_they_train_as_one_device(servers, options):
    tasks = {"chief": 1, "worker": 2, "ps": servers}
    chief, *others = python_tasks(TASK, tasks, [json.dumps({"options": options})])
    assert others == [None] * (2 + servers)
    expected = reference("accumulate" in options)
    assert chief["files"] == expected["files"]
    assert_trained_alike(chief, expected)


EMBEDDING = """
import json, pathlib, sys, tempfile
import kdist
import tensorflow as tf
partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
strategy = kdist.create_strategy("parameter_server", partitioner=partitioner)
import keras
import numpy as np

def train(model_class, rows):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,), dtype="int32")
    layer = keras.layers.Embedding(rows, 16, embeddings_regularizer="l2")
    x = keras.layers.Flatten()(layer(inputs))
    model = model_class(inputs, keras.layers.Dense(2, activation="softmax")(x))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy",
                  **({} if model_class is keras.Model else {"max_staleness": 0}))
    draw = np.random.default_rng(0)
    x = draw.integers(0, rows, (160, 5)).astype("int32")
    model.fit(x, x.sum(1) % 2, batch_size=32, epochs=3, verbose=0, shuffle=False)
    return model, layer

results = {}
for name, rows in {"small": 101, "large": 9001}.items():
    with strategy.scope():
        model, layer = train(kdist.Model, rows)
    parts = [(part.value.device[-29:], list(part.shape)) for part in layer._parts]
    file = pathlib.Path(tempfile.mkdtemp()) / "model.keras"
    model.save(file)
    on_one_device = keras.models.load_model(file)
    reference, _ = train(keras.Model, rows)
    results[name] = {
        "parts": parts,
        "class": type(on_one_device.layers[1]).__name__,
        "difference": max(
            float(np.abs(a - b).max())
            for a, b in zip(on_one_device.get_weights(), reference.get_weights(), strict=True)
        ),
    }
    with strategy.scope():
        again = kdist.Model.of(keras.models.load_model(file))
    results[name]["again"] = float(
        np.abs(again.layers[1].embeddings - layer.embeddings).max()
    )
print(json.dumps(results))
"""


@pytest.mark.slow
def test_an_embedding_lies_on_two_servers_and_trains_as_on_one_device():
    outcome, *_ = python_tasks(EMBEDDING, {"chief": 1, "worker": 2, "ps": 2})
    assert [rows for _, rows in outcome["small"]["parts"]] == [[51, 16], [50, 16]]
    assert [rows for _, rows in outcome["large"]["parts"]] == [[4501, 16], [4500, 16]]
    for result in outcome.values():
        servers = {device.split("/task:")[1][0] for device, _ in result["parts"]}
        assert servers == {"0", "1"}
        assert result["class"] == "Embedding"
        assert result["difference"] < 1e-5
        assert result["again"] == 0


OPTIMIZERS = """
import json
import kdist
strategy = kdist.create_strategy("parameter_server")
import keras
import numpy as np
from sklearn.datasets import load_digits

def train(model_class, optimizer, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    model = model_class(inputs, keras.layers.Dense(10, activation="softmax")(x))
    model.compile(optimizer(0.01), "sparse_categorical_crossentropy", **options)
    # Keras by itself builds it in the step's function; ScheduleFreeAdamW then begins at zero.
    model.optimizer.build(model.trainable_variables)
    x, y = load_digits(return_X_y=True)
    model.fit((x / 16)[:320], y[:320], batch_size=32, epochs=1, verbose=0, shuffle=False)
    return model.get_weights()

found = {}
for name in sorted(vars(keras.optimizers)):
    optimizer = getattr(keras.optimizers, name)
    is_one = isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer)
    if is_one and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer"):
        expected = train(keras.Model, optimizer)
        with strategy.scope():
            weights = train(kdist.Model, optimizer, max_staleness=0)
        pairs = zip(weights, expected, strict=True)
        found[name] = max(float(np.abs(a - b).max()) for a, b in pairs)
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_every_optimizer_of_keras_is_that_of_one_device():
    found, *_ = python_tasks(OPTIMIZERS, {"chief": 1, "worker": 2, "ps": 1})
    assert len(found) >= 14
    assert {name: by for name, by in found.items() if not by < 1e-5} == {}


UNKNOWN_LENGTH = """
import json, tempfile, warnings
import kdist
strategy = kdist.create_strategy("parameter_server")
import keras
import numpy as np
import tensorflow as tf
from kdist.callbacks import Checkpoint

x, y = np.random.default_rng(0).normal(size=(2, 48, 4)).astype("float32")

def batches(number):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).take(number)
    return data.filter(lambda x, y: True)

class Epochs(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.ends = []
    def on_epoch_end(self, epoch, logs=None):
        position = self.model.training_state.position
        self.ends.append([position.step, position.batch, int(self.model.optimizer.iterations)])

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.training_state.position.batch == 12:
            raise InterruptedError

def fit(number, *callbacks, steps_per_execution=4, max_staleness=0, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = keras.Input((4,))
        model = kdist.Model(inputs, keras.layers.Dense(4)(inputs))
        model.compile("adam", "mse", steps_per_execution=steps_per_execution,
                      max_staleness=max_staleness)
    options = {"epochs": 2, "verbose": 0, **options}
    ends = Epochs()
    try:
        model.fit(batches(number), callbacks=[ends, *callbacks], shuffle=False, **options)
    except InterruptedError:
        pass
    return ends.ends, [weights.tolist() for weights in model.get_weights()]

results = {}
for staleness in (0, None):
    results[f"whole {staleness}"], _ = fit(6, max_staleness=staleness)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results[f"within {staleness}"], _ = fit(
            5, max_staleness=staleness, epochs=4, steps_per_epoch=4)
    results[f"warned {staleness}"] = any("ran out of data" in str(w.message) for w in caught)
directory = tempfile.mkdtemp()
fit(6, Interrupt(), Checkpoint(directory, every_steps=1))
checkpoint = Checkpoint(directory)
resumed = fit(6, checkpoint)[1]
results["resumed"] = [checkpoint.resumed_from, resumed == fit(6)[1]]

with strategy.scope():
    layer = keras.layers.Dense(4)
    layer.build((None, 4))
    optimizer = keras.optimizers.Adam()

@kdist.step(strategy, steps_per_execution=4)
def train_step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = kdist.mean(tf.reduce_sum(tf.square(layer(x) - y), -1))
    variables = layer.trainable_variables
    kdist.apply(optimizer, tape.gradient(loss, variables), variables)
    return {"loss": loss}

ends = Epochs()
with kdist.session(layer, optimizer, callbacks=[ends]) as session:
    list(session.run(train_step, batches(6), epochs=2))
results["session"] = ends.ends
print(json.dumps(results))
"""


@pytest.mark.exhaustive
def test_data_of_unknown_length_count_the_steps_that_ran():
    results, *_ = python_tasks(UNKNOWN_LENGTH, {"chief": 1, "worker": 2, "ps": 1})
    for name in ("whole 0", "whole None", "session"):
        assert results[name] == [[6, 6, 6], [6, 12, 12]], name
    for staleness in (0, None):
        ends = [[4, 4, 4], [1, 5, 5], [4, 9, 9], [1, 10, 10]]
        assert results[f"within {staleness}"] == ends
        assert results[f"warned {staleness}"]
    assert results["resumed"] == [10, True]


OWN_STEPS = """
import json
import kdist
strategy = kdist.create_strategy("parameter_server")
import keras
import numpy as np
import tensorflow as tf

def logging_class(base):
    class Logging(base):
        # Logs a mean, a sum, and metrics, and counts its steps.
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.number = self.add_weight(shape=(), initializer="zeros", trainable=False)
            super().build(shape)
        def train_step(self, data):
            self.count.assign_add(1.0)
            self.number.assign(self.number + 1.0)
            return super().train_step(data)
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            errors = tf.abs(y - y_pred)
            return {**logs, "mean": tf.reduce_mean(errors), "sum": tf.reduce_sum(errors)}
    return Logging

def sometimes_class(base):
    class Sometimes(base):
        # Updates its weights in every second step.
        def build(self, shape):
            super().build(shape)
            self.calls = tf.Variable(0, trainable=False)
            self.sums = [tf.Variable(tf.zeros_like(v), trainable=False)
                         for v in self.trainable_variables]
        def train_step(self, data):
            x, y = data
            self.calls.assign_add(1)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables)):
                total.assign_add(gradient)
            tf.cond(self.calls % 2 == 0, self.update, lambda: None)
            return self.compute_metrics(x, y, y_pred)
        def update(self):
            self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables))
            for total in self.sums:
                total.assign(tf.zeros_like(total))
    return Sometimes

def train(model_class, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    model = model_class(inputs, keras.layers.Dense(1)(inputs))
    model.build((None, 4))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
    x, y = np.random.default_rng(0).normal(size=(2, 44, 4)).astype("float32")
    history = model.fit(x, y[:, :1], batch_size=16, epochs=3, verbose=0, shuffle=False)
    weights = {v.path: v.numpy() for v in model.variables}
    return {**history.history, **weights}

found = {}
for name, define, accumulate in (
    ("logs", logging_class, 1), ("micro-batches", logging_class, 2), ("tf.cond", sometimes_class, 1)
):
    expected = train(define(keras.Model))
    with strategy.scope():
        results = train(define(kdist.Model), max_staleness=0, accumulate=accumulate)
    found[name] = sorted(results) == sorted(expected) and max(
        float(np.max(np.abs(np.subtract(results[key], expected[key])))) for key in expected)
try:
    with strategy.scope():
        train(sometimes_class(kdist.Model), accumulate=2)
except ValueError as error:
    refused = str(error)
print(json.dumps([found, refused]))
"""


@pytest.mark.slow
def test_steps_of_ones_own_are_those_of_one_device():
    (found, refused), *_ = python_tasks(OWN_STEPS, {"chief": 1, "worker": 1, "ps": 1})
    assert "within tf.cond" in refused
    assert found == pytest.approx({"logs": 0, "micro-batches": 0, "tf.cond": 0}, abs=1e-5)
