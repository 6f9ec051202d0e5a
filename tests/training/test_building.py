"""Models that Keras cannot build by a symbolic `call`, and random numbers without a seed."""

import contextlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.strategies import create_strategy
from tests.caught import no_warnings
from tests.forked import python_tasks
from tests.tiers import seldom
from tests.training import published_models as published

X = np.ones((8, 4), "float32")


def trained(build, strategy=None, epochs=2, **settings):
    """Trains with kdist under `strategy`, or with plain Keras; returns (model, data, logs)."""
    model, data = published.built(build, strategy)
    model.steps_per_execution = settings.pop("steps_per_execution", 1)
    for name, value in settings.items():
        setattr(model.training_state, name, value)
    return model, data, model.fit(data, epochs=epochs, verbose=0).history


def assert_same(model, plain):
    expected = published.variables(plain)
    for got, wanted in zip(published.variables(model), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("build", published.BUILDERS, ids=lambda b: b.__name__)
def test_equals_keras_on_one_device(mirrored, build):
    plain, _, expected = trained(build)
    model, _, history = trained(build, mirrored)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-4, atol=1e-6)
    assert_same(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"accumulate": 2, "steps_per_execution": 2}, {"local_steps": 1}], ids=str
)
def test_other_loops(mirrored, settings):
    # With SGD a round of one local step equals a step.
    plain, *_ = trained(published.speech)
    model, *_ = trained(published.speech, mirrored, **settings)
    if "local_steps" not in settings:
        assert_same(model, plain)
    assert all(np.isfinite(v).all() for v in published.variables(model))


