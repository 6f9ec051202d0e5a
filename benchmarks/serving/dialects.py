"""Formats of requests and responses."""

import dataclasses
from collections.abc import Callable

import numpy as np
import orjson


@dataclasses.dataclass(frozen=True)
class Dialect:
    """Request and response format of a protocol.

    Attributes:
        said: description.
        body: function of instances `(rows, …)` that returns a request body.
        predictions: function of a response body that returns the first output `(rows, outputs)`.
        is_grpc: whether bodies are gRPC messages.
    """

    said: str
    body: Callable[[np.ndarray], bytes]
    predictions: Callable[[bytes], np.ndarray]
    is_grpc: bool = False


def _instances(array):
    return orjson.dumps({"instances": array.tolist()})


def _v2(array):
    tensor = {"name": "inputs", "shape": array.shape, "datatype": "FP32"}
    return orjson.dumps({"inputs": [{**tensor, "data": array.ravel().tolist()}]})


def _v2_predictions(body):
    output = orjson.loads(body)["outputs"][0]
    return np.reshape(output["data"], output["shape"])


DIALECTS = {
    "rest": Dialect(
        'TensorFlow Serving\'s {"instances": […]}',
        _instances,
        lambda body: np.array(orjson.loads(body)["predictions"]),
    ),
    "rows": Dialect(
        '{"instances": […]}, answered by the rows alone',
        _instances,
        lambda body: np.array(orjson.loads(body)),
    ),
    "v2": Dialect("the V2 inference protocol", _v2, _v2_predictions),
}


def dialect(name: str, model: str = "", input_name: str = "") -> Dialect:
    """Returns one of `DIALECTS`, or "grpc" for a model and the name of its input.

    "grpc" is TensorFlow Serving's protocol; it imports TensorFlow for the messages.
    """
    return _grpc(model, input_name) if name == "grpc" else DIALECTS[name]


def _grpc(model, input_name):
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    def body(array):
        request = predict_pb2.PredictRequest()
        request.model_spec.name = model
        request.inputs[input_name].CopyFrom(tf.make_tensor_proto(array, tf.float32))
        return request.SerializeToString()

    def predictions(answer):
        (output,) = predict_pb2.PredictResponse.FromString(answer).outputs.values()
        return tf.make_ndarray(output)

    return Dialect("TensorFlow Serving's gRPC", body, predictions, is_grpc=True)
