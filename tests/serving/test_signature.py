"""Signatures in files: what they contain and reject, and graphs that are never loaded."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from kdist.serving.core.signature import Signature, TensorSpec, read_signatures
from tests.serving.running import save_mixed


def spec(*shape):
    return TensorSpec(shape, np.dtype("float32"), "")


def test_signatures_are_read_without_loading(tmp_path):
    save_mixed(tmp_path / "1")
    signatures, protos = read_signatures(tmp_path / "1")
    assert set(signatures) == set(protos) == {"serving_default", "text", "pixels", "any", "halves"}
    inputs = signatures["serving_default"].inputs
    assert {n: (s.shape, s.dtype.name) for n, s in inputs.items()} == {
        "a": ((None, 2), "float32"),
        "n": ((None,), "int32"),
    }
    assert signatures["text"].inputs["s"].is_text
    assert signatures["any"].inputs["x"].shape is None
    assert signatures["halves"].outputs["y"].dtype == "float16"


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": np.zeros((2, 3))}, r"\['b'\] are missing"),
        ({"a": np.zeros((2, 3)), "b": np.zeros(2), "c": 1}, r"unknown inputs \['c'\]"),
        ({"a": np.zeros((2, 4)), "b": np.zeros(2)}, r"'a' has the shape \(2, 4\).*\(any, 3\)"),
        ({"a": np.zeros((2, 3)), "b": np.zeros(3)}, "same number"),
        ({"a": np.zeros((0, 3)), "b": np.zeros(0)}, "at least 1"),
    ],
    ids=["missing", "unknown", "shape", "rows", "none"],
)
def test_what_is_refused(arrays, says):
    signature = Signature({"a": spec(None, 3), "b": spec(None)}, {})
    signature.check({"a": np.zeros((2, 3)), "b": np.zeros(2)})
    with pytest.raises(ValueError, match=says):
        signature.check(arrays)


def test_no_rows_in_a_scalar():
    with pytest.raises(ValueError, match="rows of a request"):
        Signature({"x": TensorSpec(None, np.dtype("float32"), "")}, {}).check({"x": np.array(1.0)})


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 9], ids=["none", "empty", "garbage"])
def test_what_is_no_saved_model(tmp_path, content):
    if content is not None:
        (tmp_path / "saved_model.pb").write_bytes(content)
    with pytest.raises(ValueError, match=r"saved_model\.pb (is not a SavedModel|has no graph)"):
        read_signatures(tmp_path)


def read(x):
    return tf.strings.length(tf.io.read_file(x))


def write(x):
    with tf.control_dependencies([tf.io.write_file("/tmp/kdist-never-written", x[0])]):
        return tf.strings.length(x)


def call(x):
    return tf.py_function(lambda each: len(each.numpy()), [x[0]], tf.int32)[None]


def records(x):
    return tf.data.TFRecordDataset(x).reduce(0, lambda n, _: n + 1)[None]


def printed(x):
    tf.print(x, output_stream="file:///tmp/kdist-never-written")
    return tf.strings.length(x)


def lines(x):
    data = tf.data.experimental.CsvDataset(x, [tf.int32])
    return data.reduce(0, lambda n, _: n + 1)[None]


def written_records(x):
    data = tf.data.Dataset.from_tensor_slices(x)
    with tf.control_dependencies(
        [
            tf.raw_ops.DatasetToTFRecord(
                input_dataset=data._variant_tensor,
                filename="/tmp/kdist-never-written",
                compression_type="",
            )
        ]
    ):
        return tf.strings.length(x)


def debugged(x):
    return tf.strings.length(
        tf.raw_ops.DebugIdentity(input=x, debug_urls=["file:///tmp/kdist-never-written"])
    )


def described(x, source="/tmp/kdist-never-read"):
    _, (values,) = tf.io.decode_proto(x, "m", ["f"], [tf.string], descriptor_source=source)
    return tf.strings.length(values[:, 0])


@pytest.mark.parametrize(
    "function", [read, write, call, records, printed, lines, written_records, debugged, described]
)
def test_models_that_would_touch_the_servers_files_are_not_loaded(tmp_path, function):
    module = tf.Module()
    module.f = tf.function(
        lambda x: {"y": function(x if function is not read else x[0])},
        input_signature=[tf.TensorSpec((None,), tf.string)],
    )
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.f})
    with pytest.raises(ValueError, match="could run code or touch files"):
        read_signatures(tmp_path)


def saved(x):
    tf.raw_ops.SaveV2(
        prefix="/tmp/kdist-never-written", tensor_names=["x"], shape_and_slices=[""], tensors=[x]
    )
    return tf.strings.length(x)


def restored(x):
    read = tf.raw_ops.RestoreV2(
        prefix=x[0], tensor_names=["x"], shape_and_slices=[""], dtypes=[tf.float32]
    )
    return tf.reshape(read[0], [-1])


def restored_in_a_branch(x):
    return tf.cond(
        tf.shape(x)[0] > 1, lambda: restored(x), lambda: tf.cast(tf.strings.length(x), tf.float32)
    )


@pytest.mark.parametrize("function", [saved, restored, restored_in_a_branch])
def test_predictions_that_would_touch_checkpoints_are_not_loaded(tmp_path, function):
    """Every SavedModel has such operations to load variables, but predictions do not use them."""
    module = tf.Module()
    module.f = tf.function(
        lambda x: {"y": function(x)}, input_signature=[tf.TensorSpec((None,), tf.string)]
    )
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.f})
    with pytest.raises(ValueError, match="V2'.* could run code or touch files"):
        read_signatures(tmp_path)


@pytest.mark.parametrize("name", ["../../words.txt", "/etc/passwd", "a/../../words.txt"])
def test_assets_are_those_of_the_model(tmp_path, name):
    words = tmp_path / "words.txt"
    words.write_text("one\ntwo\n")
    module = tf.Module()
    module.table = tf.lookup.StaticVocabularyTable(
        tf.lookup.TextFileInitializer(
            str(words),
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        1,
    )
    module.f = tf.function(
        lambda x: {"y": module.table.lookup(x)},
        input_signature=[tf.TensorSpec((None,), tf.string)],
    )
    path = tmp_path / "1"
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.f})
    read_signatures(path)
    proto = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    proto.meta_graphs[0].asset_file_def[0].filename = name
    (path / "saved_model.pb").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="asset .* leads out of"):
        read_signatures(path)


class Resource(tf.saved_model.experimental.TrackableResource):
    """Resource that runs a function of the test whenever the model is loaded."""

    def __init__(self, initialize):
        super().__init__()
        self._said = initialize
        assert self.resource_handle is not None  # which is made by this

    def _create_resource(self):
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.string, value_dtype=tf.int64, shared_name=f"kdist_{id(self)}"
        )

    def _initialize(self):
        self._said(self.resource_handle)


def saves(_):
    tf.raw_ops.SaveV2(
        prefix="/tmp/kdist-never-written",
        tensor_names=["x"],
        shape_and_slices=[""],
        tensors=[tf.constant(1)],
    )


def reads_a_table(table):
    tf.raw_ops.InitializeTableFromTextFileV2(
        table_handle=table, filename="/etc/passwd", key_index=-2, value_index=-1
    )


@pytest.mark.parametrize("initialize", [saves, reads_a_table, lambda table: None])
def test_what_loading_calls_touches_no_files(tmp_path, initialize):
    module = tf.Module()
    module.resource = Resource(initialize)
    module.f = tf.function(
        lambda x: {"y": tf.strings.length(x)}, input_signature=[tf.TensorSpec((None,), tf.string)]
    )
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.f})
    if initialize in (saves, reads_a_table):
        with pytest.raises(ValueError, match=r"\['(SaveV2|Init.*)'\] could run .* touch files"):
            read_signatures(tmp_path)
    else:
        assert read_signatures(tmp_path)


def of_tensorflow_1(path, change=lambda: None, initialize=None):
    """Saves a graph of TensorFlow 1 with a variable; `change` adds to the graph."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        x = v1.placeholder(tf.float32, (None,))
        weight = v1.get_variable("w", (), use_resource=False)
        session.run(v1.global_variables_initializer())
        change()
        builder = v1.saved_model.Builder(str(path))
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": x * weight})
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": signature},
            main_op=initialize() if initialize else None,
        )
        builder.save()


