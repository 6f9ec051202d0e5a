import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.testing import assert_same_weights, python

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def functional(model_class):
    inputs = keras.Input((4,))
    return model_class(inputs, keras.layers.Dense(2)(inputs))


class Subclassed(kdist.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


class Plain(keras.Model):
    def __init__(self, units=2):
        super().__init__()
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


class Configured(Plain):
    def get_config(self):
        return {"units": self.units}


def trains(model):
    model.compile("sgd", "mse")
    before = model.get_weights() if model.built else None
    losses = model.fit(X, Y, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert before is None or not np.array_equal(before[0], model.get_weights()[0])


def test_functional_and_subclassed_train_side_by_side(mirrored):
    class Derived(kdist.Model):
        pass

    with mirrored.scope():
        for model in (functional(kdist.Model), functional(Derived), Subclassed()):
            trains(model)
    assert isinstance(functional(Derived), Derived)
    trains(Subclassed())  # not changed by the functional use of its base


def test_of_converts_models_in_place(mirrored):
    with mirrored.scope():
        sequential = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        plain = Plain()
        plain(X)
        for model in (functional(keras.Model), sequential, plain):
            weights = model.get_weights()
            ours = kdist.Model.of(model)
            assert ours is model
            assert isinstance(ours, kdist.Model)
            assert_same_weights(ours.get_weights(), weights, 0.0)
            trains(ours)
            assert kdist.Model.of(ours) is ours


def test_of_keeps_compilation_and_optimizer_state():
    model = functional(keras.Model)
    model.compile("adam", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    ours = kdist.Model.of(model)
    ours.fit(X, Y, batch_size=4, verbose=0)
    assert int(ours.optimizer.iterations.numpy()) == 4


def test_of_copies_into_the_scope_of_another_strategy(mirrored):
    outside = [
        functional(keras.Model),
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]),
    ]
    outside.append(Configured())
    outside[-1](X)
    with mirrored.scope():
        for model in outside:
            copy = kdist.Model.of(model)
            assert copy is not model
            assert_same_weights(copy.get_weights(), model.get_weights(), 0.0)
            assert copy.distribute_strategy is mirrored
            trains(copy)


def test_of_rejects(mirrored):
    with pytest.raises(TypeError, match="keras.Model, got int"):
        kdist.Model.of(3)
    unbuilt = Plain()
    with mirrored.scope(), pytest.raises(ValueError, match="has no variables yet"):
        kdist.Model.of(unbuilt)
    plain = Plain(3)
    plain(X)
    with mirrored.scope(), pytest.raises(ValueError, match="outside the strategy's scope"):
        kdist.Model.of(plain)


@pytest.mark.parametrize("kind", ["functional", "sequential", "nested"])
def test_files_are_those_of_plain_keras(tmp_path, kind):
    def build(model_class):
        if kind == "functional":
            return functional(model_class)
        if kind == "sequential":
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            return model if model_class is keras.Model else kdist.Model.of(model)
        inputs = keras.Input((4,))
        return model_class(inputs, functional(model_class)(inputs))

    configs = []
    for model_class in (kdist.Model, keras.Model):
        keras.utils.clear_session(free_memory=False)
        model = build(model_class)
        model.compile("adam", "mse", jit_compile=False)
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "model.keras")
        configs.append(zipfile.ZipFile(tmp_path / "model.keras").read("config.json"))
    assert b"kdist" not in configs[0]
    assert json.loads(configs[0])["class_name"] == json.loads(configs[1])["class_name"]
    assert json.loads(configs[0])["module"] == json.loads(configs[1])["module"]


def test_a_checkpoint_of_a_replicated_model_resumes_in_plain_keras(tmp_path, mirrored):
    with mirrored.scope():
        model = functional(kdist.Model)
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    assert type(plain) is type(functional(keras.Model))
    assert_same_weights(plain.get_weights(), model.get_weights(), 0.0)
    assert int(plain.optimizer.iterations.numpy()) == 2
    np.testing.assert_allclose(plain.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)


def test_fit_evaluate_and_predict_accept_pipelines(strategy):
    batch = kdist.Batch.from_global(16, replicas=strategy.num_replicas_in_sync)
    train, test = kdist.data.load("digits", batch=batch, examples=100)
    with strategy.scope():
        model = kdist.models.mlp(train.image_shape, train.num_classes, widths=(8,))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(train, validation_data=test, epochs=2, verbose=0).history
    assert int(model.optimizer.iterations.numpy()) == 2 * 6
    assert model.training_state.global_batch_size == 16
    result = model.evaluate(test, verbose=0, return_dict=True)
    assert result["accuracy"] == pytest.approx(history["val_accuracy"][-1], abs=1e-7)
    assert model.predict(test, verbose=0).shape == (360, 10)
    with pytest.raises(ValueError, match="evaluation pipeline.*validation_data"):
        model.fit(test)


