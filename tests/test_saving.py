"""Models that are saved, loaded, copied, and trained further, with and without `patch_keras()`."""

import contextlib
import copy
import os
import pickle

import h5py
import keras
import numpy as np
import pytest

import kdist
from kdist.testing import assert_same_weights
from tests.caught import no_warnings
from tests.forked import python, python_tasks
from tests.tiers import covering

# Prints histories and predictions before and after loading, for the models and ways below.
PROGRAM = """
import copy, json, pickle, sys, tempfile, warnings, zipfile
import keras
import numpy as np
import tensorflow as tf
devices, directory = int(sys.argv[1]), tempfile.mkdtemp()
if devices > 1:
    import kdist
    kdist.patch_keras()
    strategy = kdist.create_strategy("mirrored", devices)
else:
    strategy = tf.distribute.get_strategy()


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units, self.hidden = units, keras.layers.Dense(units)
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable()
class OwnCompile(Subclassed):
    def compile(self, rate=0.05, **kwargs):
        super().compile(keras.optimizers.Adam(rate), keras.losses.MeanSquaredError(), **kwargs)
        self.rate = rate

    def get_compile_config(self):
        return {"rate": self.rate}

    def compile_from_config(self, config):
        self.compile(**config)
        self.optimizer.build(self.trainable_variables)


def functional():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(3)(inputs)))


def sequential():
    return keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])


def from_keras_file(model):
    model.save(f"{directory}/model.keras")
    assert b"kdist" not in zipfile.ZipFile(f"{directory}/model.keras").read("config.json")
    return keras.models.load_model(f"{directory}/model.keras")


def from_h5(model):
    model.save(f"{directory}/model.h5")
    loaded = keras.models.load_model(f"{directory}/model.h5")
    # Keras has built its optimizer without variables, and could not continue.
    loaded.compile(keras.optimizers.Adam(0.05), loaded.loss, metrics=["mae"])
    return loaded


def unpickled(model):
    pickled = pickle.dumps(model)
    assert b"kdist" not in pickled
    return pickle.loads(pickled)


def cloned(model):
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone


def from_checkpoint(model):
    return keras.models.load_model(f"{directory}/checkpoint.keras")


rng = np.random.default_rng(0)
x = rng.normal(size=(12, 4)).astype("float32")
data = {"x": x, "y": x.sum(1, keepdims=True), "batch_size": 8, "shuffle": False, "verbose": 0}
results = {}
for new_model in (functional, sequential, Subclassed, OwnCompile):
    keras.utils.set_random_seed(0)
    with strategy.scope(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile")
        model = new_model()
        if new_model is OwnCompile:
            model.compile()
        else:
            # Keras cannot load the name of a loss from an H5 file.
            losses = keras.losses.MeanSquaredError(), keras.metrics.MeanAbsoluteError()
            model.compile(keras.optimizers.Adam(0.05), losses[0], metrics=losses[1:])
        checkpoint = keras.callbacks.ModelCheckpoint(f"{directory}/checkpoint.keras")
        model.fit(**data, callbacks=[checkpoint])
    for way in (from_keras_file, from_h5, unpickled, copy.deepcopy, cloned, from_checkpoint):
        if way in (from_h5, cloned) and new_model in (Subclassed, OwnCompile):
            continue  # Keras does not support it
        with strategy.scope(), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*compile")
            loaded = way(model)
        history = loaded.fit(**data).history
        results[f"{new_model.__name__} {way.__name__}"] = {
            "class": type(loaded).__name__,
            "updates": int(loaded.optimizer.iterations.numpy()),
            "numbers": [history["loss"], *loaded.predict(x, verbose=0).tolist()],
        }
print(json.dumps(results))
"""


@pytest.mark.exhaustive
def test_loaded_models_train_on_as_on_one_device():
    expected, found = (python(PROGRAM, [devices]) for devices in (1, 2))
    assert found.keys() == expected.keys()
    for case, result in expected.items():
        assert found[case]["class"] == result["class"], case
        assert found[case]["updates"] == result["updates"], case
        np.testing.assert_allclose(
            np.ravel(found[case]["numbers"]), np.ravel(result["numbers"]), atol=1e-5, err_msg=case
        )