def writes():
    return tf.raw_ops.SaveV2(
        prefix="/tmp/kdist-never-written",
        tensor_names=["x"],
        shape_and_slices=[""],
        tensors=[tf.constant(1)],
    )


def removes():
    return tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=["/tmp/kdist-never-written"], destination_prefix="/tmp/kdist-x"
    )


def test_graphs_of_tensorflow_1(tmp_path):
    of_tensorflow_1(tmp_path / "1", initialize=lambda: tf.compat.v1.tables_initializer())
    assert read_signatures(tmp_path / "1")
    assert tf.saved_model.load(str(tmp_path / "1"))


@pytest.mark.parametrize("initialize", [writes, removes])
def test_initializers_of_tensorflow_1_touch_no_files(tmp_path, initialize):
    of_tensorflow_1(tmp_path / "1", initialize=lambda: tf.group(initialize()))
    with pytest.raises(ValueError, match=r"\['(SaveV2|MergeV2Checkpoints)'\] could run"):
        read_signatures(tmp_path / "1")


def edited(path, change):
    """Changes the SavedModel in a directory."""
    file = path / "saved_model.pb"
    proto = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    change(proto.meta_graphs[0])
    file.write_bytes(proto.SerializeToString())


@pytest.mark.parametrize(
    ("harm", "says"), [(writes, "SaveV2"), (removes, "MergeV2Checkpoints")], ids=["save", "merge"]
)
def test_restoring_in_tensorflow_1_reads_alone(tmp_path, harm, says):
    of_tensorflow_1(tmp_path / "1", change=lambda: tf.group(harm(), name="harm"))

    def change(graph):
        (restore,) = (
            node for node in graph.graph_def.node if node.name == graph.saver_def.restore_op_name
        )
        restore.input.append("^harm")

    edited(tmp_path / "1", change)
    with pytest.raises(ValueError, match=rf"\['{says}'\] could run"):
        read_signatures(tmp_path / "1")