@pytest.mark.parametrize("kind", ["known length", "unknown length", "arrays", "batches"])
def test_initial_epoch_begins_with_the_first_batch_as_in_keras(kind):
    x, y = np.arange(24, dtype="float32").reshape(-1, 2), np.ones((12, 1), "float32")

    def weights(model_class):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2,))
        model = model_class(inputs, keras.layers.Dense(1)(inputs))
        model.compile("adam", "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
        if kind == "unknown length":
            data = data.filter(lambda x, y: True)
        if kind == "batches" and model_class is kdist.Model:
            data = kdist.data.from_batches(data)
        arrays = {"x": x, "y": y, "batch_size": 2, "shuffle": False}
        options = {"steps_per_epoch": 2, "initial_epoch": 2, "epochs": 4, "verbose": 0}
        model.fit(**arrays if kind == "arrays" else {"x": data}, **options)
        return model.get_weights()

    for ours, expected in zip(weights(kdist.Model), weights(keras.Model), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.slow
def test_distributed_datasets_are_those_that_were_distributed(mirrored):
    x = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
    plain = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1))).batch(4)

    def results(data):
        keras.utils.set_random_seed(0)
        with mirrored.scope():
            model = kdist.Model.of(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
            model.compile("adam", "mse")
        history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
        predictions = model.predict(data, verbose=0)
        return [*history.values(), model.evaluate(data, verbose=0), predictions]

    ours = results(mirrored.experimental_distribute_dataset(plain))
    for result, expected in zip(ours, results(plain), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("steps", [None, 2], ids=["whole epochs", "shorter ones"])
def test_initial_epoch_continues_in_the_order_of_the_data(steps):
    train, _ = kdist.data.load("digits", batch=kdist.Batch(16), examples=100)

    def model():
        keras.utils.set_random_seed(0)
        model = kdist.models.mlp(train.image_shape, 10, widths=())
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    whole, parts = model(), model()
    whole.fit(train, epochs=3, steps_per_epoch=steps, verbose=0)
    parts.fit(train, epochs=1, steps_per_epoch=steps, verbose=0)
    parts.fit(train, initial_epoch=1, epochs=3, steps_per_epoch=steps, verbose=0)
    assert_same_weights(parts.get_weights(), whole.get_weights(), 0.0)


@pytest.mark.slow
def test_a_model_with_a_schedule_of_kdist_opens_in_plain_keras(tmp_path):
    model = functional(kdist.Model)
    rate = kdist.schedules.Ramp(0.1, kdist.Batch(4), ramp_examples=8)
    model.compile(keras.optimizers.SGD(rate), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    code = """
import json, sys
sys.modules["kdist"] = None
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
print(json.dumps([model.compiled, model.predict(np.ones((8, 4)), verbose=0).tolist()]))
"""
    compiled, outputs = python(code, [str(tmp_path / "model.keras")])
    assert not compiled
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), rtol=1e-5)


def test_of_converts_a_model_that_is_not_built():
    model = kdist.Model.of(keras.Sequential([keras.layers.Dense(2)]))
    assert isinstance(model, kdist.Model)
    trains(model)


class OwnStep(Plain):
    """Trains on twice its loss, and calls its own `compile` and `fit`."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.calls = ["compile"]

    def fit(self, *args, **kwargs):
        self.calls.append("fit")
        return super().fit(*args, **kwargs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = 2.0 * keras.ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"doubled": loss}


def test_of_keeps_the_methods_of_the_class():
    def trained(convert):
        keras.utils.set_random_seed(1)
        model = OwnStep()
        model(X)
        model = convert(model)
        model.compile("sgd")
        history = model.fit(X, Y, batch_size=4, verbose=0).history
        assert model.calls == ["compile", "fit"]
        return history, model.get_weights()

    (plain, expected), (ours, weights) = trained(lambda model: model), trained(kdist.Model.of)
    assert ours.keys() == plain.keys() == {"doubled"}
    assert_same_weights(weights, expected, 1e-6)


def test_former_attributes_are_in_the_training_state():
    model = kdist.Model.of(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse", accumulate=2)
    with pytest.warns(DeprecationWarning, match="training_state.accumulate"):
        assert model.accumulate == 2
    assert "accumulate" not in dir(model)
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        model.unknown  # noqa: B018