# `kdist.Model`.


@keras.saving.register_keras_serializable("kdist_tests")
class Subclassed(kdist.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


@keras.saving.register_keras_serializable("kdist_tests")
class Plain(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def functional():
    inputs = keras.Input((4,))
    return kdist.Model(inputs, keras.layers.Dense(2)(inputs))


def sequential():
    return kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))


def converted():
    model = Plain()
    model(X)
    return kdist.Model.of(model)


def trained(new_model):
    model = new_model()
    model.compile("adam", "mse")
    model.train_on_batch(X, Y)
    return model


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("new_model", "copied"),
    covering(
        [functional, sequential, Subclassed, converted],
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ),
)
def test_copies_of_a_model_train_as_it_does(new_model, copied, mirrored):
    with mirrored.scope():
        model = trained(new_model)
        loaded = copied(model)
    assert type(loaded) is type(model)
    assert loaded.compiled
    for each in (model, loaded):
        each.fit(X, Y, batch_size=4, verbose=0)
    assert int(loaded.optimizer.iterations.numpy()) == 3
    assert_same_weights(loaded.get_weights(), model.get_weights(), 0.0)


@pytest.mark.parametrize("new_model", [functional, sequential])
def test_clones_of_a_model_train_as_it_does(new_model):
    model = trained(new_model)
    clone = keras.models.clone_model(model)
    assert type(clone) is type(model)
    assert clone.compiled


def test_loading_compiles_as_keras_does(tmp_path):
    trained(Subclassed).save(tmp_path / "model.keras")
    with no_warnings():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations.numpy()) == 1
    uncompiled = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert not uncompiled.compiled


def test_a_custom_compile_is_not_called(tmp_path):
    @keras.saving.register_keras_serializable("kdist_tests")
    class OwnCompile(Subclassed):
        def compile(self, *args, **kwargs):
            super().compile(*args, **kwargs)

    trained(OwnCompile).save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="custom"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not hasattr(loaded, "optimizer")


def test_a_model_that_must_be_split_is_loaded_without_compiling(tmp_path):
    trained(Subclassed).save(tmp_path / "model.keras")
    with kdist.create_strategy(kdist.Layout(pipeline=2)).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="split"):
        loaded.fit(X, Y, verbose=0)


def test_a_backup_continues_as_one_run(tmp_path, mirrored):
    def fitted(epochs, *callbacks):
        keras.utils.set_random_seed(0)
        with mirrored.scope():
            model = functional()
            model.compile("adam", "mse")
            model.fit(X, Y, batch_size=4, epochs=epochs, callbacks=[*callbacks], verbose=0)
        return model

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

    whole = fitted(2)
    fitted(1, backup())
    resumed = fitted(2, backup())
    assert len(resumed.history.history["loss"]) == 1
    assert_same_weights(resumed.get_weights(), whole.get_weights(), 0.0)
    assert int(resumed.optimizer.iterations.numpy()) == 4


# `patch_keras()`.


