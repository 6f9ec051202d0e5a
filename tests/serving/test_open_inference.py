"""Open Inference Protocol (KServe v2) over REST and gRPC."""

import base64
import struct

import grpc
import numpy as np
import pytest

import kdist
from kdist.serving.protocol.open_inference import messages
from tests.serving.conftest import dense
from tests.serving.running import SECONDS

X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
INFER, MIXED = "/v2/models/first/infer", "/v2/models/mixed/infer"


@pytest.fixture(scope="module")
def expected():
    return dense(0).predict(X, verbose=0)


def tensor(name="inputs", kind="FP32", shape=(1, 4), data=(1, 2, 3, 4), **more):
    return {"name": name, "datatype": kind, "shape": list(shape), "data": list(data), **more}


def request(*tensors, signature=None, **more):
    parameters = {"parameters": {"signature_name": signature}} if signature else {}
    return {"inputs": list(tensors), **parameters, **more}


def infer(served, path, document):
    answer = served.post(path, document)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer, status, says):
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert says in answer.json()["error"]
    assert len(answer.text) < 2000


def test_flat_and_nested_data_are_alike(served, expected):
    for data in (X.ravel().tolist(), X.tolist()):
        document = request(tensor(shape=(3, 4), data=data), id="42")
        for path in (INFER, "/v2/models/first/versions/1/infer"):
            answer = infer(served, path, document)
            (output,) = answer.pop("outputs")
            assert answer == {"model_name": "first", "model_version": "1", "id": "42"}
            np.testing.assert_allclose(output.pop("data"), expected.ravel(), atol=1e-6)
            assert output == {"name": "outputs", "datatype": "FP32", "shape": [3, 3]}


def test_several_inputs_and_the_outputs_that_are_asked_for(served):
    inputs = [tensor("n", "INT32", [1], [3]), tensor("a", shape=[1, 2], data=[1, 0])]
    answer = infer(served, MIXED, request(*inputs, outputs=[{"name": "twice"}]))
    twice = tensor("twice", "INT32", [1], [6])
    product = tensor("product", "FP32", [1, 2], [1.0, 2.0])
    assert answer["outputs"] == [twice]
    assert "id" not in answer
    assert infer(served, MIXED, request(*inputs))["outputs"] == [product, twice]


def test_bytes_are_text_or_base64(served):
    answer = infer(served, MIXED, request(tensor("s", "BYTES", [1], ["aé"]), signature="text"))
    assert answer["outputs"][1] == tensor("upper", "BYTES", [1], ["Aé"])
    encoded = [base64.b64encode(each).decode() for each in (b"\xff\x00", b"a")]
    kind = {"content_type": "base64"}
    sent = tensor("s", "BYTES", [2], encoded, parameters=kind)
    answer = infer(served, MIXED, request(sent, signature="text"))
    assert answer["outputs"][0] == tensor("raw_bytes", "BYTES", [2], encoded, parameters=kind)


def test_other_types(served):
    pixels = tensor("p", "UINT8", [1, 2, 2], [0, 255, 1, 0])
    answer = infer(served, MIXED, request(pixels, signature="pixels"))
    assert answer["outputs"] == [tensor("mean", "FP32", [1], [64.0])]
    numbers = tensor("x", "FP32", [2], [0.5, 7])
    answer = infer(served, MIXED, request(numbers, signature="halves"))
    assert answer["outputs"] == [tensor("y", "FP16", [2], [0.5, 7.0])]


