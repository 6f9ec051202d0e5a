"""Warm-up requests, which a server computes before it serves a version."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

import kdist
from kdist.serving.core.errors import BadInput
from kdist.serving.core.settings import BatchSettings
from kdist.serving.core.signature import Signature, TensorSpec
from kdist.serving.engine.in_process import warm_up
from kdist.serving.exporting.export import export
from kdist.serving.exporting.warmup_file import example_rows, warmup_requests, write_warmup_requests


def small():
    return kdist.models.create("mlp", input_shape=(8, 8, 1), num_classes=3)


def logs(path):
    file = path / "assets.extra" / "tf_serving_warmup_requests"
    records = tf.data.TFRecordDataset(str(file)).as_numpy_iterator()
    return [prediction_log_pb2.PredictionLog.FromString(record) for record in records]


def test_each_allowed_size_is_a_request(tmp_path):
    path = export(small(), tmp_path / "fashion", settings=BatchSettings(max_batch=6))
    requests = [log.predict_log.request for log in logs(path)]
    assert {each.model_spec.name for each in requests} == {"fashion"}
    assert {each.model_spec.signature_name for each in requests} == {"serving_default"}
    assert not any(each.model_spec.HasField("version") for each in requests)
    arrays = [tf.make_ndarray(each.inputs["inputs"]) for each in requests]
    assert [array.shape for array in arrays] == [(n, 8, 8, 1) for n in (1, 2, 4, 6)]
    assert all(array.dtype == "float32" and not array.any() for array in arrays)
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    for signature, inputs in warmup_requests(path):
        assert signature == "serving_default"
        rows = len(inputs["inputs"])
        assert function(inputs=tf.constant(inputs["inputs"]))["outputs"].shape == (rows, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8", "bool", "string"])
def test_equal_elements_take_no_room(dtype, tmp_path):
    kind = tf.as_dtype(dtype).as_numpy_dtype
    rows = np.full((1, 32, 32, 3), b"" if dtype == "string" else 0, kind)
    write_warmup_requests(tmp_path, "m", {"x": rows}, [2, 64])
    file = tmp_path / "assets.extra" / "tf_serving_warmup_requests"
    assert file.stat().st_size < 1000
    (_, first), (_, second) = warmup_requests(tmp_path)
    assert first["x"].dtype == kind
    assert second["x"].shape == (64, 32, 32, 3)
    assert (second["x"] == rows[0, 0, 0, 0]).all()
    logged = logs(tmp_path)[0].predict_log.request.inputs["x"]
    # As TensorFlow Serving reads it: by TensorFlow's own kernel, not by Python.
    parsed = tf.io.parse_tensor(logged.SerializeToString(), tf.as_dtype(dtype))
    np.testing.assert_array_equal(parsed, first["x"])


def test_rows_of_examples_take_turns(tmp_path):
    write_warmup_requests(tmp_path, "m", {"a": np.arange(3), "b": np.ones((3, 2))}, [2, 8])
    (_, first), (_, second) = warmup_requests(tmp_path)
    assert first["a"].tolist() == [0, 1]
    assert second["a"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert second["b"].shape == (8, 2)


def test_without_examples_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis.prediction_log_pb2", None)
    path = export(small(), tmp_path, examples={})
    assert not (path / "assets.extra" / "tf_serving_warmup_requests").exists()
    assert warmup_requests(path) == []


def test_a_missing_package_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis.prediction_log_pb2", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kdist\[serve\]', or export with"):
        export(small(), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_requests_of_other_programs_are_read(tmp_path):
    """They may lack a signature name, and the file may hold other logs."""
    logged = prediction_log_pb2.PredictionLog()
    logged.predict_log.request.inputs["words"].CopyFrom(tf.make_tensor_proto([b"a", b"b"]))
    other = prediction_log_pb2.PredictionLog()
    other.classify_log.request.model_spec.name = "m"
    (tmp_path / "assets.extra").mkdir()
    with tf.io.TFRecordWriter(
        str(tmp_path / "assets.extra" / "tf_serving_warmup_requests")
    ) as file:
        file.write(other.SerializeToString())
        file.write(logged.SerializeToString())
    ((signature, inputs),) = warmup_requests(tmp_path)
    assert signature == "serving_default"
    assert inputs["words"].tolist() == [b"a", b"b"]


def test_examples_get_the_types_of_the_inputs():
    specs = {"left": tf.TensorSpec((None, 2), tf.uint8), "right": tf.TensorSpec((None,), tf.string)}
    given = example_rows(specs, {"left": [[1, 2]], "right": ["word"]})
    assert given["left"].dtype == "uint8"
    assert given["right"].dtype == object
    assert example_rows(specs, {}) == example_rows(specs, []) == {}
    with pytest.raises(ValueError, match=r"rows of examples: \[1, 2\]"):
        example_rows(specs, {"left": [[1, 2]], "right": ["word", "other"]})
    with pytest.raises(ValueError, match=r"for 'right' \(shape \(None,\), string\): give rows"):
        example_rows(specs, None)


def test_a_size_that_varies_needs_examples(tmp_path):
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D()])
    with pytest.raises(ValueError, match=r"guessed for 'inputs' \(shape \(None, None, 2\)"):
        export(model, tmp_path)
    path = export(model, tmp_path, examples=np.ones((1, 4, 2)))
    assert warmup_requests(path)[0][1]["inputs"].shape == (1, 4, 2)


def test_a_version_that_refuses_its_own_example_is_not_served():
    """A model may reject zeros, such as encoded images, but not its own examples."""
    takes = Signature({"x": TensorSpec((None, 2), np.dtype("float32"), "")}, {})

    def refuses(signature, arrays):
        raise BadInput("Default MaxPoolingOp only supports NHWC on device type CPU")

    assert warm_up(refuses, {"serving_default": takes}, [1, 2]) is None
    with pytest.raises(BadInput, match="only supports NHWC"):
        warm_up(refuses, {"serving_default": takes}, [1, 2], [{"x": np.ones((1, 2), "float32")}])
