"""TensorFlow Serving's REST API, as its clients use it."""

import base64
import json
import subprocess
from concurrent import futures

import numpy as np
import pytest

from tests.serving.conftest import dense
from tests.serving.running import SECONDS, predict_request

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


@pytest.fixture(scope="module")
def expected():
    """Returns {model: predictions of Keras for X}."""
    return {name: dense(n).predict(X, verbose=0) for n, name in enumerate(("first", "second"))}


def rows_of(number):
    """Returns 1 to 40 rows of X."""
    first = number % 24
    return slice(first, first + 1 + (number * 7) % 40)


def over_rest(served, name, rows):
    document = {"instances": X[rows].tolist()}
    return np.array(served.predict(name, document)["predictions"])


def over_grpc(stub, name, rows):
    answer = stub.Predict(predict_request(name, inputs=X[rows]), timeout=SECONDS)
    shape = [size.size for size in answer.outputs["outputs"].tensor_shape.dim]
    return np.frombuffer(answer.outputs["outputs"].tensor_content, "float32").reshape(shape)


@pytest.mark.parametrize("clients", [1, 2, 8, 64])
def test_predictions_are_the_models_for_all_clients_and_batches(served, expected, clients):
    def ask(number):
        name, rows = ("first", "second")[number % 2], rows_of(number)
        ask = over_rest if number % 4 < 2 else over_grpc
        answer = ask(served if ask is over_rest else stub, name, rows)
        np.testing.assert_allclose(answer, expected[name][rows], rtol=0, atol=1e-6)
        return len(answer)

    count = max(16, 2 * clients)
    with served.stubs() as (stub, _), futures.ThreadPoolExecutor(clients) as pool:
        rows = list(pool.map(ask, range(count), timeout=SECONDS))
    assert rows == [len(X[rows_of(n)]) for n in range(count)]


def test_curl(served, expected):
    body = json.dumps({"instances": X[:2].tolist()})
    url = served.url("/v1/models/first/versions/1:predict")
    process = subprocess.run(
        ["curl", "-s", "-d", body, url], capture_output=True, timeout=SECONDS, check=True
    )
    answer = json.loads(process.stdout)
    assert list(answer) == ["predictions"]
    np.testing.assert_allclose(answer["predictions"], expected["first"][:2], atol=1e-6)


def test_columns_of_one_input_and_output(served, expected):
    for document in ({"inputs": X[:3].tolist()}, {"inputs": {"inputs": X[:3].tolist()}}):
        answer = served.predict("first", document)
        assert list(answer) == ["outputs"]
        np.testing.assert_allclose(answer["outputs"], expected["first"][:3], atol=1e-6)


def test_several_inputs_and_outputs_in_rows_and_in_columns(served):
    rows = [{"a": [1, 0], "n": 3}, {"n": -4, "a": [0.5, 1]}]
    wanted = [{"product": [1.0, 2.0], "twice": 6}, {"product": [3.5, 5.0], "twice": -8}]
    assert served.predict("mixed", {"instances": rows}) == {"predictions": wanted}
    columns = {"a": [[1, 0], [0.5, 1]], "n": [3, -4]}
    assert served.predict("mixed", {"signature_name": "serving_default", "inputs": columns}) == {
        "outputs": {"product": [[1.0, 2.0], [3.5, 5.0]], "twice": [6, -8]}
    }


def test_strings_and_bytes(served):
    raw = base64.b64encode(b"\xff\x00").decode()
    document = {"signature_name": "text", "instances": ["aé", {"b64": raw}]}
    assert served.predict("mixed", document) == {
        "predictions": [
            {"raw_bytes": {"b64": base64.b64encode("aé".encode()).decode()}, "upper": "Aé"},
            {"raw_bytes": {"b64": raw}, "upper": {"b64": raw}},
        ]
    }
    document = {"signature_name": "text", "inputs": {"s": [{"b64": raw}]}}
    assert served.predict("mixed", document)["outputs"]["raw_bytes"] == [{"b64": raw}]
    document = {"signature_name": "text", "instances": [{"s": "x"}]}
    assert served.predict("mixed", document)["predictions"][0]["upper"] == "X"


def test_small_integers_and_half_precision(served):
    document = {"signature_name": "pixels", "instances": [[[0, 255], [1, 0]]]}
    assert served.predict("mixed", document) == {"predictions": [64.0]}
    document = {"signature_name": "halves", "instances": [0.1, 7]}
    assert served.predict("mixed", document)["predictions"] == pytest.approx([0.1, 7], abs=1e-3)


def test_status(served):
    wanted = {
        "model_version_status": [
            {
                "version": "1",
                "state": "AVAILABLE",
                "status": {"error_code": "OK", "error_message": ""},
            }
        ]
    }
    for path in ("/v1/models/first", "/v1/models/first/versions/1"):
        response = served.get(path)
        assert (response.status_code, response.json()) == (200, wanted)
    assert served.get("/v1/models/first/versions/2").status_code == 404
    assert served.get("/v1/models").json() == {"models": ["first", "mixed", "second"]}


def test_metadata(served):
    answer = served.get("/v1/models/first/metadata").json()
    assert answer["model_spec"] == {"name": "first", "signature_name": "", "version": "1"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    shape = [{"size": "-1", "name": ""}, {"size": "4", "name": ""}]
    assert signature["inputs"]["inputs"]["dtype"] == "DT_FLOAT"
    assert signature["inputs"]["inputs"]["tensor_shape"] == {"dim": shape, "unknown_rank": False}
    assert served.get("/v1/models/first/versions/1/metadata").json() == answer


def test_health_and_metrics(served):
    over_rest(served, "first", slice(0, 3))
    assert served.get("/healthz").status_code == served.get("/readyz").status_code == 200
    text = served.get("/metrics").text
    for wanted in (
        'kdist_serving_requests_total{model="first",protocol="rest",status="200"}',
        'kdist_serving_request_seconds_bucket{le="0.0005",model="first",protocol="rest"}',
        'kdist_serving_batch_rows_count{model="first",version="1"}',
        'kdist_serving_waiting_rows{model="first",version="1"} 0.0',
    ):
        assert wanted in text