def test_patched_models_have_everything_of_kdist_models():
    code = """
import inspect, json
import keras, kdist
from kdist.model import Sequential

def surface(cls):
    return {name: inspect.getattr_static(cls, name) for name in dir(cls)}

classes = {kdist.Model: keras.Model, Sequential: keras.Sequential}
before = [surface(keras_class) for keras_class in classes.values()]
ours = [surface(cls) for cls in classes]
kdist.patch_keras()
results = []
for plain, own, keras_class in zip(before, ours, classes.values()):
    patched = surface(keras_class)
    names = {*plain, *own, *patched}
    results.append(sorted(n for n in names if own.get(n) is not patched.get(n)))
    assert patched["compile"] is not plain["compile"]
print(json.dumps(results))
"""
    of_classes = {"__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
    creation = {"__init__", "__new__", "__reduce__", "_unpickle_model", "of"}
    former_names = {"__getattr__"}
    for differing in python(code):
        assert set(differing) - of_classes == creation | former_names


def test_a_model_that_keras_has_trained_continues_after_the_patch():
    code = """
import json, keras, kdist, numpy as np
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
losses = []
for patch in (lambda: None, kdist.patch_keras):
    patch()
    losses += model.fit(x, x[:, :1], verbose=0).history["loss"]
    losses.append(model.evaluate(x, x[:, :1], verbose=0))
    model.predict(x, verbose=0)
print(json.dumps([losses, hasattr(model, "training_state"), hasattr(model, "position")]))
"""
    losses, has_state, has_former_name = python(code)
    assert losses == sorted(losses, reverse=True)
    assert has_state
    assert not has_former_name


@pytest.mark.slow
def test_one_worker_saves_alone_in_the_scope():
    code = """
import json, os, pickle, tempfile
import keras, kdist, numpy as np
kdist.patch_keras()
strategy = kdist.create_strategy("multi_worker")
x = np.ones((8, 4), "float32")
directory, files = tempfile.mkdtemp(), []
with strategy.scope():
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    for model in (keras.Sequential(layers), kdist.Model.of(keras.Sequential(layers))):
        model.mean = keras.metrics.Mean()
        model.compile("adam", "mse", metrics=["mae"])
        checkpoint = keras.callbacks.ModelCheckpoint(
            directory + "/checkpoint.weights.h5", save_weights_only=True
        )
        model.fit(x, x[:, :1], batch_size=4, callbacks=[checkpoint], verbose=0)
        if kdist.strategies.is_chief(strategy):
            model.save(directory + "/model.keras")
            keras.saving.save_model(model, directory + "/function.keras")
            model.save(directory + "/model.h5")
            model.save_weights(directory + "/model.weights.h5")
            model.export(directory + "/exported", verbose=False)
            files.append(len(pickle.dumps(model)) > 0)
            files.append(len(os.listdir(directory)))
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
print(json.dumps(files))
"""
    chief, other = python_tasks(code, {"worker": 2}, timeout_seconds=120)
    assert chief == [True, 6, True, 6]
    assert other == []


def test_saving_again_creates_no_variables(tmp_path, monkeypatch):
    """Keras creates an optimizer in each save, of which TensorFlow keeps 70 kB forever."""
    created, real = [], keras.Variable.__init__

    def create(variable, *args, **kwargs):
        created.append(variable)
        real(variable, *args, **kwargs)

    model = kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "first.keras")
    monkeypatch.setattr(keras.Variable, "__init__", create)
    model.save(tmp_path / "second.keras")
    model.save_weights(tmp_path / "third.weights.h5")
    keras.Variable(1.0)
    assert len(created) == 1


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.weights.json", "m.h5"])
def test_a_file_that_another_worker_reads_or_writes_is_replaced(tmp_path, name):
    """HDF5 locks files, and a half-written one cannot be read."""
    model = kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    options = {"max_shard_size": 1.0} if name == "m.weights.json" else {}
    save = model.save_weights if "weights" in name else model.save
    path = tmp_path / name
    save(path, **options)
    files, first = sorted(os.listdir(tmp_path)), path.read_bytes()
    with contextlib.ExitStack() as stack:
        for each in files:
            if each.endswith(".h5"):
                stack.enter_context(h5py.File(tmp_path / each))
        reader = stack.enter_context(open(path, "rb"))
        save(path, **options)
        assert reader.read() == first
    assert sorted(os.listdir(tmp_path)) == files


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path):
    class Unsaved(keras.layers.Layer):
        def save_own_variables(self, store):
            raise OSError("disk full")

    path = tmp_path / "m.keras"
    kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])).save(path)
    first = path.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        kdist.Model.of(keras.Sequential([keras.Input((4,)), Unsaved()])).save(path)
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == ["m.keras"]
