"""Exported models as servers load them."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
import kdist.serving.exporting.export
from kdist.serving.core.model_directory import read_metadata, versions
from kdist.serving.exporting.export import export
from kdist.serving.exporting.warmup_file import warmup_requests
from kdist.testing import python

X = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype("float32")

# In a process of its own, without kdist, on one device.
SERVED = """
import json, sys
import numpy as np
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
x = np.array(json.loads(sys.argv[2]), "float32")
assert "kdist" not in sys.modules
print(json.dumps({n: y.numpy().tolist() for n, y in served(inputs=tf.constant(x)).items()}))
"""


def small(width=3):
    return kdist.models.create("mlp", input_shape=(8, 8, 1), num_classes=width)


def served(path, x=X):
    return tf.saved_model.load(str(path)).signatures["serving_default"](inputs=tf.constant(x))


@pytest.mark.slow
def test_it_predicts_as_the_model_and_says_what_it_is(tmp_path):
    model = small()
    path = export(model, tmp_path / "fashion", classes=["a", "b", "c"])
    assert path == tmp_path / "fashion" / "1"
    expected = model.predict(X, verbose=0)
    answer = python(SERVED, [str(path), json.dumps(X.tolist())])
    np.testing.assert_allclose(answer["outputs"], expected, atol=1e-6)
    metadata = read_metadata(path)
    assert metadata["name"] == "fashion"
    assert metadata["classes"] == ["a", "b", "c"]
    assert metadata["inputs"] == {"inputs": {"shape": [None, 8, 8, 1], "dtype": "float32"}}
    assert metadata["outputs"] == {"outputs": {"shape": [None, 3], "dtype": "float32"}}
    names = {each.name for each in path.parent.iterdir()}
    assert names == {"1", "batching_parameters.txt", "models.config"}  # nothing half written


def test_versions_follow_each_other(tmp_path):
    model = small()
    for number in (1, 2):
        assert export(model, tmp_path).name == str(number)
    assert export(model, tmp_path, 7).name == "7"
    assert export(model, tmp_path).name == "8"
    (tmp_path / "9").mkdir()  # no model is in it
    assert versions(tmp_path) == [1, 2, 7, 8]
    with pytest.raises(FileExistsError, match="7 exists"):
        export(model, tmp_path, 7)


def _export_during(monkeypatch, **options):
    """Lets another export into the directory begin and end during the next one."""
    module = "kdist.serving.exporting.export.write_warmup_requests"
    real = kdist.serving.exporting.export.write_warmup_requests

    def write(path, *given):
        monkeypatch.setattr(module, real)
        other = export(small(), path.parents[1], **options)
        assert read_metadata(other)["version"] == 1
        real(path, *given)

    monkeypatch.setattr(module, write)


def test_exports_at_the_same_time_get_a_version_each(tmp_path, monkeypatch):
    _export_during(monkeypatch)
    path = export(small(), tmp_path)
    assert path.name == "2"
    assert read_metadata(path)["version"] == 2
    assert versions(tmp_path) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 4


def test_of_exports_of_one_version_at_the_same_time_one_fails(tmp_path, monkeypatch):
    _export_during(monkeypatch, version=1)
    with pytest.raises(FileExistsError, match="1 exists"):
        export(small(), tmp_path, 1)
    assert versions(tmp_path) == [1]
    assert len(list(tmp_path.iterdir())) == 3


def test_what_fails_leaves_nothing(tmp_path, monkeypatch):
    def fails(path, name, examples, sizes):
        assert (path / "saved_model.pb").exists()  # not where a server looks for it
        assert versions(tmp_path) == []
        raise OSError("no space left on device")

    monkeypatch.setattr("kdist.serving.exporting.export.write_warmup_requests", fails)
    with pytest.raises(OSError, match="no space"):
        export(small(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_preprocessing_is_part_of_the_graph(tmp_path):
    inputs = keras.Input((16, 16, 1), dtype="uint8", name="photo")
    halved = keras.Model(
        inputs, keras.layers.AveragePooling2D(2)(keras.ops.cast(inputs, "float32"))
    )
    model = small()
    path = export(model, tmp_path, preprocessing=halved)
    photos = np.random.default_rng(1).integers(0, 256, (3, 16, 16, 1)).astype("uint8")
    expected = model(halved(photos)).numpy()
    np.testing.assert_allclose(served(path, photos)["outputs"], expected, atol=1e-6)
    described = {"shape": [None, 16, 16, 1], "dtype": "uint8"}
    assert read_metadata(path)["inputs"] == {"inputs": described}


def test_several_inputs_and_outputs_are_named_after_their_layers(tmp_path):
    left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right")
    total = keras.layers.Add(name="total")([left, right])
    product = keras.layers.Multiply(name="product")([left, right])
    path = export(keras.Model([left, right], [total, product]), tmp_path)
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    answer = function(left=tf.constant([[1.0, 2.0]]), right=tf.constant([[3.0, 5.0]]))
    assert answer["total"].numpy().tolist() == [[4, 7]]
    assert answer["product"].numpy().tolist() == [[3, 10]]


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_weights_are_written_once(name, tmp_path):
    """Keras's archive would write weights of tracked models twice, and servers load both."""
    with kdist.create_strategy(name, 1 if name == "one_device" else 2).scope():
        model = small()
    path = export(model, tmp_path)
    written = tf.train.list_variables(str(path / "variables" / "variables"))
    shapes = sorted(shape for name, shape in written if name.endswith("VARIABLE_VALUE"))
    assert shapes == sorted(list(each.shape) for each in model.weights)
    loaded = tf.saved_model.load(str(path))
    assert list(loaded.signatures) == ["serving_default"]
    np.testing.assert_allclose(served(path)["outputs"], model.predict(X, verbose=0), atol=1e-6)


