"""JSON requests and responses in the formats of TensorFlow Serving's REST API.

    {"instances": [row, …]}, {"instances": [{input: value, …}, …]}      -> {"predictions": […]}
    {"inputs": rows}, {"inputs": {input: rows, …}}                      -> {"outputs": …}

https://www.tensorflow.org/tfx/serving/api_rest. Strings are text or {"b64": "…"}.
A body with one array of numbers takes a fast path, which creates no Python object per number.
"""

import base64
import binascii
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import orjson
import simdjson

from kdist.serving.core.signature import SERVING_DEFAULT, Signature, TensorSpec

KEYS = ("instances", "inputs")
SIGNATURE_NAME = "signature_name"
_KNOWN_KEYS = {SIGNATURE_NAME, *KEYS}
# Kinds of NumPy types: kind of an input -> kinds of JSON values that it accepts without loss.
_ACCEPTED_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "c": "iuf"}
_NUMBERS = {int, float, bool}
_MAX_DEPTH = 32  # nested lists; NumPy can iterate over no more dimensions
_SPACES = b" \t\r\n"
_INTEGER_CHARACTERS = b"-0123456789"
_FLOAT_CHARACTERS = _INTEGER_CHARACTERS + b"+.eE"
# float64 represents all smaller integers exactly.
_MAX_EXACT = 2**53
# One parser is shared by most bodies, as allocating its buffers takes longer than parsing a small
# body. The buffers grow to several times the largest body and are never freed, so larger bodies get
# their own parser. A document holds its parser until it is deleted.
_parser = simdjson.Parser()
_MAX_SHARED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class JsonRequest:
    """Parsed prediction request."""

    key: str  # "instances" or "inputs", the format of the request and its response
    signature_name: str
    signature: Signature
    arrays: Mapping[str, np.ndarray]  # input -> rows with the signature's shapes and types


def parse_request(
    body: bytes, get_signature: Callable[[str], Signature], with_parameters: bool = False
) -> JsonRequest:
    """Returns the request in the body of an HTTP request.

    `with_parameters` accepts the object "parameters" of Vertex AI, which may name the signature.

    Raises ValueError if the body is not JSON (which has no NaN), not an object, in neither of the
    two formats, or its rows do not match the signature; and any error of `get_signature`.
    """
    return _parse_numeric(body, get_signature) or _parse_any(body, get_signature, with_parameters)


def format_response(outputs: Mapping[str, np.ndarray], request: JsonRequest) -> bytes:
    """Returns the body with the outputs, in the format of the request.

    Numbers that are not finite become NaN, Infinity, or -Infinity as in TensorFlow Serving. These
    are not valid JSON, but null would be ambiguous.
    """
    specs = request.signature.outputs
    values = {name: _to_plain(name, outputs[name], spec) for name, spec in specs.items()}
    single = next(iter(values.values())) if len(values) == 1 else None
    if request.key == "inputs":
        document = {"outputs": values if single is None else single}
    elif single is not None:
        document = {"predictions": single}
    else:
        rows = zip(*values.values(), strict=True)
        document = {"predictions": [dict(zip(values, row, strict=True)) for row in rows]}
    return dump(document, values.values())


