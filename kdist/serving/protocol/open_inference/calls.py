"""gRPC methods of the Open Inference Protocol.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_grpc.md

Tensors arrive as repeated fields (`contents`) or as bytes (`raw_input_contents`), and responses
have the form of their request. Types of 16 bits are always bytes. In raw tensors of BYTES, four
little-endian bytes before each string count its bytes, as in Triton. The parameter `signature_name`
of a request selects a signature.
"""

import math
import operator
import struct

import numpy as np

import kdist
from kdist.serving.core.errors import RequestError
from kdist.serving.core.requests import bytes_of_strings, count_rows, parse_version
from kdist.serving.core.signature import SERVING_DEFAULT
from kdist.serving.engine.models import Models
from kdist.serving.protocol.open_inference import bodies, messages

# Data type -> field of `contents`. BF16 and FP16 have none.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(["INT8", "INT16", "INT32"], "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(["UINT8", "UINT16", "UINT32"], "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_LENGTH = struct.Struct("<I")
_STRING_BYTES = 8  # of an empty string


class InferenceCalls:
    """Methods of GRPCInferenceService."""

    def __init__(self, models: Models):
        self._models = models

    def methods(self) -> dict[str, tuple]:
        """Returns {method: arguments of the handler}.

        These are the function that answers, the type of its request, a function that returns the
        name of the model in a request, and whether the method is counted as a prediction.
        """
        name = operator.attrgetter("name")
        return {
            "ServerLive": (self.live, messages.ServerLiveRequest, None),
            "ServerReady": (self.ready, messages.ServerReadyRequest, None),
            "ServerMetadata": (self.server, messages.ServerMetadataRequest, None),
            "ModelReady": (self.model_ready, messages.ModelReadyRequest, name),
            "ModelMetadata": (self.metadata, messages.ModelMetadataRequest, name),
            "ModelInfer": (
                self.infer,
                messages.ModelInferRequest,
                operator.attrgetter("model_name"),
                True,
            ),
        }

    async def live(self, request, _):
        return messages.ServerLiveResponse(live=True)

    async def ready(self, request, _):
        return messages.ServerReadyResponse(ready=self._models.ready)

    async def server(self, request, _):
        return messages.ServerMetadataResponse(name="kdist", version=kdist.__version__)

    async def model_ready(self, request, _):
        number = parse_version(request.version or None)
        ready = self._models.is_ready(request.name, number)
        return messages.ModelReadyResponse(ready=ready)

    async def metadata(self, request, _):
        model = self._models.model(request.name)
        version = model.version(parse_version(request.version or None))
        return messages.ModelMetadataResponse(**bodies.metadata(version, model.ready))

    async def infer(self, request, reserve):
        model = self._models.model(request.model_name)
        version = model.version(parse_version(request.model_version or None))
        name = _signature_name(request)
        signature = version.signature(name)  # checked first, as a batcher is created for any name
        arrays = self._arrays(request, signature, version.batcher(name), reserve)
        selected = signature.select_outputs([each.name for each in request.outputs])
        answer = messages.ModelInferResponse(
            model_name=version.key.model, model_version=str(version.key.version), id=request.id
        )
        is_raw = bool(request.raw_input_contents)
        request.Clear()  # not needed while the request waits
        outputs = await version.predict(arrays, name)
        specs = {name: signature.outputs[name] for name in selected}
        for described in bodies.metadata_tensors(specs):
            answer.outputs.add(**described | {"shape": outputs[described["name"]].shape})
        _fill(answer, [outputs[name] for name in selected], is_raw)
        return answer

    def _arrays(self, request, signature, batcher, reserve):
        """Returns the inputs, after all that can be wrong with them was found not to be."""
        batcher.check_room()
        bodies.check_inputs([tensor.name for tensor in request.inputs], signature)
        inputs, size = [], 0
        for tensor, content in zip(request.inputs, _contents(request), strict=True):
            spec = signature.inputs[tensor.name]
            bodies.check_tensor(tensor.name, tensor.datatype, tensor.shape, spec)
            batcher.check_room(max([1, *tensor.shape[:1]]))
            size += _byte_size(tensor, content, spec, self._models.limits)
            inputs.append((tensor, content, spec))
        reserve(max(0, size - request.ByteSize()))
        arrays = {tensor.name: _array(tensor, content, spec) for tensor, content, spec in inputs}
        count_rows(arrays)  # raises if they differ
        return arrays


