"""How servers want to be asked, and how they answer."""

import dataclasses
from collections.abc import Callable

import numpy as np
import orjson


@dataclasses.dataclass(frozen=True)
class Dialect:
    """A protocol's bodies.

    Attributes:
        said: what it is, in words.
        body: of a request, from instances (rows, …).
        predictions: the first output's rows (rows, outputs), from an answer's body.
        is_grpc: whether bodies are messages of gRPC.
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
    """One of `DIALECTS`, or "grpc": TensorFlow Serving's, for a model and the name of its input.

    The latter imports TensorFlow, for its messages.
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