def load(body: bytes) -> dict:
    """Returns the object in a body; raises ValueError if it holds something else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = "; JSON has no NaN and no Infinity" if b"NaN" in body or b"Infin" in body else ""
        raise ValueError(f"the body is not valid JSON: {error}{hint}") from error
    if not isinstance(document, dict):
        raise ValueError("the body must be an object in JSON")
    return document


def dump(document: dict, values: Iterable) -> bytes:
    """Returns the JSON of a response that contains `values`, some of which are arrays."""
    if all(np.isfinite(value).all() for value in values if isinstance(value, np.ndarray)):
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(document, default=lambda value: value.tolist()).encode()


def _parse_numeric(body, get_signature):
    """Parses one array of numbers, ten times as fast; returns None for other requests."""
    numbers = read_numbers(body)
    if numbers is None:
        return None
    name = numbers.signature_name or SERVING_DEFAULT
    signature = get_signature(name)
    if len(signature.inputs) != 1:
        return None
    ((input_name, spec),) = signature.inputs.items()
    array = numbers.array(spec)
    if array is None:
        return None
    arrays = {input_name: _cast(input_name, array, spec.dtype)}
    signature.check(arrays)
    return JsonRequest(numbers.key, name, signature, arrays)


def _parse_any(body, get_signature, with_parameters=False):
    document = _document(body, with_parameters)
    key = next(key for key in KEYS if key in document)
    name = document.get(SIGNATURE_NAME) or SERVING_DEFAULT
    signature = get_signature(name)
    columns = _columns(document, signature)
    signature.check_names(columns)
    # If all quotes belong to keys, there are no strings among the values to check for.
    keys = len(document) + _is_named(document.get("inputs")) * len(columns)
    if body.count(b'"') != 2 * (keys + (SIGNATURE_NAME in document)):
        for input_name, spec in signature.inputs.items():
            if not spec.is_text:
                check_no_text(input_name, columns[input_name])
    arrays = {each: to_array(each, columns[each], spec) for each, spec in signature.inputs.items()}
    signature.check(arrays)
    return JsonRequest(key, name, signature, arrays)


def _document(body, with_parameters):
    document = load(body)
    if with_parameters:
        document |= _signature_parameter(document.pop("parameters", None))
    if ("instances" in document) == ("inputs" in document):
        raise ValueError('the body must be an object with "instances" or "inputs", not both')
    if unknown := sorted(set(document) - _KNOWN_KEYS):
        raise ValueError(f"unknown keys {unknown}; valid keys are {sorted(_KNOWN_KEYS)}")
    if not isinstance(document.get(SIGNATURE_NAME, ""), str):
        raise ValueError("signature_name must be a string")
    return document


def _signature_parameter(parameters):
    """Returns the entries of "parameters", of which the server knows the name of the signature."""
    if not isinstance(parameters or {}, dict) or set(parameters or ()) - {SIGNATURE_NAME}:
        raise ValueError(f'"parameters" may hold {SIGNATURE_NAME!r} and nothing else')
    return parameters or {}


def _columns(document, signature):
    """Returns {input: nested lists of all rows} for either format."""
    if "inputs" in document:
        inputs = document["inputs"]
        return inputs if _is_named(inputs) else {_only_input(signature): inputs}
    rows = document["instances"]
    if not isinstance(rows, list) or not rows:
        raise ValueError('"instances" must be a list of at least one row')
    if not _is_named(rows[0]):
        return {_only_input(signature): rows}
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != names:
            raise ValueError(f"row {number} of the instances has other inputs than the first row")
    return {name: [row[name] for row in rows] for name in names}


def _is_named(value):
    return isinstance(value, dict) and value.keys() != {"b64"}


def _only_input(signature):
    if len(signature.inputs) != 1:
        raise ValueError(f"the model has several inputs: name each of {list(signature.inputs)}")
    return next(iter(signature.inputs))


def to_array(name: str, value: Any, spec: TensorSpec) -> np.ndarray:
    """Returns the array in nested lists; raises ValueError if the types differ from the model's.

    Check by `check_no_text` first that no string is among numbers.
    """
    if spec.is_text:
        return _string_array(name, value)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"input {name!r} is not an array: its rows differ in shape") from error
    if spec.dtype == np.uint64 and array.dtype.kind == "f":  # integers below and above 2^63
        array = _exact_integers(value, array)
    accepted = _ACCEPTED_KINDS.get(spec.dtype.kind, "iuf")  # bfloat16 has its own kind
    if array.dtype.kind not in accepted:
        raise ValueError(f"input {name!r} must hold only {spec.dtype}, not {_content(array)}")
    return _cast(name, array, spec.dtype)


def _exact_integers(value, array):
    """Returns exact uint64 integers if all values fit; else the array as NumPy parsed it."""
    exact = np.asarray(value, object)
    fit = all(type(each) is int and 0 <= each < 1 << 64 for each in exact.ravel())
    return exact.astype(np.uint64) if fit else array


def check_no_text(name: str, value: Any, depth: int = 0) -> None:
    """Raises ValueError for a string; NumPy would turn all numbers into strings as long as it."""
    if isinstance(value, list):
        _check_depth(name, depth)
        if set(map(type, value)) <= _NUMBERS:  # several times as fast as the loop
            return
        for each in value:
            if type(each) not in _NUMBERS:
                check_no_text(name, each, depth + 1)
    elif isinstance(value, str):
        raise ValueError(f"input {name!r} must hold numbers, not strings")


def _cast(name, array, dtype):
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"input {name!r} must lie from {limits.min} to {limits.max} ({dtype})")
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError as error:
        raise ValueError(f"input {name!r} has numbers too large for {dtype}") from error


def _content(array):
    kinds = {"f": "floats", "i": "integers", "u": "integers", "b": "booleans", "U": "strings"}
    return kinds.get(array.dtype.kind, "null, or values of several kinds")


def _string_array(name, value):
    array = np.asarray(_to_bytes(name, value), object)
    if not all(isinstance(each, bytes) for each in array.flat):
        raise ValueError(f"input {name!r} is not an array: its rows differ in shape")
    return array


def _check_depth(name, depth):
    if depth >= _MAX_DEPTH:
        raise ValueError(f"input {name!r} is not an array: more than {_MAX_DEPTH} nested lists")


def _to_bytes(name, value, depth=0):
    if isinstance(value, list):
        _check_depth(name, depth)
        return [_to_bytes(name, each, depth + 1) for each in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and isinstance(value.get("b64"), str) and len(value) == 1:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"input {name!r} holds invalid base64: {error}") from error
    raise ValueError(f'input {name!r} accepts strings, or {{"b64": "…"}} for other bytes')


def _to_plain(name, array, spec):
    if spec.is_text:
        return _to_text(array.tolist(), name.endswith("_bytes"))
    return to_numbers(array)


def to_numbers(array: np.ndarray) -> np.ndarray:
    """Returns an array of a type that JSON can be written from."""
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _to_text(value, as_base64):
    if isinstance(value, list):
        return [_to_text(each, as_base64) for each in value]
    if not as_base64:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass  # other bytes are sent as base64, whatever the name
    return {"b64": base64.b64encode(value).decode()}


@dataclasses.dataclass(frozen=True)
class NumericRequest:
    """Numbers of a request whose shape is not validated yet."""

    key: str  # one of `KEYS`
    signature_name: str  # empty for the default
    flat: np.ndarray  # all numbers, of shape `(N,)` and type float64
    text: bytes  # the array with its brackets

    def array(self, spec: TensorSpec) -> np.ndarray | None:
        """Returns the rows as exact float64 numbers; None unless they certainly match the spec."""
        if not spec.shape or spec.dtype.kind not in "iuf":
            return None
        row = tuple(size for size in spec.shape[1:] if size)
        if len(row) != len(spec.shape) - 1:
            return None
        rows, remainder = divmod(self.flat.size, math.prod(row))
        if remainder or not rows:
            return None
        is_integer = spec.dtype.kind != "f"
        if is_integer and np.abs(self.flat).max() >= _MAX_EXACT:
            return None
        # The array has as many places as numbers, so each place holds exactly one.
        characters = _INTEGER_CHARACTERS if is_integer else _FLOAT_CHARACTERS
        between = self.text.translate(None, characters + _SPACES)
        if between != b"[" + b",".join([_brackets(row)] * rows) + b"]":
            return None
        return self.flat.reshape(rows, *row)


def read_numbers(body: bytes) -> NumericRequest | None:
    """Returns the numbers of a body; None for any other body, valid or not.

        request = read_numbers(b'{"instances": [[1, 2], [3, 4.5]]}')
        request.array(TensorSpec((None, 2), np.dtype("float32"), "x"))     # (2, 2), float64

    simdjson validates the JSON and returns its numbers as a flat array. The text between the
    numbers determines their shape: without digits, the text of an array consists of brackets and
    commas.
    """
    if not body.startswith(b"{"):
        return None
    try:
        parser = _parser if len(body) <= _MAX_SHARED_BYTES else simdjson.Parser()
        document = parser.parse(body)
        if not isinstance(document, simdjson.Object):
            return None
        keys = sorted(document.keys())  # includes duplicates
        key = next((key for key in KEYS if key in keys), "")
        name, array = document.get(SIGNATURE_NAME, ""), document.get(key)
        if keys not in ([key], sorted([key, SIGNATURE_NAME])):
            return None
        if not isinstance(name, str) or not isinstance(array, simdjson.Array):
            return None
        flat = np.frombuffer(array.as_buffer(of_type="d"))
    except (RuntimeError, TypeError, ValueError):
        return None
    # If the signature name contained a bracket, this text would contain a quote and not match.
    text = body[body.index(b"[") : body.rindex(b"]") + 1]
    return NumericRequest(key, name, flat, text)


@functools.lru_cache(maxsize=16)
def _brackets(shape):
    """Returns the text of an array of this shape without its numbers."""
    if not shape:
        return b""
    return b"[" + b",".join([_brackets(shape[1:])] * shape[0]) + b"]"
