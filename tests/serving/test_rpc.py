"""TensorFlow Serving's gRPC API, used through the stubs of tensorflow-serving-api."""

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import any_pb2
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
)

from tests.serving.conftest import dense
from tests.serving.running import SECONDS, predict_request, unharmed

X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
PREDICT = "/tensorflow.serving.PredictionService/Predict"


@pytest.fixture(scope="module")
def stubs(served):
    with served.stubs() as both:
        yield both


@pytest.fixture(scope="module")
def predict(stubs):
    return lambda request: stubs[0].Predict(request, timeout=SECONDS)


@pytest.fixture(scope="module", autouse=True)
def neighbour(predict):
    """Sends valid requests during all tests."""
    request = predict_request("first", inputs=X)

    def ask():
        return np.round(tf.make_ndarray(predict(request).outputs["outputs"]), 4).tolist()

    with unharmed(ask):
        yield


def test_predictions_are_the_models(predict):
    answer = predict(predict_request("first", inputs=X))
    expected = dense(0).predict(X, verbose=0)
    np.testing.assert_allclose(tf.make_ndarray(answer.outputs["outputs"]), expected, atol=1e-6)
    assert answer.model_spec.name == "first"
    assert answer.model_spec.version.value == 1
    assert answer.model_spec.signature_name == "serving_default"


def test_several_inputs_and_outputs(predict):
    request = predict_request("mixed", a=np.array([[1, 0]], "float32"), n=np.array([3], "int32"))
    request.model_spec.version.value = 1
    outputs = predict(request).outputs
    assert tf.make_ndarray(outputs["product"]).tolist() == [[1.0, 2.0]]
    assert tf.make_ndarray(outputs["twice"]).tolist() == [6]
    request.output_filter.append("twice")
    assert list(predict(request).outputs) == ["twice"]


def test_strings(predict):
    texts = np.array([b"a\xff", b"b"], object)
    outputs = predict(predict_request("mixed", "text", s=texts)).outputs
    assert outputs["raw_bytes"].string_val == [b"a\xff", b"b"]
    assert outputs["upper"].string_val == [b"A\xff", b"B"]


def test_values_that_are_not_in_tensor_content(predict):
    """Clients in other languages send fewer values if the rest are equal."""
    request = predict_request("first", inputs=np.ones((2, 4), "float32"))
    wanted = predict(request).outputs
    tensor = request.inputs["inputs"]
    tensor.tensor_content = b""
    tensor.float_val.append(1.0)
    assert predict(request).outputs == wanted


def _made(monkeypatch):
    """Returns a list that receives the shapes of all arrays that are made of messages."""
    made, make = [], tf.make_ndarray

    def noted(proto):
        made.append([size.size for size in proto.tensor_shape.dim])
        return make(proto)

    monkeypatch.setattr(tf, "make_ndarray", noted)
    return made


@pytest.mark.parametrize(
    ("shape", "says"),
    [((1, 250_000), "takes (any, 4)"), ((60_000, 4), "a request of 60,000 rows")],
    ids=["shape", "rows"],
)
def test_nothing_is_made_of_few_bytes_that_say_much(predict, monkeypatch, shape, says):
    made = _made(monkeypatch)
    request = changed(tensor(tensor_content=b"", float_val=[1.0], shape=shape))
    with pytest.raises(grpc.RpcError) as error:
        predict(request)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert says in error.value.details()
    assert list(shape) not in made


def test_what_few_bytes_stand_for_is_held(served, predict):
    request = changed(tensor(tensor_content=b"", float_val=[1.0], shape=(1, 250_000)), **ANY)
    assert predict(request).outputs["y"].tensor_shape.dim[1].size == 250_000
    with served.models.body_memory.request() as hold:
        hold((1 << 30) - 900_000)
        with pytest.raises(grpc.RpcError, match="other requests in flight hold"):
            predict(request)


