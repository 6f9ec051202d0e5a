"""TensorFlow Serving's gRPC interface: PredictionService and ModelService, for its own clients.

Requests are parsed here and not by gRPC, which calls one that cannot be parsed an internal error.
"""

import asyncio
import math
import os
import time

# Processes are started beside it (workers, a choice of settings); gRPC would say so each time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    predict_pb2,
)

from kdist.serving.models import Models
from kdist.serving.refusals import Refusal, refusal_of
from kdist.serving.settings import Limits
from kdist.serving.signature import SERVING_DEFAULT

_SIGNATURE_DEF = "signature_def"


def create_grpc_server(models: Models) -> grpc.aio.Server:
    """A server of these models, that listens nowhere yet; to be made in a running event loop."""
    limit = models.limits.body_bytes
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.so_reuseport", 0),  # so that a port in use is an error, not a shared one
        ],
    )
    calls = _Calls(models)
    services: dict[str, dict[str, tuple]] = {
        "PredictionService": {
            "Predict": (calls.predict, predict_pb2.PredictRequest, True),
            "GetModelMetadata": (calls.metadata, get_model_metadata_pb2.GetModelMetadataRequest),
        },
        "ModelService": {
            "GetModelStatus": (calls.status, get_model_status_pb2.GetModelStatusRequest)
        },
    }
    for service, methods in services.items():
        handlers = {name: calls.handler(*method) for name, method in methods.items()}
        full_name = f"tensorflow.serving.{service}"
        generic = grpc.method_handlers_generic_handler(full_name, handlers)
        server.add_generic_rpc_handlers((generic,))
    return server


class _Calls:
    def __init__(self, models: Models):
        self._models = models

    def handler(self, answer, request_type, is_counted=False):
        """Has `answer` called with a parsed request; what it raises becomes a status.

        Only predictions are counted, as over REST.
        """

        async def handle(body, context):
            since, name, status = time.perf_counter(), "", "OK"
            try:
                request = _parsed(request_type, body)
                name = self._models.model(request.model_spec.name).name
                with self._models.bodies.of_request() as hold:
                    hold(len(body))
                    async with asyncio.timeout(self._models.limits.request_seconds):
                        return await answer(request, hold)
            except asyncio.CancelledError:  # by the client, or its deadline
                status = "CANCELLED"
                raise
            except Exception as error:
                refusal = refusal_of(error)
                status = refusal.grpc_status
                await _abort(context, refusal)
            finally:
                if is_counted:
                    self._models.metrics.answered(name, "grpc", status, since)

        return grpc.unary_unary_rpc_method_handler(
            handle, response_serializer=lambda message: message.SerializeToString()
        )

    async def predict(self, request, hold):
        version = self._version(request.model_spec)
        name = request.model_spec.signature_name or SERVING_DEFAULT
        signature = version.signature(name)  # first, as a batcher is made for any name
        version.batcher(name).check_room()
        signature.check_names(request.inputs)
        size = 0
        for key, spec in signature.inputs.items():
            shape = _shape(key, request.inputs[key], spec, self._models.limits)
            version.batcher(name).check_room(max([1, *shape[:1]]))
            size += _bytes_of(shape, spec)
        hold(max(0, size - request.ByteSize()))
        arrays = {
            key: _array(key, request.inputs[key], spec) for key, spec in signature.inputs.items()
        }
        signature.check(arrays)
        wanted = _wanted_outputs(request.output_filter, signature)
        outputs = await version.predict(arrays, name)
        answer = predict_pb2.PredictResponse()
        _fill_in(answer.model_spec, version, name)
        for key in wanted:
            answer.outputs[key].CopyFrom(tf.make_tensor_proto(outputs[key]))
        return answer

    async def metadata(self, request, _):
        if unknown := sorted(set(request.metadata_field) - {_SIGNATURE_DEF}):
            raise Refusal("invalid", f"metadata fields {unknown}: there is {_SIGNATURE_DEF!r}")
        if not request.metadata_field:
            raise Refusal("invalid", f"metadata_field is empty: ask for {_SIGNATURE_DEF!r}")
        version = self._version(request.model_spec)
        answer = get_model_metadata_pb2.GetModelMetadataResponse()
        _fill_in(answer.model_spec, version, "")
        answer.metadata[_SIGNATURE_DEF].Pack(version.signature_map())
        return answer

    async def status(self, request, _):
        model = self._models.model(request.model_spec.name)
        states = model.states_of(_number(request.model_spec))
        answer = get_model_status_pb2.GetModelStatusResponse()
        for each in sorted(states, reverse=True):
            state, error = states[each]
            shown = answer.model_version_status.add(version=each)
            shown.state = get_model_status_pb2.ModelVersionStatus.State.Value(state)
            shown.status.error_code = 2 if error else 0  # UNKNOWN, OK
            shown.status.error_message = error
        return answer

    def _version(self, spec):
        return self._models.model(spec.name).version(_number(spec))


def _parsed(request_type, body):
    try:
        return request_type.FromString(body)
    except DecodeError as error:
        said = f"the message is no {request_type.DESCRIPTOR.name}; it may have been cut off"
        raise Refusal("invalid", said) from error


def _number(spec):
    if spec.WhichOneof("version_choice") == "version_label":
        raise Refusal("invalid", "versions have no labels here: ask for one by its number")
    return spec.version.value if spec.HasField("version") else None


def _shape(name, proto, spec, limits: Limits):
    """Of what a message says that it holds, if the model takes that; nothing is made of it yet."""
    if proto.dtype == 0:
        raise ValueError(f"input {name!r} has no dtype; the model takes {spec.dtype}")
    if proto.dtype != tf.as_dtype(spec.dtype).as_datatype_enum:
        is_known = proto.dtype in types_pb2.DataType.values()
        given = types_pb2.DataType.Name(proto.dtype) if is_known else f"type {proto.dtype}"
        raise ValueError(f"input {name!r} is {given}, and the model takes {_said(spec)}")
    shape = [size.size for size in proto.tensor_shape.dim]
    if proto.tensor_shape.unknown_rank or min(shape, default=0) < 0:
        raise ValueError(f"input {name!r} has the shape {shape}: give every size")
    # A few bytes may stand for any number of equal values.
    if _bytes_of(shape, spec) > limits.body_bytes:
        said = f"input {name!r} of shape {shape} is larger than {limits.body_bytes:,} bytes"
        raise Refusal("too_large", said)
    spec.check(name, shape)
    return shape


def _bytes_of(shape, spec):
    return math.prod(shape) * spec.dtype.itemsize


def _array(name, proto, spec):
    shape = [size.size for size in proto.tensor_shape.dim]
    try:
        array = tf.make_ndarray(proto)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"input {name!r} does not hold its shape {shape}: {error}") from error
    if array.shape != tuple(shape):
        raise ValueError(f"input {name!r} does not hold its shape {shape}")
    return np.asarray(array, spec.dtype)


def _said(spec):
    return "string" if spec.is_text else spec.dtype.name


def _wanted_outputs(wanted, signature):
    if unknown := sorted(set(wanted) - set(signature.outputs)):
        raise ValueError(f"unknown outputs {unknown}; the model gives {list(signature.outputs)}")
    return list(wanted) or list(signature.outputs)


def _fill_in(spec, version, signature):
    spec.name = version.key.model
    spec.version.value = version.key.version
    spec.signature_name = signature


async def _abort(context, refusal):
    if refusal.retry_after is not None:
        context.set_trailing_metadata((("retry-after", str(refusal.retry_after)),))
    await context.abort(getattr(grpc.StatusCode, refusal.grpc_status), str(refusal))
