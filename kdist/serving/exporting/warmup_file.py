"""Warm-up requests, which a server computes before it serves a version.

They are stored where TensorFlow Serving looks for them: in the version's file
`assets.extra/tf_serving_warmup_requests`, a TFRecord file of `PredictionLog` messages.
"""

import importlib
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.serving.core.signature import SERVING_DEFAULT

# An array for a single input, or {input: array}.
Examples = np.ndarray | Mapping[str, np.ndarray]

_REQUESTS = pathlib.PurePath("assets.extra", "tf_serving_warmup_requests")


def example_rows(
    specs: Mapping[str, tf.TensorSpec], examples: Examples | None
) -> dict[str, np.ndarray]:
    """Returns {input: rows} for the inputs of a model, by default one row of zeros.

    The examples are rows of a single input, or {name: rows}; empty for no warm-up. Raises
    ValueError if they do not match the inputs, or zeros are not a valid input.
    """
    if examples is None:
        return {name: _zeros(name, spec) for name, spec in specs.items()}
    if not isinstance(examples, Mapping):
        examples = {} if len(examples) == 0 else {next(iter(specs)): examples}
    if examples and set(examples) != set(specs):
        raise ValueError(
            f"examples for {', '.join(examples)}, and the inputs are {', '.join(specs)}: give rows "
            "for each by its name"
        )
    arrays = {name: np.asarray(x, specs[name].dtype.as_numpy_dtype) for name, x in examples.items()}
    for name, rows in arrays.items():
        if not specs[name].shape.is_compatible_with(rows.shape):
            raise ValueError(f"examples of {name}: shape {rows.shape}, not {specs[name].shape}")
    counts = {len(rows) for rows in arrays.values()}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"rows of examples: {sorted(counts)}; give the same number for each input")
    return arrays


def _zeros(name, spec):
    if None in spec.shape[1:] or not (spec.dtype.is_floating or spec.dtype.is_integer):
        raise ValueError(
            f"no warm-up request can be guessed for {name!r} (shape {spec.shape}, "
            f"{spec.dtype.name}): give rows as examples=…, or examples={{}} for no warm-up"
        )
    return np.zeros((1, *spec.shape[1:]), spec.dtype.as_numpy_dtype)


def check_protos_installed() -> None:
    """Raises ModuleNotFoundError if TensorFlow Serving's protocol package is not installed."""
    _protos("prediction_log_pb2")


def write_warmup_requests(
    version_directory: str | os.PathLike,
    name: str,
    examples: Mapping[str, np.ndarray],
    sizes: Iterable[int],
) -> None:
    """Writes one request per batch size, which repeats the rows `(n, …)` of the examples.

    TensorFlow Serving accepts up to 1,000 requests.
    """
    logs = _protos("prediction_log_pb2")
    path = pathlib.Path(version_directory) / _REQUESTS
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(os.fspath(path)) as file:
        for size in sizes:
            log = logs.PredictionLog()
            request = log.predict_log.request
            request.model_spec.name = name
            request.model_spec.signature_name = SERVING_DEFAULT
            for key, rows in examples.items():
                batch = np.take(rows, range(size), axis=0, mode="wrap")
                request.inputs[key].CopyFrom(_tensor(batch))
            file.write(log.SerializeToString())


def _tensor(array):
    """Returns a proto that stores equal elements once; image rows of zeros are large otherwise."""
    first = array.flat[0]
    if (array == first).all():
        return tf.make_tensor_proto(first, tf.as_dtype(array.dtype), array.shape)
    return tf.make_tensor_proto(array)


def warmup_requests(version_directory: str | os.PathLike) -> list[tuple[str, dict[str, Any]]]:
    """Returns the warm-up requests of a version, whichever program wrote them.

    Each is (signature, {input: array (rows, …)}). Raises `tf.errors.DataLossError` for a damaged
    file.
    """
    path = pathlib.Path(version_directory) / _REQUESTS
    if not path.exists():
        return []
    parse = _protos("prediction_log_pb2").PredictionLog.FromString
    logs = [parse(record) for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()]
    requests = [each.predict_log.request for each in logs if each.HasField("predict_log")]
    return [
        (
            request.model_spec.signature_name or SERVING_DEFAULT,
            {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()},
        )
        for request in requests
    ]


def _protos(name):
    try:
        return importlib.import_module(f"tensorflow_serving.apis.{name}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "warm-up requests need the package tensorflow-serving-api, which is not installed: "
            "pip install 'kdist[serve]', or export with examples={} for no warm-up"
        ) from error