def test_health_and_metadata(served, monkeypatch):
    for path, wanted in {
        "/v2": {"name": "kdist", "version": kdist.__version__, "extensions": []},
        "/v2/": {"name": "kdist", "version": kdist.__version__, "extensions": []},
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"live": True, "ready": True},
        "/v2/models/first/ready": {"name": "first", "ready": True},
        "/v2/models/first/versions/1/ready": {"name": "first", "ready": True},
        "/v2/models/first": {
            "name": "first",
            "versions": ["1"],
            "platform": "tensorflow_savedmodel",
            "inputs": [{"name": "inputs", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "outputs", "datatype": "FP32", "shape": [-1, 3]}],
        },
    }.items():
        answer = served.get(path)
        assert (answer.status_code, answer.json()) == (200, wanted), path
    monkeypatch.setattr(served.models, "ending", True)
    for path in ("/v2/health/ready", "/v2/models/first/ready"):
        assert served.get(path).status_code == 503
        assert served.get(path).json()["ready"] is False
    assert served.get("/v2/health/live").status_code == 200
    monkeypatch.undo()
    refused(served.get("/v2/models/none"), 404, "'none' is not served")
    refused(served.get("/v2/models/none/ready"), 404, "'none' is not served")
    refused(served.get("/v2/models/first/versions/7/ready"), 404, "no version 7")