def test_restoring_in_tensorflow_1_reads_the_models_own_variables(tmp_path):
    of_tensorflow_1(tmp_path / "1", change=lambda: tf.constant("/other/model", name="other"))

    def change(graph):
        for node in graph.graph_def.node:
            if node.op == "RestoreV2":
                node.input[0] = "other"

    edited(tmp_path / "1", change)
    with pytest.raises(ValueError, match=r"\['RestoreV2'\] could run"):
        read_signatures(tmp_path / "1")


def test_a_dataset_service_is_not_asked(tmp_path):
    def registers(x):
        tf.raw_ops.RegisterDatasetV2(
            dataset=tf.data.Dataset.range(3)._variant_tensor,
            address="127.0.0.1:1",
            protocol="grpc",
            external_state_policy=0,
            element_spec="",
            requested_dataset_id="",
            metadata="",
        )
        return {"y": tf.strings.length(x)}

    module = tf.Module()
    module.f = tf.function(registers, input_signature=[tf.TensorSpec((None,), tf.string)])
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.f})
    with pytest.raises(ValueError, match=r"\['RegisterDatasetV2'\] could run"):
        read_signatures(tmp_path)


def save_text_model(path, function, **attributes):
    """Saves a model with the signature y = function(texts)."""
    module = tf.Module()
    vars(module).update(attributes)
    module.f = tf.function(
        lambda x: {"y": function(x)}, input_signature=[tf.TensorSpec((None,), tf.string)]
    )
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.f})


def table_of(file):
    table = tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
    tf.raw_ops.InitializeTableFromTextFileV2(
        table_handle=table, filename=file, key_index=-2, value_index=-1
    )
    return tf.raw_ops.LookupTableSizeV2(table_handle=table)[None]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: table_of(x[0]),
        lambda x: table_of("/etc/passwd"),
        lambda x: tf.function(table_of)(x[0]),
        lambda x: tf.cond(tf.size(x) > 1, lambda: table_of(x[0]), lambda: table_of(x[1])),
        lambda x: tf.map_fn(lambda each: table_of(each)[0], x, fn_output_signature=tf.int64),
    ],
    ids=["request", "constant", "function", "branch", "loop"],
)
def test_predictions_fill_no_tables_from_files(tmp_path, function):
    save_text_model(tmp_path, function)
    with pytest.raises(ValueError, match=r"\['InitializeTableFromTextFileV2'\] could run"):
        read_signatures(tmp_path)


