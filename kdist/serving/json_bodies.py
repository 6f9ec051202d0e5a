"""Requests and answers as JSON, in the formats of TensorFlow Serving's REST interface.

    {"instances": [row, …]}, {"instances": [{input: value, …}, …]}      -> {"predictions": […]}
    {"inputs": rows}, {"inputs": {input: rows, …}}                      -> {"outputs": …}

https://www.tensorflow.org/tfx/serving/api_rest. Strings may be text or {"b64": "…"}.
"""

import base64
import binascii
import dataclasses
import json
from collections.abc import Callable, Mapping

import numpy as np
import orjson

from kdist.serving import json_numbers
from kdist.serving.json_numbers import SIGNATURE_NAME
from kdist.serving.signature import SERVING_DEFAULT, Signature, TensorSpec

# What JSON's numbers may become without a loss that nobody asked for.
_FITTING = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "c": "iuf"}
_KNOWN = {SIGNATURE_NAME, *json_numbers.KEYS}
_MOST_LISTS = 32  # one in another: NumPy has no more dimensions that can be looked through


@dataclasses.dataclass(frozen=True)
class Request:
    """What a body asks for.

    Attributes:
        key: "instances" or "inputs": its format, and that of the answer.
        signature_name: of the model.
        signature: of this name.
        arrays: the rows, of the signature's shapes and types.
    """

    key: str
    signature_name: str
    signature: Signature
    arrays: Mapping[str, np.ndarray]


def read(body: bytes, signature_of: Callable[[str], Signature]) -> Request:
    """The request that a body is.

    Args:
        body: as it came.
        signature_of: a name's signature.

    Raises:
        ValueError: no JSON (which knows no NaN), no object, not one of the two formats, or rows
            that are not what the signature takes.
        Exception: what `signature_of` raises.
    """
    return _read_numbers(body, signature_of) or _read_any(body, signature_of)


def answer(outputs: Mapping[str, np.ndarray], request: Request) -> bytes:
    """The body for the outputs, in the request's format.

    What is no finite number is NaN, Infinity or -Infinity, as of TensorFlow Serving: JSON knows
    none of them, and null would have to be told apart by every client.
    """
    specs = request.signature.outputs
    values = {name: _plain(name, outputs[name], spec) for name, spec in specs.items()}
    alone = next(iter(values.values())) if len(values) == 1 else None
    if request.key == "inputs":
        document = {"outputs": values if alone is None else alone}
    elif alone is not None:
        document = {"predictions": alone}
    else:
        rows = zip(*values.values(), strict=True)
        document = {"predictions": [dict(zip(values, row, strict=True)) for row in rows]}
    if all(np.isfinite(value).all() for value in values.values() if isinstance(value, np.ndarray)):
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(document, default=lambda value: value.tolist()).encode()


def _read_numbers(body, signature_of):
    """The way of most requests, a tenth as long; None for all others."""
    numbers = json_numbers.read(body)
    if numbers is None:
        return None
    name = numbers.signature_name or SERVING_DEFAULT
    signature = signature_of(name)
    if len(signature.inputs) != 1:
        return None
    ((of_input, spec),) = signature.inputs.items()
    array = numbers.array(spec)
    if array is None:
        return None
    arrays = {of_input: _cast(of_input, array, spec.dtype)}
    signature.check(arrays)
    return Request(numbers.key, name, signature, arrays)


def _read_any(body, signature_of):
    document = _document(body)
    key = next(key for key in json_numbers.KEYS if key in document)
    name = document.get(SIGNATURE_NAME) or SERVING_DEFAULT
    signature = signature_of(name)
    columns = _columns(document, signature)
    signature.check_names(columns)
    # Of numbers alone, all quotes are those of keys, and there is nothing to look at.
    keys = len(document) + _is_named(document.get("inputs")) * len(columns)
    if body.count(b'"') != 2 * (keys + (SIGNATURE_NAME in document)):
        for of_input, spec in signature.inputs.items():
            if not spec.is_text:
                _check_no_text(of_input, columns[of_input])
    arrays = {each: _array(each, columns[each], spec) for each, spec in signature.inputs.items()}
    signature.check(arrays)
    return Request(key, name, signature, arrays)


