"""gRPC server: TensorFlow Serving's PredictionService and ModelService, and GRPCInferenceService.

Requests are parsed here because gRPC would report a malformed request as an internal error.
"""

import asyncio
import contextlib
import math
import operator
import os
import time

# The server starts other processes (workers, tuning); gRPC would log a warning for each of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, predict_pb2

from kdist.serving.core.errors import RequestError, to_request_error
from kdist.serving.core.requests import MessageSlots, bytes_of_strings, count_rows
from kdist.serving.core.settings import ServerLimits
from kdist.serving.core.signature import SERVING_DEFAULT
from kdist.serving.engine.models import Models
from kdist.serving.protocol.open_inference import messages
from kdist.serving.protocol.open_inference.calls import InferenceCalls

_SIGNATURE_DEF = "signature_def"
# Clients send their HTTP/2 settings immediately, and connect again after an idle time.
_HANDSHAKE_SECONDS, _IDLE_SECONDS = 5.0, 60.0
# Responses that count as bodies until they are sent. Not all do, as a callback of gRPC is garbage.
_LARGE_BYTES = 1 << 20
_model_name = operator.attrgetter("model_spec.name")


def create_grpc_server(models: Models) -> grpc.aio.Server:
    """Returns a server of the models that has no address yet. Call it in a running event loop."""
    server = grpc.aio.server(options=_options(models.limits))
    calls = _Calls(models)
    services: dict[str, dict[str, tuple]] = {
        "tensorflow.serving.PredictionService": {
            "Predict": (calls.predict, predict_pb2.PredictRequest, _model_name, True),
            "GetModelMetadata": (
                calls.metadata,
                get_model_metadata_pb2.GetModelMetadataRequest,
                _model_name,
            ),
        },
        "tensorflow.serving.ModelService": {
            "GetModelStatus": (
                calls.status,
                get_model_status_pb2.GetModelStatusRequest,
                _model_name,
            )
        },
        messages.SERVICE: InferenceCalls(models).methods(),
    }
    for service, methods in services.items():
        handlers = {name: calls.handler(*method) for name, method in methods.items()}
        generic = grpc.method_handlers_generic_handler(service, handlers)
        server.add_generic_rpc_handlers((generic,))
    return server


def _options(limits):
    silent_milliseconds = int(1000 * min(limits.silent_seconds, _HANDSHAKE_SECONDS))
    return [
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", limits.body_bytes),
        ("grpc.so_reuseport", 0),  # a port in use is an error instead of being shared
        # Otherwise the part of a message that is buffered before it is read grows with bandwidth.
        ("grpc.http2.bdp_probe", 0),
        # Clients beyond these are disconnected by gRPC itself, so no metric counts them.
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", silent_milliseconds),
        ("grpc.max_connection_idle_ms", int(1000 * _IDLE_SECONDS)),
    ]


