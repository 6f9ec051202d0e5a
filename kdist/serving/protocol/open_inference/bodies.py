"""JSON requests and responses of the Open Inference Protocol, and its names of data types.

    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1]}]}
    -> {"model_name": "m", "model_version": "1", "outputs": [{"name": "y", …, "data": [2.0]}]}

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md

Data is flat or nested, and flat in responses. A server may define parameters. This one knows
`signature_name` of a request, and `content_type` of a tensor of BYTES: with "base64", as MLServer
has it, each string is base64. A response uses it for strings that are not UTF-8.
"""

import base64
import binascii
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kdist.serving.core.signature import SERVING_DEFAULT, Signature, TensorSpec
from kdist.serving.engine.in_process import VersionKey
from kdist.serving.engine.models import ServedVersion
from kdist.serving.protocol import json_bodies

# Name of a NumPy type -> name in the protocol. BF16 is in the gRPC specification only.
_DATATYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16)},
    **{f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (32, 64)},
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
    "object": "BYTES",
}
_MAX_RANK = 32
_REQUEST_KEYS = {"id", "parameters", "inputs", "outputs"}
_INPUT_KEYS = {"name", "shape", "datatype", "data"}
_BASE64 = {"content_type": "base64"}


@dataclasses.dataclass(frozen=True)
class InferenceRequest:
    """Parsed request of the protocol."""

    identifier: str | None
    signature_name: str
    signature: Signature
    arrays: Mapping[str, np.ndarray]  # input -> rows with the signature's shapes and types
    outputs: Sequence[str]  # names of the outputs to return


def datatype(spec: TensorSpec) -> str:
    """Returns the protocol's name of a tensor's type.

    The protocol has no complex numbers; these have NumPy's name.
    """
    return _DATATYPES.get(spec.dtype.name, spec.dtype.name.upper())


def metadata_tensors(specs: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
    """Returns the description of inputs or outputs in the metadata of a model."""
    return [
        {
            "name": name,
            "datatype": datatype(spec),
            "shape": [-1 if size is None else size for size in spec.shape or [None]],
        }
        for name, spec in specs.items()
    ]


def metadata(version: ServedVersion, numbers: Iterable[int]) -> dict[str, Any]:
    """Returns the metadata of a model whose versions `numbers` are loaded."""
    signatures = version.signatures
    signature = signatures.get(SERVING_DEFAULT) or next(iter(signatures.values()))
    return {
        "name": version.key.model,
        "versions": [str(number) for number in sorted(numbers)],
        "platform": "tensorflow_savedmodel",
        "inputs": metadata_tensors(signature.inputs),
        "outputs": metadata_tensors(signature.outputs),
    }


def check_tensor(name: str, kind: str, shape: Sequence[int], spec: TensorSpec) -> None:
    """Raises ValueError if a declared type or shape does not match the model's."""
    if kind != datatype(spec):
        raise ValueError(f"input {name!r} is {kind}, and the model takes {datatype(spec)}")
    if len(shape) > _MAX_RANK or min(shape, default=0) < 0:
        raise ValueError(
            f"input {name!r} has the shape {list(shape[:_MAX_RANK])}: give up to {_MAX_RANK} sizes "
            "that are not negative"
        )
    spec.check(name, shape)


def check_inputs(names: Sequence[str], signature: Signature) -> None:
    """Raises ValueError if inputs are missing, unknown, or given twice."""
    signature.check_names(names)
    if len(names) > len(signature.inputs):
        raise ValueError("an input is given twice")


def parse_request(body: bytes, get_signature: Callable[[str], Signature]) -> InferenceRequest:
    """Returns the request in the body of an HTTP request.

    Raises ValueError if the body is not JSON, not a request of the protocol, or does not match the
    signature; and any error of `get_signature`.
    """
    document = json_bodies.load(body)
    if unknown := sorted(set(document) - _REQUEST_KEYS):
        raise ValueError(f"unknown keys {unknown}; valid keys are {sorted(_REQUEST_KEYS)}")
    identifier = document.get("id")
    if not isinstance(identifier, str | None):
        raise ValueError("the id must be a string")
    name = _parameters(document).get("signature_name") or SERVING_DEFAULT
    if not isinstance(name, str):
        raise ValueError("signature_name must be a string")
    signature = get_signature(name)
    inputs = _objects(document, "inputs", _INPUT_KEYS)
    check_inputs([each["name"] for each in inputs], signature)
    arrays = {each["name"]: _array(each, signature.inputs[each["name"]]) for each in inputs}
    signature.check(arrays)
    outputs = _objects(document, "outputs", {"name"}) if document.get("outputs") else []
    selected = signature.select_outputs([each["name"] for each in outputs])
    return InferenceRequest(identifier, name, signature, arrays, selected)


def format_response(
    outputs: Mapping[str, np.ndarray], request: InferenceRequest, key: VersionKey
) -> bytes:
    """Returns the body with the outputs of a version.

    Numbers that are not finite become NaN, Infinity, or -Infinity, as in `json_bodies`.
    """
    identifier = {} if request.identifier is None else {"id": request.identifier}
    tensors = [
        _tensor(name, outputs[name], request.signature.outputs[name]) for name in request.outputs
    ]
    document = {
        "model_name": key.model,
        "model_version": str(key.version),
        **identifier,
        "outputs": tensors,
    }
    return json_bodies.dump(document, [tensor["data"] for tensor in tensors])


def _parameters(document):
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError('"parameters" must be an object')
    return parameters


def _objects(document, key, required):
    """Returns the tensors in a list, each of which has the required entries."""
    tensors = document.get(key)
    if not isinstance(tensors, list):
        raise ValueError(f'"{key}" must be a list of tensors')
    for each in tensors:
        if not isinstance(each, dict) or not required <= each.keys():
            raise ValueError(f'each of the "{key}" must be an object with {sorted(required)}')
        if not isinstance(each["name"], str):
            raise ValueError(f'the name of each of the "{key}" must be a string')
    return tensors


def _array(tensor, spec):
    name, shape, data = tensor["name"], tensor["shape"], tensor["data"]
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"the shape of input {name!r} must be a list of integers")
    if not isinstance(data, list):
        raise ValueError(f"the data of input {name!r} must be a list")
    check_tensor(name, tensor["datatype"], shape, spec)
    if not spec.is_text:
        json_bodies.check_no_text(name, data)
    array = json_bodies.to_array(name, data, spec)
    if list(array.shape) != shape and array.shape != (math.prod(shape),):
        raise ValueError(
            f"input {name!r} has data of shape {list(array.shape)}, and its declared shape is "
            f"{shape}; give nested lists of this shape, or one flat list"
        )
    if spec.is_text and _parameters(tensor).get("content_type") == "base64":
        array = _from_base64(name, array)
    return array.reshape(shape)


def _from_base64(name, array):
    try:
        decoded = (base64.b64decode(each, validate=True) for each in array.flat)
        return np.fromiter(decoded, object, array.size)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"input {name!r} holds invalid base64: {error}") from error


def _tensor(name, array, spec):
    tensor = {"name": name, "shape": list(array.shape), "datatype": datatype(spec)}
    if not spec.is_text:
        return {**tensor, "data": json_bodies.to_numbers(array).ravel()}
    strings = array.ravel().tolist()
    try:
        return {**tensor, "data": [each.decode() for each in strings]}
    except UnicodeDecodeError:
        encoded = [base64.b64encode(each).decode() for each in strings]
        return {**tensor, "parameters": _BASE64, "data": encoded}