BAD = {
    "no JSON": (b"{", "not valid JSON"),
    "no object": (b"[]", "an object"),
    "no inputs": ({}, '"inputs" must be a list'),
    "unknown key": (request(tensor(), input=1), "unknown keys ['input']"),
    "no shape": ({"inputs": [{"name": "inputs"}]}, "must be an object with"),
    "no tensor": ({"inputs": [1]}, "must be an object with"),
    "a name of no string": (request(tensor(name=1)), "must be a string"),
    "unknown input": (request(tensor("x")), "['inputs'] are missing"),
    "an input twice": (request(tensor(), tensor()), "given twice"),
    "another type": (request(tensor(kind="FP64")), "is FP64, and the model takes FP32"),
    "no type": (request(tensor(kind=None)), "is None"),
    "another shape": (request(tensor(shape=[1, 3])), "takes (any, 4)"),
    "too few numbers": (request(tensor(data=[1, 2])), "declared shape is [1, 4]"),
    "nested otherwise": (request(tensor(data=[[1, 2], [3, 4]])), "declared shape is [1, 4]"),
    "ragged": (request(tensor(data=[[1, 2], [3]])), "rows differ in shape"),
    "sizes that are negative": (request(tensor(shape=[-1, -4])), "not negative"),
    "sizes that are booleans": (request(tensor(shape=[True, 4])), "integers"),
    "strings for numbers": (request(tensor(data=["1"] * 4)), "not strings"),
    "data of no list": (request({**tensor(), "data": 5}), "must be a list"),
    "unknown output": (request(tensor(), outputs=[{"name": "y"}]), "unknown outputs ['y']"),
    "an id of no string": (request(tensor(), id=5), "must be a string"),
    "parameters of no object": (request(tensor(), parameters=[1]), "must be an object"),
    "unknown signature": (request(tensor(), signature="train"), "not 'train'"),
    "nested without end": (b'{"inputs": ' + b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_bodies(served, kind):
    body, says = BAD[kind]
    refused(served.post(INFER, body), 400, says)


def test_other_requests_that_are_refused(served):
    refused(served.get(INFER), 405, "POST")
    refused(served.post("/v2/models/none/infer", request()), 404, "'none'")
    refused(served.post("/v2/models/first/versions/x/infer", request()), 400, "a whole number")
    refused(served.post(INFER, b"9" * (2 << 20)), 413, "1,048,576")
    headers = {"Inference-Header-Content-Length": "5"}
    refused(served.post(INFER, b"{}", headers=headers), 415, "binary tensors")
    text = tensor("s", "BYTES", [1], ["?"], parameters={"content_type": "base64"})
    refused(served.post(MIXED, request(text, signature="text")), 400, "invalid base64")
    ranks = request(tensor("x", shape=[1] * 99, data=[1]), signature="any")
    refused(served.post(MIXED, ranks), 400, "up to 32 sizes")


@pytest.fixture(scope="module")
def call(served):
    """Returns a function that calls a method of the service, for the response."""
    with served.channel() as channel:

        def ask(method, message):
            function = channel.unary_unary(
                f"/inference.GRPCInferenceService/{method}",
                type(message).SerializeToString,
                getattr(messages, f"{method}Response").FromString,
            )
            return function(message, timeout=SECONDS)

        yield ask


def inference(*tensors, model="first", raw=(), signature=None, **more):
    """Returns a request with tensors (name, datatype, shape, contents)."""
    message = messages.ModelInferRequest(model_name=model, raw_input_contents=raw, **more)
    for name, kind, shape, contents in tensors:
        message.inputs.add(name=name, datatype=kind, shape=shape, contents=contents)
    if signature:
        message.parameters["signature_name"].string_param = signature
    return message


PUBLISHED = (
    "0a016d1201331a016922150a0e7369676e61747572655f6e616d6512031a01732a160a0178120542595445531a02"
    "01022a0642016142016232030a01793a0172"
)


def test_the_messages_are_those_of_the_published_proto():
    """The bytes were written by the classes that protoc generates from the published file."""
    message = inference(
        ("x", "BYTES", [1, 2], {"bytes_contents": [b"a", b"b"]}),
        model="m",
        raw=[b"r"],
        signature="s",
        model_version="3",
        id="i",
        outputs=[{"name": "y"}],
    )
    assert message.SerializeToString(deterministic=True) == bytes.fromhex(PUBLISHED)
    assert messages.ModelInferRequest.FromString(bytes.fromhex(PUBLISHED)) == message


def test_grpc_has_the_form_of_the_request(call, expected):
    contents = ("inputs", "FP32", X.shape, {"fp32_contents": X.ravel()})
    raw = ("inputs", "FP32", X.shape, None)
    for message in (inference(contents, id="7"), inference(raw, raw=[X.tobytes()], id="7")):
        answer = call("ModelInfer", message)
        assert (answer.model_name, answer.model_version, answer.id) == ("first", "1", "7")
        (output,) = answer.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("outputs", "FP32", [3, 3])
        found = output.contents.fp32_contents
        if message.raw_input_contents:
            (found,) = answer.raw_output_contents
            found = np.frombuffer(found, "float32")
        np.testing.assert_allclose(found, expected.ravel(), atol=1e-6)


def test_grpc_with_other_types(call):
    strings = {"bytes_contents": [b"a\xff", b""]}
    answer = call(
        "ModelInfer", inference(("s", "BYTES", [2], strings), model="mixed", signature="text")
    )
    assert list(answer.outputs[1].contents.bytes_contents) == [b"A\xff", b""]
    raw = struct.pack("<I2sI", 2, b"a\xff", 0)
    answer = call(
        "ModelInfer",
        inference(("s", "BYTES", [2], None), model="mixed", signature="text", raw=[raw]),
    )
    assert answer.raw_output_contents[1] == struct.pack("<I2sI", 2, b"A\xff", 0)
    halves = inference(
        ("x", "FP32", [2], {"fp32_contents": [0.5, 7]}), model="mixed", signature="halves"
    )
    (content,) = call("ModelInfer", halves).raw_output_contents  # FP16 has no other form
    assert np.frombuffer(content, "float16").tolist() == [0.5, 7.0]
    pixels = ("p", "UINT8", [1, 2, 2], {"uint_contents": [0, 255, 1, 0]})
    answer = call("ModelInfer", inference(pixels, model="mixed", signature="pixels"))
    assert list(answer.outputs[0].contents.fp32_contents) == [64.0]


def test_grpc_health_and_metadata(call):
    assert call("ServerLive", messages.ServerLiveRequest()).live
    assert call("ServerReady", messages.ServerReadyRequest()).ready
    assert call("ServerMetadata", messages.ServerMetadataRequest()).version == kdist.__version__
    assert call("ModelReady", messages.ModelReadyRequest(name="first", version="1")).ready
    answer = call("ModelMetadata", messages.ModelMetadataRequest(name="mixed"))
    assert (answer.platform, list(answer.versions)) == ("tensorflow_savedmodel", ["1"])
    found = [(each.name, each.datatype, list(each.shape)) for each in answer.inputs]
    assert found == [("a", "FP32", [-1, 2]), ("n", "INT32", [-1])]


ROW = ("inputs", "FP32", [1, 4], {"fp32_contents": [1, 2, 3, 4]})
RAW = ("inputs", "FP32", [1, 4], None)


def text(raw, shape=(1,)):
    return inference(("s", "BYTES", shape, None), model="mixed", signature="text", raw=[raw])


def pixels(values):
    contents = {"uint_contents": values}
    return inference(("p", "UINT8", [1, 2, 2], contents), model="mixed", signature="pixels")


BAD_MESSAGES = {
    "unknown model": (inference(ROW, model="none"), "NOT_FOUND", "'none'"),
    "unknown version": (inference(ROW, model_version="9"), "NOT_FOUND", "version 9"),
    "a version of no number": (inference(ROW, model_version="x"), "INVALID_ARGUMENT", "whole"),
    "unknown signature": (inference(ROW, signature="train"), "INVALID_ARGUMENT", "not 'train'"),
    "no inputs": (inference(), "INVALID_ARGUMENT", "are missing"),
    "an input twice": (inference(ROW, ROW), "INVALID_ARGUMENT", "twice"),
    "another type": (
        inference(("inputs", "INT32", [1, 4], None)),
        "INVALID_ARGUMENT",
        "takes FP32",
    ),
    "another shape": (inference(("inputs", "FP32", [4], ROW[3])), "INVALID_ARGUMENT", "takes"),
    "too few values": (inference((*ROW[:2], [2, 4], ROW[3])), "INVALID_ARGUMENT", "needs 8"),
    "too few bytes": (inference(RAW, raw=[b"1234"]), "INVALID_ARGUMENT", "needs 16"),
    "two raw contents": (inference(RAW, raw=[b"", b""]), "INVALID_ARGUMENT", "2 raw"),
    "both forms": (inference(ROW, raw=[b"1" * 16]), "INVALID_ARGUMENT", "not both"),
    "many rows": (inference((*ROW[:2], [60_000, 4], None)), "INVALID_ARGUMENT", "60,000 rows"),
    "more than a body": (
        inference(("x", "FP32", [1, 1 << 40], None), model="mixed", signature="any"),
        "RESOURCE_EXHAUSTED",
        "1,048,576",
    ),
    "many empty strings": (text(bytes(1 << 19), [1, 1 << 17]), "INVALID_ARGUMENT", "takes"),
    "a string cut off": (text(struct.pack("<I1s", 2, b"a")), "INVALID_ARGUMENT", "BYTES"),
    "a length cut off": (text(b"\1\0"), "INVALID_ARGUMENT", "BYTES"),
    "more strings than declared": (text(bytes(8)), "INVALID_ARGUMENT", "hold 1 strings"),
    "beyond uint8": (pixels([300, 0, 0, 0]), "INVALID_ARGUMENT", "beyond UINT8"),
    "unknown output": (
        inference(ROW, outputs=[{"name": "y"}]),
        "INVALID_ARGUMENT",
        "unknown outputs ['y']",
    ),
}


@pytest.mark.parametrize("kind", BAD_MESSAGES)
def test_bad_messages(call, kind):
    message, code, says = BAD_MESSAGES[kind]
    with pytest.raises(grpc.RpcError) as error:
        call("ModelInfer", message)
    assert (error.value.code().name, says in error.value.details()) == (code, True), str(error)


def test_strings_are_held_with_what_they_need_besides(served, call):
    message = text(bytes(4 * 1000), [1000])
    call("ModelInfer", message)
    with served.models.body_memory.request() as hold:
        hold((1 << 30) - 60_000)
        with pytest.raises(grpc.RpcError, match="other requests in flight hold"):
            call("ModelInfer", message)