class _Calls:
    def __init__(self, models: Models):
        self._models = models
        self._slots = MessageSlots(models.limits, models.metrics.record_rejection)

    def handler(self, answer, request_type, name_of, is_counted=False):
        """Returns a gRPC handler that parses requests and turns exceptions into a status.

        `name_of` returns the name of the model in a request; it is None for requests without one.
        Only predictions are counted, as in the REST API.
        """

        async def handle(_, context):
            since, labels = time.perf_counter(), {"model": "", "status": "OK"}
            try:
                # The message is not a local variable here: gRPC keeps this frame after an abort.
                return await self._answer(answer, request_type, name_of, context, labels)
            except asyncio.CancelledError:  # by the client or its deadline
                labels["status"] = "CANCELLED"
                raise
            except Exception as error:
                failure = to_request_error(error)
                labels["status"] = failure.grpc_status
                await _abort(context, failure)
            finally:
                if is_counted:
                    self._models.metrics.record_request(**labels, protocol="grpc", since=since)

        # Clients cannot tell this from a unary call, whose message gRPC would read at once.
        return grpc.stream_unary_rpc_method_handler(
            handle, response_serializer=lambda message: _serialize(message)
        )

    async def _answer(self, answer, request_type, name_of, context, labels):
        with contextlib.ExitStack() as stack:
            reserve = stack.enter_context(self._models.body_memory.request())
            async with asyncio.timeout(self._models.limits.request_seconds):
                body = await self._receive(context)
                # The name of the model is inside: a request that is rejected here has none.
                reserve(len(body))
                request = _parsed(request_type, body)
                del body  # one copy less while the request waits
                if name_of:
                    labels["model"] = self._models.model(name_of(request)).name
                response = await answer(request, reserve)
            size = response.ByteSize()
            if size >= _LARGE_BYTES:
                reserve(size, is_response=True)
                held = stack.pop_all()
                context.add_done_callback(lambda _: held.close())
            return response

    async def _receive(self, context):
        body = await self._slots.receive(context.read)
        if body is grpc.aio.EOF:
            limit = self._models.limits.body_bytes
            message = f"no message, or one of more than {limit:,} bytes, was received"
            raise RequestError("too_large", message)
        return body

    async def predict(self, request, reserve):
        version = self._version(request.model_spec)
        name = request.model_spec.signature_name or SERVING_DEFAULT
        signature = version.signature(name)  # checked first, as a batcher is created for any name
        version.batcher(name).check_room()
        signature.check_names(request.inputs)
        size, shapes = 0, {}
        for key, spec in signature.inputs.items():
            shapes[key] = _shape(key, request.inputs[key], spec, self._models.limits)
            version.batcher(name).check_room(max([1, *shapes[key][:1]]))
            size += _byte_size(request.inputs[key], shapes[key], spec)
        reserve(max(0, size - request.ByteSize()))
        arrays = {
            key: _array(key, request.inputs[key], spec, shapes[key])
            for key, spec in signature.inputs.items()
        }
        request.inputs.clear()
        count_rows(arrays)  # raises if they differ
        names = signature.select_outputs(request.output_filter)
        outputs = await version.predict(arrays, name)
        answer = predict_pb2.PredictResponse()
        _fill_model_spec(answer.model_spec, version, name)
        for key in names:
            answer.outputs[key].CopyFrom(tf.make_tensor_proto(outputs[key]))
        return answer

    async def metadata(self, request, _):
        if unknown := sorted(set(request.metadata_field) - {_SIGNATURE_DEF}):
            raise RequestError("invalid", f"metadata fields {unknown}: valid is {_SIGNATURE_DEF!r}")
        if not request.metadata_field:
            raise RequestError("invalid", f"metadata_field is empty: give {_SIGNATURE_DEF!r}")
        version = self._version(request.model_spec)
        answer = get_model_metadata_pb2.GetModelMetadataResponse()
        _fill_model_spec(answer.model_spec, version, "")
        answer.metadata[_SIGNATURE_DEF].Pack(version.signature_map())
        return answer

    async def status(self, request, _):
        model = self._models.model(request.model_spec.name)
        states = model.states_of(_number(request.model_spec))
        answer = get_model_status_pb2.GetModelStatusResponse()
        for each in sorted(states, reverse=True):
            state, error = states[each]
            entry = answer.model_version_status.add(version=each)
            entry.state = get_model_status_pb2.ModelVersionStatus.State.Value(state)
            entry.status.error_code = 2 if error else 0  # UNKNOWN, OK
            entry.status.error_message = error
        return answer

    def _version(self, spec):
        return self._models.model(spec.name).version(_number(spec))


def _serialize(message):
    return message.SerializeToString()


def _parsed(request_type, body):
    try:
        return request_type.FromString(body)
    except DecodeError as error:
        name = request_type.DESCRIPTOR.name
        message = f"the message is not a valid {name}; it may be truncated"
        raise RequestError("invalid", message) from error


def _number(spec):
    if spec.WhichOneof("version_choice") == "version_label":
        raise RequestError("invalid", "version labels are not supported: give a version number")
    return spec.version.value if spec.HasField("version") else None


def _shape(name, proto, spec, limits: ServerLimits):
    """Returns the declared shape of a tensor if it is valid. Allocates nothing."""
    if proto.dtype == 0:
        raise ValueError(f"input {name!r} has no dtype; the model takes {spec.dtype}")
    if proto.dtype != tf.as_dtype(spec.dtype).as_datatype_enum:
        is_known = proto.dtype in types_pb2.DataType.values()
        dtype = types_pb2.DataType.Name(proto.dtype) if is_known else f"type {proto.dtype}"
        wanted = "string" if spec.is_text else spec.dtype.name
        raise ValueError(f"input {name!r} is {dtype}, and the model takes {wanted}")
    shape = [size.size for size in proto.tensor_shape.dim]
    if proto.tensor_shape.unknown_rank or min(shape, default=0) < 0:
        raise ValueError(f"input {name!r} has the shape {shape}: give every size")
    # Strings count little besides their bytes, as in REST, which limits the body.
    if _byte_size(proto, shape, spec, bytes_per_string=8) > limits.body_bytes:
        message = f"input {name!r} of shape {shape} is larger than {limits.body_bytes:,} bytes"
        raise RequestError("too_large", message)
    spec.check(name, shape)
    return shape


def _byte_size(proto, shape, spec, **options):
    """Returns the memory of a tensor: a few bytes can stand for any number of equal values."""
    count = math.prod(shape)
    if spec.is_text:
        return bytes_of_strings(map(len, proto.string_val), count, **options)
    return count * spec.dtype.itemsize


def _array(name, proto, spec, shape):
    try:
        array = tf.make_ndarray(proto)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"input {name!r} has data that do not match its declared shape {shape}: {error}"
        ) from error
    if array.shape != tuple(shape):
        raise ValueError(f"input {name!r} has data that do not match its declared shape {shape}")
    return np.asarray(array, spec.dtype)


def _fill_model_spec(spec, version, signature):
    spec.name = version.key.model
    spec.version.value = version.key.version
    spec.signature_name = signature


async def _abort(context, error):
    if error.retry_after is not None:
        context.set_trailing_metadata((("retry-after", str(error.retry_after)),))
    await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))