def words_model(path, words):
    words.write_text("one\ntwo\n")
    model = keras.Sequential(
        [keras.Input((), dtype="string"), keras.layers.StringLookup(vocabulary=str(words))]
    )
    model.export(path, format="tf_saved_model", verbose=False)


def test_layers_with_a_file_of_words_are_loaded(tmp_path):
    words_model(tmp_path / "1", tmp_path / "words.txt")
    assert read_signatures(tmp_path / "1")


def test_functions_that_fill_a_table_are_called_by_the_loader_alone(tmp_path):
    """A second function that the loader calls could pass another file to the first one."""
    words_model(tmp_path / "1", tmp_path / "words.txt")

    def change(graph):
        (fills,) = (
            each
            for each in graph.graph_def.library.function
            if any(node.op.startswith("InitializeTable") for node in each.node_def)
        )
        other = graph.graph_def.library.function.add()
        other.signature.name = "other"
        other.signature.input_arg.add(name="table", type=tf.resource.as_datatype_enum)
        file = other.node_def.add(op="Const", name="file")
        file.attr["dtype"].type = tf.string.as_datatype_enum
        file.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/etc/passwd"))
        call = other.node_def.add(op="StatefulPartitionedCall", name="call")
        call.input.extend(["file:output:0", "table"])
        call.attr["f"].func.name = fills.signature.name
        for node in graph.object_graph_def.nodes:
            if node.HasField("function") and "creator" in node.function.concrete_functions[0]:
                node.function.concrete_functions[0] = "other"

    edited(tmp_path / "1", change)
    with pytest.raises(ValueError, match=r"\['InitializeTableFromTextFileV2'\] could run"):
        read_signatures(tmp_path / "1")


def with_memory(x):
    """Returns a number that operations with a state of their own compute, and pure ones."""
    numbers = tf.data.Dataset.from_tensor_slices(x).batch(2).map(tf.strings.length)
    total = numbers.prefetch(1).reduce(0, lambda n, each: n + tf.size(each))
    array = tf.TensorArray(tf.float32, 3)
    for i in tf.range(3):
        array = array.write(i, tf.random.uniform(()) + tf.random.stateless_normal((), (1, 2)))
    queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.float32])
    with tf.control_dependencies(
        [tf.raw_ops.QueueEnqueueV2(handle=queue, components=[array.stack()[0]])]
    ):
        first = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.float32])[0]
    tf.print("rows:", total)
    tf.debugging.assert_greater(total, 0)
    return tf.raw_ops.Timestamp() + tf.cast(total, tf.float64) + tf.cast(first[None], tf.float64)


def test_operations_with_a_state_of_their_own_are_loaded(tmp_path):
    save_text_model(tmp_path, with_memory)
    assert read_signatures(tmp_path)


@pytest.mark.parametrize(
    "operation",
    ["NoSuchOperation", "Abort", "RemoteCall", "Skipgram", "RpcServerStart", "_Send"],
)
def test_operations_that_are_not_known_to_be_safe_are_not_loaded(tmp_path, monkeypatch, operation):
    save_text_model(tmp_path, tf.strings.length)

    def change(graph):
        for function in graph.graph_def.library.function:
            for node in function.node_def:
                if node.op == "StringLength":
                    node.op = operation

    edited(tmp_path, change)
    with pytest.raises(ValueError, match=rf"\['{operation}'\] could run .* --trust_models"):
        read_signatures(tmp_path)
    monkeypatch.setenv("KDIST_TRUST_MODELS", "1")
    assert read_signatures(tmp_path)


def test_only_predictions_are_signatures(tmp_path):
    module = tf.Module()
    tf.saved_model.save(module, str(tmp_path))
    with pytest.raises(ValueError, match="no signature for predictions"):
        read_signatures(tmp_path)
