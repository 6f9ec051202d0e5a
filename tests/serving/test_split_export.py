"""Split models as servers load them: on their devices, or merged on any device."""

import collections
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from kdist.serving.core.model_directory import check_devices, needed_devices, read_metadata
from kdist.serving.exporting.export import export
from kdist.serving.exporting.warmup_file import warmup_requests
from kdist.testing import python
from tests.serving.split_models import MODELS, inputs_of, predicted, split_model

layers = keras.layers


# In a process that has other devices, and knows nothing of how the model was split.
SERVED = """
import json, sys
from kdist.devices import find_devices
from kdist.serving.core.model_directory import check_devices, needed_devices
find_devices(needed_devices(next(iter(json.loads(sys.argv[1])))))
import numpy as np
import tensorflow as tf
from kdist.parallel.inspect.operation_devices import operations_that_run
there_are = [each.name.removeprefix("/device:") for each in tf.config.list_logical_devices()]
keep = tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
options = tf.saved_model.LoadOptions(experimental_variable_policy=keep)
answers = []
for path, inputs in json.loads(sys.argv[1]).items():
    check_devices(path, there_are)
    model = tf.saved_model.load(path, options=options)
    served = model.signatures["serving_default"]
    types = {name: spec.dtype for name, spec in served.structured_input_signature[1].items()}
    with operations_that_run() as operations:
        outputs = served(**{n: tf.constant(x, types[n]) for n, x in inputs.items()})
    answers.append({
        "outputs": outputs["outputs"].numpy().tolist(),
        "variables": [[v.name, v.device[-5:]] for v in served.variables],
        "ran": sorted({o.device for o in operations if "MatMul" in o.type}),
    })
print(json.dumps([there_are, answers]))
"""


@pytest.mark.slow
def test_it_keeps_its_placement_in_another_process(tmp_path):
    expected, given, places = [], {}, []
    for kind in MODELS:
        model = split_model(kind)
        path = export(model, tmp_path / kind, placement="kept")
        assert needed_devices(path) == ["CPU:0", "CPU:1"]
        given[str(path)] = {name: x.tolist() for name, x in inputs_of(model).items()}
        expected.append(predicted(model, inputs_of(model)))
        places.append({v.path: v.value.device[-5:] for v in model.variables})
    there_are, answers = python(SERVED, [json.dumps(given)])
    assert there_are == ["CPU:0", "CPU:1"]
    for answer, outputs, on in zip(answers, expected, places, strict=True):
        np.testing.assert_allclose(answer["outputs"], outputs, atol=1e-6, rtol=1e-6)
        assert answer["ran"] == ["CPU:0", "CPU:1"]
        loaded = {name.removesuffix(":0"): where for name, where in answer["variables"]}
        assert set(loaded.values()) == {"CPU:0", "CPU:1"}
        assert loaded.items() <= on.items()


def devices_in(path):
    """Returns {device: number of operations} in the file that servers read."""
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    (graph,) = (meta.graph_def for meta in saved.meta_graphs)
    nodes = [node for each in graph.library.function for node in each.node_def]
    nodes += [node for node in graph.node if node.op == "VarHandleOp"]
    computing = [node for node in nodes if node.op in ("MatMul", "Einsum", "VarHandleOp")]
    return collections.Counter(node.device.rpartition("device:")[2] for node in computing)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", MODELS)
def test_devices_are_in_the_graph_only_where_they_are_kept(kind, tmp_path):
    model = split_model(kind)
    kept = devices_in(export(model, tmp_path, placement="kept"))
    assert set(kept) == {"CPU:0", "CPU:1"}
    joined = export(model, tmp_path)
    assert set(devices_in(joined)) == {""}
    assert needed_devices(joined) == []
    inputs = {name: tf.constant(x) for name, x in inputs_of(model).items()}
    served = tf.saved_model.load(str(joined)).signatures["serving_default"](**inputs)
    expected = predicted(model, inputs_of(model))
    np.testing.assert_allclose(served["outputs"], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_preprocessing_and_warm_up_go_with_it(tmp_path):
    words = keras.Input((), dtype="string", name="text")
    vocabulary = [chr(97 + n) for n in range(18)]
    lookup = layers.TextVectorization(vocabulary=vocabulary, output_sequence_length=6)
    model = split_model("tensors")
    path = export(
        model,
        tmp_path,
        preprocessing=keras.Model(words, lookup(words)),
        examples=np.array(["a b c", "d e"]),
        placement="kept",
        classes=["x", "y", "z"],
    )
    assert read_metadata(path)["inputs"] == {"inputs": {"shape": [None], "dtype": "string"}}
    (_, first), *_ = warmup_requests(path)
    assert first["inputs"].tolist() == [b"a b c"]
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    answer = served(inputs=tf.constant(["a b c", "c a"]))["outputs"]
    expected = model.predict(np.array([[2, 3, 4, 0, 0, 0], [4, 2, 0, 0, 0, 0]]), verbose=0)
    np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_too_few_devices_are_said(tmp_path):
    path = tmp_path / "3"
    (path / "assets.extra").mkdir(parents=True)
    (path / "assets.extra" / "kdist.json").write_text('{"devices": ["GPU:0", "GPU:1"]}')
    with pytest.raises(ValueError, match=r"on GPU:0, GPU:1, and GPU:1 is missing here \(available"):
        check_devices(path, ["CPU:0", "GPU:0"])
    with pytest.raises(ValueError, match='GPU:0, GPU:1 are missing .* placement="merged"'):
        check_devices(path, ["CPU:0"])
    check_devices(path, ["CPU:0", "GPU:0", "GPU:1", "GPU:2"])
    check_devices(tmp_path, ["CPU:0"])  # kdist has not written it


def test_devices_of_other_hosts_are_refused(tmp_path, monkeypatch):
    hosts = [["worker:0/CPU:0", "worker:1/CPU:0"]]
    monkeypatch.setattr("kdist.serving.exporting.export.groups_of", lambda strategy: hosts)
    with pytest.raises(ValueError, match="worker:0/CPU:0, worker:1/CPU:0 belong to tasks of a job"):
        export(split_model("branches"), tmp_path, placement="kept")
    assert list(tmp_path.iterdir()) == []