def _signature_name(request):
    if "signature_name" in request.parameters:
        return request.parameters["signature_name"].string_param
    return SERVING_DEFAULT


def _contents(request):
    """Returns the content of each input: bytes, or a repeated field."""
    raw = request.raw_input_contents
    if not raw:
        return [
            getattr(tensor.contents, _CONTENTS[tensor.datatype])
            if tensor.datatype in _CONTENTS
            else b""
            for tensor in request.inputs
        ]
    if len(raw) != len(request.inputs):
        raise ValueError(f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    if any(tensor.HasField("contents") for tensor in request.inputs):
        raise ValueError("give either raw_input_contents or the contents of inputs, not both")
    return list(raw)


def _byte_size(tensor, content, spec, limits):
    """Returns the memory of an input, after its content was found to have its declared size."""
    count = math.prod(tensor.shape)
    # Strings count little besides their bytes, as in REST, which limits the body.
    least = count * (_STRING_BYTES if spec.is_text else spec.dtype.itemsize)
    if least > limits.body_bytes:
        raise _too_large(tensor, limits)
    if not isinstance(content, bytes):
        _check_size(tensor, len(content), count, "values")
    elif not spec.is_text:
        _check_size(tensor, len(content), least, "bytes")
    if not spec.is_text:
        return least
    lengths = _lengths(content, count) if isinstance(content, bytes) else list(map(len, content))
    if least + sum(lengths) > limits.body_bytes:
        raise _too_large(tensor, limits)
    return bytes_of_strings(lengths, count)


def _check_size(tensor, found, wanted, unit):
    if found != wanted:
        raise ValueError(
            f"input {tensor.name!r} has {found:,} {unit}, and its declared shape "
            f"{list(tensor.shape)} needs {wanted:,}"
        )


def _too_large(tensor, limits):
    message = f"input {tensor.name!r} is larger than {limits.body_bytes:,} bytes"
    return RequestError("too_large", message)


def _lengths(raw, count):
    """Returns the lengths of the `count` strings in a raw tensor of BYTES."""
    lengths, position = [], 0
    while position + _LENGTH.size <= len(raw) and len(lengths) < count:
        lengths += _LENGTH.unpack_from(raw, position)
        position += _LENGTH.size + lengths[-1]
    if position != len(raw) or len(lengths) != count:
        raise ValueError(
            f"a raw tensor of BYTES must hold {count:,} strings, each after its length in 4 bytes"
        )
    return lengths


def _strings(raw, count):
    position = 0
    for length in _lengths(raw, count):
        position += _LENGTH.size
        yield raw[position : position + length]
        position += length


def _array(tensor, content, spec):
    count, shape = math.prod(tensor.shape), tuple(tensor.shape)
    is_raw = isinstance(content, bytes)
    if spec.is_text:
        strings = _strings(content, count) if is_raw else content
        return np.fromiter(strings, object, count).reshape(shape)
    if is_raw and spec.dtype == bool:
        return (np.frombuffer(content, np.uint8) != 0).reshape(shape)
    if is_raw:
        return np.frombuffer(content, spec.dtype).reshape(shape)
    try:
        return np.fromiter(content, spec.dtype, count).reshape(shape)
    except OverflowError as error:
        raise ValueError(f"input {tensor.name!r} has values beyond {tensor.datatype}") from error


def _fill(answer, arrays, is_raw):
    """Writes arrays into a response, in the form of the request where its types allow that."""
    is_raw = is_raw or not all(tensor.datatype in _CONTENTS for tensor in answer.outputs)
    for tensor, array in zip(answer.outputs, arrays, strict=True):
        if not is_raw:
            getattr(tensor.contents, _CONTENTS[tensor.datatype]).extend(array.ravel().tolist())
        elif array.dtype == object:
            strings = (_LENGTH.pack(len(each)) + each for each in array.flat)
            answer.raw_output_contents.append(b"".join(strings))
        else:
            answer.raw_output_contents.append(array.tobytes())