def _document(body):
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = "; JSON has no NaN and no Infinity" if b"NaN" in body or b"Infin" in body else ""
        raise ValueError(f"the body is no JSON: {error}{hint}") from error
    if not isinstance(document, dict) or ("instances" in document) == ("inputs" in document):
        raise ValueError('the body has to be an object with "instances" or "inputs", not both')
    if unknown := sorted(set(document) - _KNOWN):
        raise ValueError(f"unknown keys {unknown}; there are {sorted(_KNOWN)}")
    if not isinstance(document.get(SIGNATURE_NAME, ""), str):
        raise ValueError("signature_name has to be a string")
    return document


def _columns(document, signature):
    """{input: nested lists of all rows}, of either format."""
    if "inputs" in document:
        given = document["inputs"]
        return given if _is_named(given) else {_only(signature): given}
    rows = document["instances"]
    if not isinstance(rows, list) or not rows:
        raise ValueError('"instances" has to be a list of one row at least')
    if not _is_named(rows[0]):
        return {_only(signature): rows}
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != names:
            raise ValueError(f"row {number} of the instances has not the inputs of the first one")
    return {name: [row[name] for row in rows] for name in names}


def _is_named(value):
    return isinstance(value, dict) and value.keys() != {"b64"}


def _only(signature):
    if len(signature.inputs) != 1:
        raise ValueError(f"the model takes several inputs: name each of {list(signature.inputs)}")
    return next(iter(signature.inputs))


def _array(name, value, spec: TensorSpec):
    if spec.is_text:
        return _texts(name, value)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"input {name!r} is no array: its rows differ in shape") from error
    if spec.dtype == np.uint64 and array.dtype.kind == "f":  # of integers on both sides of 2^63
        array = _whole(value, array)
    kind = spec.dtype.kind if spec.dtype.kind in _FITTING else "f"  # bfloat16 has a kind of its own
    if array.dtype.kind not in _FITTING[kind]:
        raise ValueError(f"input {name!r} has to hold {spec.dtype} alone, not {_found(array)}")
    return _cast(name, array, spec.dtype)


def _whole(value, array):
    """The integers, if all are that and fit; else what NumPy has made of them."""
    exact = np.asarray(value, object)
    fit = all(type(each) is int and 0 <= each < 1 << 64 for each in exact.ravel())
    return exact.astype(np.uint64) if fit else array


def _check_no_text(name, value, lists=0):
    """Of a text among numbers NumPy would make an array of texts, each as large as the longest."""
    if isinstance(value, list):
        _check_depth(name, lists)
        for each in value:
            if not isinstance(each, (int, float)):
                _check_no_text(name, each, lists + 1)
    elif isinstance(value, str):
        raise ValueError(f"input {name!r} has to hold numbers, not strings")


def _cast(name, array, dtype):
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(
                f"input {name!r} has to lie from {limits.min} to {limits.max} ({dtype})"
            )
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError as error:
        raise ValueError(f"input {name!r} has numbers too large for {dtype}") from error


def _found(array):
    kinds = {"f": "floats", "i": "integers", "u": "integers", "b": "booleans", "U": "strings"}
    return kinds.get(array.dtype.kind, "null, or values of several kinds")


def _texts(name, value):
    array = np.asarray(_bytes_of(name, value), object)
    if not all(isinstance(each, bytes) for each in array.flat):
        raise ValueError(f"input {name!r} is no array: its rows differ in shape")
    return array


def _check_depth(name, lists):
    if lists >= _MOST_LISTS:
        raise ValueError(f"input {name!r} is no array: more than {_MOST_LISTS} lists in each other")


def _bytes_of(name, value, lists=0):
    if isinstance(value, list):
        _check_depth(name, lists)
        return [_bytes_of(name, each, lists + 1) for each in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and isinstance(value.get("b64"), str) and len(value) == 1:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"input {name!r} holds no valid base64: {error}") from error
    raise ValueError(f'input {name!r} takes strings, or {{"b64": "…"}} for other bytes')


def _plain(name, array, spec):
    if spec.is_text:
        return _text(array.tolist(), name.endswith("_bytes"))
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _text(value, as_base64):
    if isinstance(value, list):
        return [_text(each, as_base64) for each in value]
    if not as_base64:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass  # what is no text goes as base64, whatever its name
    return {"b64": base64.b64encode(value).decode()}