def test_one_string_that_stands_for_all_is_counted_as_often(served, predict, monkeypatch):
    """300 kB of text in a thousand rows are 300 MB in TensorFlow, of 1 MiB for a request."""
    request = changed(tensor(string_val=[b"x" * 300_000], shape=(1000,)), **TEXT)
    assert request.ByteSize() < 310_000
    made = _made(monkeypatch)
    with pytest.raises(grpc.RpcError) as error:
        predict(request)
    assert [1000] not in made
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "of shape [1000] is larger than 1,048,576 bytes" in error.value.details()


@pytest.mark.parametrize(("length", "held"), [(0, 65_000), (300, 365_000)])
def test_strings_are_held_with_what_they_need_besides(served, predict, length, held):
    request = changed(tensor(string_val=[b"x" * length], shape=(1000,)), **TEXT)
    assert len(predict(request).outputs["upper"].string_val) == 1000
    with served.models.body_memory.request() as hold:
        hold((1 << 30) - held + 5000)
        with pytest.raises(grpc.RpcError, match="other requests in flight hold"):
            predict(request)


def test_strings_of_rest_are_held_too(served):
    body = {"signature_name": "text", "instances": [""] * 1000}
    assert served.post("/v1/models/mixed:predict", body).status_code == 200
    with served.models.body_memory.request() as hold:
        hold((1 << 30) - 60_000)
        response = served.post("/v1/models/mixed:predict", body)
    assert response.status_code == 429, response.text
    assert "other requests in flight hold" in response.text


def test_predictions_alone_are_counted(served, stubs, predict):
    def count():
        # The model that nothing else asks for.
        line = 'kdist_serving_requests_total{model="second",protocol="grpc",status="OK"} '
        text = served.get("/metrics").text
        return sum(float(each.removeprefix(line)) for each in text.splitlines() if line in each)

    before = count()
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "second"
    stubs[1].GetModelStatus(request, timeout=SECONDS)
    assert count() == before
    predict(predict_request("second", inputs=X))
    assert count() == before + 1


def test_metadata(stubs):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "mixed"
    answer = stubs[0].GetModelMetadata(request, timeout=SECONDS)
    assert answer.model_spec.version.value == 1
    assert isinstance(answer.metadata["signature_def"], any_pb2.Any)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(signatures)
    names = {"serving_default", "text", "pixels", "any", "halves"}
    assert set(signatures.signature_def) == names
    assert signatures.signature_def["text"].inputs["s"].dtype == types_pb2.DT_STRING


def test_status(stubs):
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "first"
    (status,) = stubs[1].GetModelStatus(request, timeout=SECONDS).model_version_status
    assert status.version == 1
    assert status.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
    assert status.status.error_code == 0


def changed(change, model="first", signature="", **arrays):
    """Returns a valid request with one change."""
    request = predict_request(model, signature, **(arrays or {"inputs": X}))
    change(request)
    return request


def tensor(**fields):
    """Returns a function that changes the tensor of the only input."""

    def change(request):
        (name,) = request.inputs
        for field, value in fields.items():
            if field == "shape":
                proto = request.inputs[name].tensor_shape
                del proto.dim[:]
                for size in value:
                    proto.dim.add(size=size)
            elif isinstance(value, list):
                getattr(request.inputs[name], field).extend(value)
            else:
                setattr(request.inputs[name], field, value)

    return change


def spec(**fields):
    def change(request):
        for field, value in fields.items():
            if field == "version":
                request.model_spec.version.value = value
            else:
                setattr(request.model_spec, field, value)

    return change


PIXELS = {"model": "mixed", "signature": "pixels", "p": np.zeros((1, 2, 2), "uint8")}
TEXT = {"model": "mixed", "signature": "text", "s": np.array([b"a"], object)}
ANY = {"model": "mixed", "signature": "any", "x": np.array([1.0], "float32")}
BOTH = {"model": "mixed", "a": np.zeros((2, 2), "float32"), "n": np.zeros(3, "int32")}
INVALID, NOT_FOUND, EXHAUSTED = "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"


