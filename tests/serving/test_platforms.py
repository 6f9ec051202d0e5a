"""Routes of SageMaker, Vertex AI, KServe, and Cloud Run, by their published contracts."""

import pytest

from kdist.serving.platforms import find_platform
from kdist.serving.protocol.rest import tensorflow_json

ROW = [0.5, 1, 2, 3]
INVOCATIONS, ATTRIBUTES = "/invocations", "X-Amzn-SageMaker-Custom-Attributes"


@pytest.fixture(scope="module")
def sagemaker(served):
    with served.on(find_platform("sagemaker", {})) as it:
        yield it


@pytest.fixture(scope="module")
def vertex(served):
    environment = {"AIP_HEALTH_ROUTE": "/health/x", "AIP_PREDICT_ROUTE": "/v1/endpoints/1:predict"}
    with served.on(find_platform("vertex", environment)) as it:
        yield it


def wanted(served, model="first", **document):
    return served.predict(model, document or {"instances": [ROW]})


def alike(answer, other):
    """Compares two responses, whose batches may have differed."""
    assert answer.status_code == 200, answer.text
    (key,) = other
    assert list(answer.json()) == [key]
    assert answer.json()[key] == [pytest.approx(row, abs=1e-6) for row in other[key]]


def refused(answer, status, says):
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"


def test_routes_of_a_platform_are_served_there_alone(served):
    for path in ("/ping", INVOCATIONS):
        refused(served.get(path), 404, "does not exist")


def test_ping(sagemaker, monkeypatch):
    assert sagemaker.get("/ping").status_code == 200
    monkeypatch.setattr(sagemaker.models, "ending", True)
    assert sagemaker.get("/ping").status_code == 503


@pytest.mark.parametrize(
    ("body", "kind", "rows"),
    [
        (b'{"instances": [[0.5, 1, 2, 3]]}', "application/json", [ROW]),
        (b"[0.5, 1, 2, 3]", "application/json", [ROW]),
        (b"[[0.5, 1, 2, 3], [1, 2, 3, 4]]", "application/json; charset=utf-8", [ROW, [1, 2, 3, 4]]),
        (b"[0.5, 1, 2, 3]\n[1, 2, 3, 4]\n", "application/jsonlines", [ROW, [1, 2, 3, 4]]),
        (b"[[0.5, 1, 2, 3],\n\n[1, 2, 3, 4]]", None, [ROW, [1, 2, 3, 4]]),
        (b'{\n "instances":\n [[0.5, 1, 2, 3]]}\n', None, [ROW]),
    ],
)
def test_invocations(sagemaker, served, body, kind, rows):
    answer = sagemaker.post(INVOCATIONS, body, headers={"Content-Type": kind} if kind else {})
    alike(answer, wanted(served, instances=rows))


def test_rows_of_named_inputs():
    assert tensorflow_json(b'{"a": 1}\r\n{"a": 2}') == b'{"instances":[{"a": 1},{"a": 2}]}'
    assert tensorflow_json(b' {"a": 1} ') == b'{"instances":[ {"a": 1} ]}'


def test_attributes_select_a_model_and_its_version(sagemaker, served):
    headers = {ATTRIBUTES: "tfs-model-name=second, tfs-model-version=1,tfs-method=predict"}
    alike(sagemaker.post(INVOCATIONS, [ROW], headers=headers), wanted(served, "second"))


def test_the_accepted_type_is_that_of_the_response(sagemaker):
    for accept, kind in (
        ("application/jsonlines", "application/jsonlines"),
        ("application/json, application/jsonlines", "application/json"),
        ("text/html;q=0.5, */*", "application/json"),
    ):
        answer = sagemaker.post(INVOCATIONS, [ROW], headers={"Accept": accept})
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert "\n" not in answer.text


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        ({"Content-Type": "text/csv"}, b"1,2", 415, "instead of text/csv"),
        ({"Accept": "image/png"}, b"[1]", 406, "application/json"),
        ({ATTRIBUTES: "tfs-model-name=none"}, b"[1]", 404, "'none' is not served"),
        ({ATTRIBUTES: "tfs-model-version=9"}, b"[1]", 404, "version 9"),
        ({ATTRIBUTES: "tfs-model-version=x"}, b"[1]", 400, "a whole number"),
        ({ATTRIBUTES: "tfs-method=classify"}, b"[1]", 400, "only predict"),
        ({}, b"whatever", 400, "not valid JSON"),
        ({}, b'{"junk": 1}', 400, "['inputs'] are missing"),
        ({}, b"[[1, 2]]", 400, "takes (any, 4)"),
        ({}, b'[1],"inputs":[[2]]', 400, "not valid JSON"),
        ({}, b"[" * 100_000, 400, "not valid JSON"),
        ({}, b"9" * (2 << 20), 413, "1,048,576"),
        ({"Content-Encoding": "gzip"}, b"{}", 415, "Content-Encoding"),
    ],
)
def test_invocations_that_are_refused(sagemaker, headers, body, status, says):
    refused(sagemaker.post(INVOCATIONS, body, headers=headers), status, says)


def test_vertex(vertex, served):
    assert vertex.get("/health/x").status_code == 200
    for document in (
        {"instances": [ROW]},
        {"instances": [ROW], "parameters": None},
        {"parameters": {"signature_name": "serving_default"}, "instances": [{"inputs": ROW}]},
    ):
        alike(vertex.post("/v1/endpoints/1:predict", document), wanted(served))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"parameters": {}}, '"instances" or "inputs"'),
        ({"instances": [["1", 2, 3, 4]], "parameters": {}}, "not strings"),
        ({"instances": [ROW], "parameters": {"top_k": 3}}, "nothing else"),
        ({"instances": [ROW], "parameters": [3]}, "nothing else"),
        ({"instances": [ROW], "parameters": {"signature_name": 3}}, "must be a string"),
        ({"instances": [ROW], "more": 1}, "unknown keys ['more']"),
    ],
)
def test_predictions_that_vertex_is_refused(vertex, document, says):
    refused(vertex.post("/v1/endpoints/1:predict", document), 400, says)
    refused(vertex.get("/v1/endpoints/1:predict"), 405, "POST")


def test_the_state_of_a_model_has_both_forms_on_kserve(served):
    plain = served.get("/v1/models/first").json()
    with served.on(find_platform("kserve", {})) as kserve:
        answer = kserve.get("/v1/models/first").json()
        assert answer == {**plain, "name": "first", "ready": True}
        assert kserve.get("/v1/models").json() == {"models": ["first", "mixed", "second"]}
        assert kserve.predict("first", {"instances": [ROW]}).keys() == {"predictions"}
        refused(kserve.get("/v1/models/none"), 404, "'none'")


def test_requests_of_platforms_are_counted(sagemaker):
    line = 'kdist_serving_requests_total{model="first",protocol="rest",status="200"} '

    def count():
        lines = sagemaker.get("/metrics").text.splitlines()
        return sum(float(each.removeprefix(line)) for each in lines if line in each)

    before = count()
    sagemaker.post(INVOCATIONS, [ROW])
    assert count() == before + 1
