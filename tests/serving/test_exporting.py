"""Versions of models as servers load them."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.parallel import column, row, split
from kdist.serving.exporting import export, read_metadata, versions
from kdist.serving.settings import BatchSettings
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
    with pytest.raises(FileExistsError, match="7 is there: servers keep what they have loaded"):
        export(model, tmp_path, 7)


def test_what_fails_leaves_nothing(tmp_path, monkeypatch):
    def fails(model, preprocessing, path):
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("kdist.serving.exporting._write_saved_model", fails)
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


def test_a_split_model_is_joined(tmp_path):
    plain = small(4)
    with kdist.create_strategy(kdist.Layout(tensor=2)).scope():
        model = split(plain, {"dense": column(), "logits": row()})
    path = export(model, tmp_path)
    answer = python(SERVED, [str(path), json.dumps(X.tolist())])
    np.testing.assert_allclose(answer["outputs"], plain.predict(X, verbose=0), atol=1e-6)


def test_files_for_tensorflow_serving(tmp_path):
    export(small(), tmp_path / "fashion", settings=BatchSettings(0.0015, max_batch=24))
    batching = (tmp_path / "fashion" / "batching_parameters.txt").read_text()
    assert "max_batch_size { value: 24 }" in batching
    assert "batch_timeout_micros { value: 1500 }" in batching
    # The last of them has to be the largest batch.
    assert re.findall(r"allowed_batch_sizes : (\d+)", batching) == ["1", "2", "4", "8", "16", "24"]
    configuration = (tmp_path / "fashion" / "models.config").read_text()
    assert 'name: "fashion"' in configuration
    assert 'base_path: "/models/fashion"' in configuration


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: export(small(), path, 0), "version=0: a whole number from 1 on"),
        (lambda path: export(small(), path, True), "version=True"),
        (lambda path: export(small(), path, classes=["a"]), r"1 classes, and .*\(None, 3\)"),
        (
            lambda path: export(keras.Sequential([keras.layers.Dense(2)]), path),
            "is not built: call it on a batch first",
        ),
    ],
)
def test_what_is_refused(make, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        make(tmp_path)