def nothing(request):
    pass


def unknown_input(request):
    request.inputs["more"].CopyFrom(request.inputs["inputs"])


def long_name(request):
    request.inputs["m" * 200_000].CopyFrom(request.inputs["inputs"])


BAD = {
    "no model": (changed(spec(name="")), NOT_FOUND, "'' is not served"),
    "unknown model": (changed(spec(name="none")), NOT_FOUND, "'none'"),
    "a path": (changed(spec(name="../first")), NOT_FOUND, "'../first'"),
    "a long name": (changed(spec(name="n" * 200_000)), NOT_FOUND, "nnn"),
    "version 0": (changed(spec(version=0)), NOT_FOUND, "version 0"),
    "version below 0": (changed(spec(version=-1)), NOT_FOUND, "version -1"),
    "a huge version": (changed(spec(version=(1 << 63) - 1)), NOT_FOUND, "version 9223"),
    "a label": (changed(spec(version_label="stable")), INVALID, "version labels"),
    "unknown signature": (changed(spec(signature_name="train")), INVALID, "not 'train'"),
    "no inputs": (changed(lambda r: r.inputs.clear()), INVALID, "are missing"),
    "unknown input": (changed(unknown_input), INVALID, "unknown inputs ['more']"),
    "unknown input, long": (changed(long_name), INVALID, "unknown inputs"),
    "one of two inputs": (
        changed(lambda r: r.inputs.pop("n"), **BOTH),
        INVALID,
        "['n'] are missing",
    ),
    "different numbers of rows": (changed(nothing, **BOTH), INVALID, "same number"),
    "no rows": (changed(nothing, inputs=X[:0]), INVALID, "at least 1"),
    "too few columns": (changed(nothing, inputs=X[:, :3]), INVALID, "takes (any, 4)"),
    "too high a rank": (changed(nothing, inputs=X[None]), INVALID, "takes (any, 4)"),
    "too low a rank": (changed(nothing, inputs=X[0]), INVALID, "takes (any, 4)"),
    "a scalar": (changed(nothing, inputs=X[0, 0]), INVALID, "takes (any, 4)"),
    "a scalar where any rank may be": (changed(tensor(shape=()), **ANY), INVALID, "rows"),
    "doubles": (changed(nothing, inputs=X.astype("float64")), INVALID, "DT_DOUBLE"),
    "integers": (changed(nothing, inputs=X.astype("int32")), INVALID, "DT_INT32"),
    "strings": (changed(nothing, inputs=X.astype("S")), INVALID, "DT_STRING"),
    "no dtype": (changed(tensor(dtype=0)), INVALID, "no dtype"),
    "a dtype that there is not": (changed(tensor(dtype=999)), INVALID, "type 999"),
    "a reference": (changed(tensor(dtype=types_pb2.DT_FLOAT_REF)), INVALID, "DT_FLOAT_REF"),
    "a resource": (changed(tensor(dtype=types_pb2.DT_RESOURCE)), INVALID, "DT_RESOURCE"),
    "a variant": (changed(tensor(dtype=types_pb2.DT_VARIANT), **TEXT), INVALID, "DT_VARIANT"),
    "quantised": (changed(tensor(dtype=types_pb2.DT_QUINT8), **PIXELS), INVALID, "DT_QUINT8"),
    "unknown rank": (
        changed(lambda r: setattr(r.inputs["inputs"].tensor_shape, "unknown_rank", True)),
        INVALID,
        "give every size",
    ),
    "negative sizes": (changed(tensor(shape=(-5, -4))), INVALID, "give every size"),
    "content too short": (changed(tensor(tensor_content=b"1234")), INVALID, "its declared shape"),
    "content of odd bytes": (
        changed(tensor(tensor_content=b"12345")),
        INVALID,
        "its declared shape",
    ),
    "content too long": (changed(tensor(shape=(1, 4))), INVALID, "its declared shape"),
    "content of strings": (
        changed(tensor(tensor_content=b"1" * 8), **TEXT),
        INVALID,
        "its declared shape",
    ),
    "too many values": (
        changed(tensor(tensor_content=b"", float_val=[1.0] * 21)),
        INVALID,
        "its declared shape",
    ),
    "beyond uint8": (
        changed(tensor(tensor_content=b"", int_val=[300, 0, 0, 0]), **PIXELS),
        INVALID,
        "its declared shape",
    ),
    "10^12 elements by one value": (
        changed(tensor(tensor_content=b"", float_val=[1.0], shape=(250_000_000_000, 4))),
        EXHAUSTED,
        "larger than 1,048,576 bytes",
    ),
    "more elements than a number holds": (
        changed(tensor(tensor_content=b"", float_val=[1.0], shape=(1 << 62, 4))),
        EXHAUSTED,
        "larger than",
    ),
    "sizes of which one is 0": (
        changed(tensor(tensor_content=b"", shape=(0, 1 << 62))),
        INVALID,
        "shape",
    ),
    "a large message": (changed(nothing, inputs=np.zeros((99_999, 4), "f")), EXHAUSTED, "larger"),
    "unknown output": (
        changed(lambda r: r.output_filter.append("y")),
        INVALID,
        "unknown outputs ['y']",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_requests(predict, kind):
    request, code, says = BAD[kind]
    with pytest.raises(grpc.RpcError) as error:
        predict(request)
    assert error.value.code().name == code, error.value.details()
    assert says in error.value.details()
    assert len(error.value.details()) < 2000


@pytest.mark.parametrize(
    "message",
    [predict_request("first", inputs=X).SerializeToString()[:-9], b"\xff" * 50],
    ids=["cut off", "garbage"],
)
def test_messages_that_are_none(served, message):
    with served.channel() as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(PREDICT)(message, timeout=SECONDS)
    assert error.value.code().name == INVALID
    assert "not a valid PredictRequest" in error.value.details()


def test_no_message_at_all_asks_for_no_model(served):
    with served.channel() as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(PREDICT)(b"", timeout=SECONDS)
    assert error.value.code().name == NOT_FOUND


def test_methods_that_are_not_served(served):
    with served.channel() as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary("/tensorflow.serving.PredictionService/Classify")(b"", timeout=SECONDS)
    assert error.value.code().name == "UNIMPLEMENTED"


@pytest.mark.parametrize("fields", [[], ["signature_def", "weights"]], ids=["none", "unknown"])
def test_metadata_that_there_is_not(stubs, fields):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
    request.model_spec.name = "first"
    with pytest.raises(grpc.RpcError, match="signature_def") as error:
        stubs[0].GetModelMetadata(request, timeout=SECONDS)
    assert error.value.code().name == INVALID


def test_status_of_what_there_is_not(stubs):
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "first"
    request.model_spec.version.value = 0
    with pytest.raises(grpc.RpcError, match="no version 0") as error:
        stubs[1].GetModelStatus(request, timeout=SECONDS)
    assert error.value.code().name == NOT_FOUND


def test_short_deadlines_and_clients_that_go(stubs, predict):
    request, codes = predict_request("first", inputs=X), set()
    for _ in range(20):
        try:
            stubs[0].Predict(request, timeout=1e-3)
        except grpc.RpcError as error:
            codes.add(error.code().name)
        call = stubs[0].Predict.future(request, timeout=SECONDS)
        call.cancel()
    assert codes <= {"DEADLINE_EXCEEDED"}
    assert predict(request)


def test_made_up_signatures_leave_nothing_behind(served, predict):
    version = served.models.model("first").version()
    for number in range(50):
        with pytest.raises(grpc.RpcError):
            predict(changed(spec(signature_name=f"made up {number}")))
    assert set(version._batchers) <= set(version.signatures)