def test_a_sequential_model_is_written(tmp_path):
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    np.testing.assert_array_equal(served(export(model, tmp_path))["outputs"], X.reshape(5, 64))


@tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])
def decoded(files):
    def image(file):
        pixels = tf.io.decode_image(file, channels=1, expand_animations=False)
        return tf.image.resize(pixels, (8, 8))

    return tf.map_fn(image, files, fn_output_signature=tf.TensorSpec((8, 8, 1), tf.float32))


def images():
    """Returns encoded images of two formats and sizes, and their pixels."""
    pixels = np.random.default_rng(1).integers(0, 256, (2, 16, 16, 1)).astype("uint8")
    files = [tf.io.encode_png(pixels[0]), tf.io.encode_jpeg(pixels[1, :12])]
    return np.array([each.numpy() for each in files], object)


def test_files_of_images_are_decoded_in_the_graph(tmp_path):
    model, files = small(), images()
    path = export(model, tmp_path, preprocessing=decoded, examples=files)
    expected = model(decoded(tf.constant(files))).numpy()
    np.testing.assert_allclose(served(path, files)["outputs"], expected, atol=1e-6)
    assert read_metadata(path)["inputs"] == {"inputs": {"shape": [None], "dtype": "string"}}
    (_, first), (_, second), (_, third), *_ = warmup_requests(path)
    assert list(first["inputs"]) == list(files[:1])
    assert list(second["inputs"]) == list(files)
    assert list(third["inputs"]) == [*files, *files]  # in turn


def test_arguments_of_a_function_are_inputs(tmp_path):
    specs = [tf.TensorSpec((None, 8, 8, 1)), tf.TensorSpec((None,))]
    scaled = tf.function(lambda image, scale: image * scale[:, None, None, None], specs)
    model = small()
    path = export(model, tmp_path, preprocessing=scaled)
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    answer = function(image=tf.constant(X), scale=tf.fill([5], 0.5))["outputs"]
    np.testing.assert_allclose(answer, model(X / 2), atol=1e-6)


class Own(keras.Model):
    def call(self, inputs):
        return inputs


def own():
    model = Own(name="own")
    model.build((None, 2))
    return model


@tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1))])
def in_python(x):
    return tf.ensure_shape(tf.py_function(lambda x: x, [x], tf.float32), (None, 8, 8, 1))


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (small, {"version": 0}, "version=0"),
        (small, {"version": True}, "version=True"),
        (small, {"classes": ["a"]}, r"1 classes, and .*\(None, 3\)"),
        (lambda: keras.Sequential([keras.layers.Dense(2)]), {}, "is not built: call it on a batch"),
        (own, {}, "'own' has no defined inputs: wrap it"),
        (small, {"placement": "near"}, "placement='near'"),
        (small, {"placement": "kept"}, "is not split"),
        (small, {"preprocessing": len}, r"preprocessing=.*@tf.function\(input_signature="),
        (small, {"preprocessing": tf.function(lambda x: x)}, "a function with types"),
        (
            small,
            {"preprocessing": tf.function(lambda x: x, [tf.TensorSpec((8, 8, 1))])},
            "first size must be None",
        ),
        (small, {"preprocessing": in_python}, "its operations .'EagerPyFunc'. could run code"),
        (small, {"preprocessing": decoded}, "guessed"),
        (
            small,
            {"preprocessing": decoded, "examples": [b"no image"]},
            "cannot compute the rows to warm up with: .*Give other",
        ),
        (small, {"examples": X[:, :4]}, r"examples of inputs: shape \(5, 4, 8, 1\), not"),
        (small, {"examples": {"pixels": X}}, "examples for pixels, and the inputs are inputs"),
        (small, {"examples": {"inputs": X[:0]}}, r"rows of examples: \[0\]"),
    ],
    ids=lambda x: None if callable(x) else "-".join(x) if isinstance(x, dict) else None,
)
def test_what_is_refused(model, given, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        export(model(), tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_the_old_name_of_a_placement(tmp_path):
    with pytest.warns(DeprecationWarning, match="merged"):
        export(small(), tmp_path / "m", examples={}, placement="joined")
    with pytest.raises(ValueError, match="merged, kept"):
        export(small(), tmp_path / "m", placement="split")
