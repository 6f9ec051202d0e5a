"""Conversion of JSON to arrays and back; test_bad_rest.py tests the errors."""

import json

import numpy as np
import pytest

from kdist.serving.core.signature import Signature, TensorSpec
from kdist.serving.protocol import json_bodies


def spec(shape, dtype):
    return TensorSpec(shape, np.dtype(dtype), "")


def arrays(document, **inputs):
    return json_bodies.parse_request(
        json.dumps(document).encode(), lambda _: Signature(inputs, {})
    ).arrays


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("bool", [True, False]),
        ("uint8", [0, 255]),
        ("int8", [-128, 127]),
        ("int64", [-(1 << 63), (1 << 63) - 1]),
        ("uint64", [1 << 63, (1 << 64) - 1]),
        ("float16", [1, -0.5]),
        ("float32", [1, 2.5]),
        ("float64", [1e300, -5e-324]),
        ("complex64", [1.5, 2]),
    ],
)
def test_every_type_has_its_values(dtype, values):
    array = arrays({"instances": values}, x=spec((None,), dtype))["x"]
    assert array.dtype == dtype
    assert array.tolist() == values


@pytest.mark.parametrize("key", ["instances", "inputs"])
def test_integers_on_both_sides_of_2_to_the_63(key):
    """NumPy converts such integers, which are common in hashes, to float64."""
    values = [[1, 1 << 63], [(1 << 64) - 1, (1 << 53) + 1]]
    inputs = {"x": spec((None, 2), "uint64")}
    array = arrays({key: values}, **inputs)["x"]
    assert array.dtype == "uint64"
    assert array.tolist() == values
    for wrong in (-1, 1 << 64, 0.5):
        with pytest.raises(ValueError, match="input 'x' must|not valid JSON"):
            arrays({key: [[wrong, 1 << 63]]}, **inputs)


@pytest.mark.parametrize("dtype", [object, "float32"])
@pytest.mark.parametrize("depth", [33, 400, 1000])
def test_no_depth_is_the_servers_fault(dtype, depth):
    body = b'{"instances": ' + b"[" * depth + b'"a"' + b"]" * depth + b"}"
    signature = Signature({"x": spec(None, dtype)}, {})
    with pytest.raises(ValueError, match="more than 32 nested lists|not valid JSON"):
        json_bodies.parse_request(body, lambda _: signature)


def test_formats_are_alike():
    inputs = {"a": spec((None, 2), "float32"), "b": spec((None,), "int32")}
    rows = [{"a": [1, 2], "b": 3}, {"b": 6, "a": [4, 5]}]
    columns = {"a": [[1, 2], [4, 5]], "b": [3, 6]}
    for document in ({"instances": rows}, {"inputs": columns}):
        found = arrays(document, **inputs)
        assert list(found) == ["a", "b"]
        assert {name: array.tolist() for name, array in found.items()} == columns


def test_numbers_beside_texts_are_looked_at():
    inputs = {"s": spec((None,), object), "x": spec((None,), "float32")}
    found = arrays({"instances": [{"s": 'a"b', "x": 1.5}]}, **inputs)
    assert (found["s"].tolist(), found["x"].tolist()) == ([b'a"b'], [1.5])
    with pytest.raises(ValueError, match="'x' must hold numbers, not strings"):
        arrays({"instances": [{"s": "a", "x": 1}, {"s": "b", "x": "2"}]}, **inputs)


@pytest.mark.parametrize(
    "document",
    [
        {"instances": [[1, "2"]]},
        {"inputs": [[1, "2"]]},
        {"inputs": {"x": [[1, "2"]]}},
        {"instances": [{"x": [1, "2"]}]},
        {"signature_name": "", "inputs": [["1", "2"]]},
    ],
    ids=["rows", "columns", "named columns", "named rows", "with a signature"],
)
def test_no_format_hides_a_text_among_numbers(document, monkeypatch):
    inputs = {"x": spec((None, 2), "float32")}
    asarray = np.asarray
    monkeypatch.setattr(np, "asarray", lambda *_: pytest.fail("of any length"))
    with pytest.raises(ValueError, match="not strings"):
        arrays(document, **inputs)
    monkeypatch.setattr(np, "asarray", asarray)


def answered(outputs, key):
    signature = Signature({}, {n: spec(None, a.dtype) for n, a in outputs.items()})
    return json.loads(
        json_bodies.format_response(outputs, json_bodies.JsonRequest(key, "", signature, {}))
    )


def test_answers_have_the_format_of_their_requests():
    one = {"y": np.array([[1.5], [2]], "float32")}
    both = {**one, "z": np.array([True, False])}
    assert answered(one, "instances") == {"predictions": [[1.5], [2.0]]}
    assert answered(one, "inputs") == {"outputs": [[1.5], [2.0]]}
    rows = [{"y": [1.5], "z": True}, {"y": [2.0], "z": False}]
    assert answered(both, "instances") == {"predictions": rows}
    columns = {"y": [[1.5], [2.0]], "z": [True, False]}
    assert answered(both, "inputs") == {"outputs": columns}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint64"])
def test_answers_of_every_type(dtype):
    array = np.array([[1, 2], [3, 4]], dtype).T  # not contiguous
    assert answered({"y": array}, "inputs") == {"outputs": [[1, 3], [2, 4]]}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("key", ["instances", "inputs"])
def test_what_is_no_number_is_said_to_be_none_as_tensorflow_serving_does(key, several, dtype):
    strange = np.array([[np.nan, 1.5], [np.inf, -np.inf]], dtype)
    outputs = {"y": strange, **({"n": np.array([1, 2])} if several else {})}
    answer = answered(outputs, key)
    if key == "inputs":
        rows = answer["outputs"]["y"] if several else answer["outputs"]
    else:
        rows = [row["y"] if several else row for row in answer["predictions"]]
    np.testing.assert_array_equal(np.array(rows, dtype), strange)


def test_texts_and_bytes():
    texts = {"text": np.array([b"a", b"\xff"], object), "raw_bytes": np.array([b"a", b""], object)}
    assert answered(texts, "inputs") == {
        "outputs": {"text": ["a", {"b64": "/w=="}], "raw_bytes": [{"b64": "YQ=="}, {"b64": ""}]}
    }