class SumsSparse(keras.Model):
    """Reads the parts of a sparse tensor, which Keras's symbolic tensors do not have."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        x = inputs["x"]
        rows, numbers = x.indices[:, 0], x.values
        sums = tf.math.unsorted_segment_sum(numbers, rows, x.dense_shape[0])
        return self.dense(sums[:, tf.newaxis])


def test_a_model_that_only_a_dry_run_can_build_is_not_warned_of(mirrored):
    with mirrored.scope():
        model = kdist.Model.of(SumsSparse())
        model.compile("sgd", "mse", loss_reduction="mean")
    rows = {"x": tf.sparse.from_dense(X)}, X[:, :1]
    with no_warnings(message="unbuilt state"):
        model.fit(tf.data.Dataset.from_tensor_slices(rows).batch(8), verbose=0)


def test_nothing_stays_of_the_dry_run(mirrored):
    for build in (published.gan, published.speech):
        plain, data = published.built(build)
        first = next(iter(data))
        if build is published.gan:
            plain.generator(first[1])
            plain.discriminator(first[0])
        else:
            plain([first["source"], tf.one_hot(first["target"][:, :-1], 3)])
        before = random.getstate()
        model, *_ = trained(build, mirrored, epochs=0)
        assert random.getstate() == before
        for got, wanted in zip(model.trainable_weights, plain.trainable_weights, strict=True):
            assert got.path == wanted.path
            np.testing.assert_array_equal(got.numpy(), wanted.numpy())
        used = ("d_optimizer", "g_optimizer") if build is published.gan else ("optimizer",)
        for optimizer in (getattr(model, name) for name in used):
            others = [v for v in optimizer.variables if "learning_rate" not in v.path]
            assert optimizer.built
            assert not any(variable.numpy().any() for variable in others)
        assert not any(v.numpy().any() for v in model.metrics_variables)
        assert not model.losses


def test_evaluate_and_predict_build(mirrored):
    plain, data = published.built(published.vae)
    model, _ = published.built(published.vae, mirrored)
    predicted = plain.predict(data, verbose=0)
    np.testing.assert_allclose(model.predict(data, verbose=0), predicted, atol=1e-6)
    model, _ = published.built(published.vae, mirrored)
    batches = plain.evaluate(data, verbose=0), model.evaluate(data, verbose=0)
    np.testing.assert_allclose(batches[1], batches[0], rtol=1e-5)
    batch = next(iter(data))
    model, _ = published.built(published.no_call, mirrored)
    model.train_on_batch(X, X[:, :3])
    assert model.body.built
    model, _ = published.built(published.keyword_call, mirrored)
    assert model.predict_on_batch((X, X[:, :2])).shape == (8, 3)
    assert len(batch) == 2


@pytest.mark.slow
def test_a_checkpoint_is_restored_before_training(mirrored, tmp_path):
    expected, *_ = trained(published.gan, mirrored, epochs=3)
    for epochs in (2, 3):
        model, data = published.built(published.gan, mirrored)
        model.fit(data, epochs=epochs, verbose=0, callbacks=[kdist.callbacks.Checkpoint(tmp_path)])
    for got, wanted in zip(published.variables(model), published.variables(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


class Failing(kdist.Model):
    """Model whose `train_step` calls `fail`, on another line than its name."""

    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def train_step(self, data):
        return {"loss": self.fail(data[0])}


@pytest.mark.parametrize(
    ("fail", "error", "named"),
    [
        (lambda x: x.numpy(), (AttributeError, NotImplementedError), "x.numpy()"),
        (lambda x: keras.Variable(tf.reduce_sum(x)), ValueError, "initializer"),
        (lambda x: keras.layers.Dense(2).kernel, AttributeError, "kernel"),
    ],
)
def test_a_step_that_cannot_be_traced_is_named(mirrored, fail, error, named):
    with mirrored.scope():
        model = Failing(fail)
        model.compile("sgd", "mse")
    with pytest.raises(error) as raised:
        model.fit(X, X, verbose=0)
    message = "\n".join([str(raised.value), *raised.value.__notes__])
    assert named in message
    assert "test_building.py" in message


class Unseeded(kdist.Model):
    """Draws without a seed, in a layer and in `train_step`, and keeps what each row got."""

    def __init__(self):
        super().__init__()
        self.noise = keras.layers.Lambda(lambda x: x + keras.random.normal(keras.ops.shape(x)))
        self.dense = keras.layers.Dense(4, kernel_initializer="identity")

    def call(self, x):
        return self.dense(self.noise(x))

    def train_step(self, data):
        return {"drawn": keras.random.normal(keras.ops.shape(data[0])), "other": self(data[0])}


def _draw(strategy=None):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Unseeded()
        model.compile("sgd", "mse")
    return model, model.predict(X, verbose=0), model.predict(X, verbose=0)


@pytest.mark.parametrize("name", [None, "one_device", "mirrored"])
def test_unseeded_numbers_differ_between_rows_and_steps(name):
    strategy = create_strategy(name, 2 if name == "mirrored" else 1) if name else None
    model, first, second = _draw(strategy)
    assert len(np.unique([first, second])) == 2 * X.size
    drawn = []
    model.fit(X, X, verbose=0)
    for _ in range(2):
        logs = model.train_on_batch(X, X, return_dict=True)
        drawn += [logs["drawn"], logs["other"]]
    assert len(np.unique(drawn)) == np.size(drawn)
    _, again, _ = _draw(strategy)
    np.testing.assert_array_equal(again, first)


class Projection(keras.layers.Layer):
    """Random Fourier features: an integer as seed makes the projection a constant."""

    def call(self, x):
        return keras.ops.cos(x @ keras.random.normal((x.shape[1], 8), seed=1337))


def test_numbers_with_an_integer_as_seed_are_constants_on_all_replicas(mirrored):
    def trained(model_class):
        keras.utils.set_random_seed(0)
        inputs = keras.Input(X.shape[1:])
        model = model_class(inputs, keras.layers.Dense(1)(Projection()(inputs)))
        model.compile("adam", "mse")
        history = model.fit(X, X[:, :1], batch_size=6, shuffle=False, epochs=2, verbose=0).history
        return history["loss"], model.predict(X, verbose=0)

    expected = trained(keras.Model)
    with mirrored.scope():
        found = trained(kdist.Model)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)


def test_fit_draws_no_seeds_that_keras_does_not_draw(mirrored):
    keras.utils.set_random_seed(0)
    with mirrored.scope():
        model = kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    before = random.getstate()
    model.fit(X, X[:, :1], shuffle=False, verbose=0)
    assert random.getstate() == before
    # The generator that was created under one strategy is not used under another.
    with create_strategy("one_device", 1).scope():
        other = Unseeded()
        other.compile("sgd", "mse")
    assert np.isfinite(other.predict(X, verbose=0)).all()


JOB = """
import json, sys
import kdist
strategy = kdist.create_strategy(sys.argv[1], cluster_timeout_seconds=60)
sys.path.insert(0, sys.argv[2])
import keras, numpy as np
from tests.training import published_models as published
from tests.training.test_building import X, Unseeded
results = {}
for build in published.BUILDERS:
    model, data = published.built(build, strategy)
    model.training_state.max_staleness = 0
    model.fit(data, epochs=2, verbose=0)
    results[build.__name__] = [v.tolist() for v in published.variables(model)]
with strategy.scope():
    model = Unseeded()
    model.compile("sgd", "mse")
drawn = model.predict(np.repeat(X, 2, 0), batch_size=8, verbose=0)
results["unseeded"] = len(np.unique(drawn)) / drawn.size
print(json.dumps(results))
"""


@pytest.mark.parametrize(
    ("strategy", "tasks"),
    [
        pytest.param("multi_worker", {"worker": 2}, marks=pytest.mark.slow),
        *seldom([("parameter_server", {"chief": 1, "worker": 2, "ps": 1})]),
    ],
)
def test_equals_keras_over_several_processes(strategy, tasks, request):
    results = python_tasks(JOB, tasks, [strategy, str(request.config.rootpath)])[0]
    assert results.pop("unseeded") == 1.0
    for build in published.BUILDERS:
        plain, *_ = trained(build)
        expected = published.variables(plain)
        for got, wanted in zip(results[build.__name__], expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5, err_msg=build.__name__)
