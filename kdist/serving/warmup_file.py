"""Requests that a server computes before it serves a version, so that the first clients don't wait.

They are where TensorFlow Serving looks for them: in `assets.extra/tf_serving_warmup_requests` of
the version, a TFRecord of `PredictionLog`s.
"""

import importlib
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.serving.signature import SERVING_DEFAULT

# Examples for one input by its array, for several by their names.
Examples = np.ndarray | Mapping[str, np.ndarray]

_REQUESTS = pathlib.PurePath("assets.extra", "tf_serving_warmup_requests")


def examples_as_given(
    specs: Mapping[str, tf.TensorSpec], examples: Examples | None
) -> dict[str, np.ndarray]:
    """Arrays of rows for the inputs of a model; none at all for no warm-up.

    Args:
        specs: of its inputs; the first size of each is None.
        examples: for one input its rows, for several name -> rows; by default a row of zeros.

    Raises:
        ValueError: they are not for these inputs, or zeros cannot be made.
    """
    if examples is None:
        return {name: _zeros(name, spec) for name, spec in specs.items()}
    if not isinstance(examples, Mapping):
        examples = {} if len(examples) == 0 else {next(iter(specs)): examples}
    if examples and set(examples) != set(specs):
        raise ValueError(
            f"examples of {', '.join(examples)}, and the inputs are {', '.join(specs)}: give rows "
            "for each by its name"
        )
    given = {name: np.asarray(x, specs[name].dtype.as_numpy_dtype) for name, x in examples.items()}
    for name, rows in given.items():
        if not specs[name].shape.is_compatible_with(rows.shape):
            raise ValueError(f"examples of {name}: shape {rows.shape}, not {specs[name].shape}")
    counts = {len(rows) for rows in given.values()}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"rows of examples: {sorted(counts)}; give as many of each, one at least")
    return given


def _zeros(name, spec):
    if None in spec.shape[1:] or not (spec.dtype.is_floating or spec.dtype.is_integer):
        raise ValueError(
            f"no request to warm up with can be guessed for {name!r} (shape {spec.shape}, "
            f"{spec.dtype.name}): give rows as examples=…, or examples={{}} for no warm-up"
        )
    return np.zeros((1, *spec.shape[1:]), spec.dtype.as_numpy_dtype)


def check_can_write() -> None:
    """Fails where the package of TensorFlow Serving's protocol is missing.

    Raises:
        ModuleNotFoundError: it says what to install.
    """
    _protos("prediction_log_pb2")


def write_warm_up(
    version_directory: str | os.PathLike,
    name: str,
    examples: Mapping[str, np.ndarray],
    sizes: Iterable[int],
) -> None:
    """Writes a request for each size of batch, with rows of the examples in turn.

    Args:
        version_directory: of a SavedModel.
        name: the model's.
        examples: input -> rows (n, …), as many of each.
        sizes: rows; as many as there are requests. TensorFlow Serving takes 1,000 at most.

    Raises:
        ModuleNotFoundError: as `check_can_write`.
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
    """Of equal elements, one is written: rows of zeros, as images, would be as large as a model."""
    first = array.flat[0]
    if (array == first).all():
        return tf.make_tensor_proto(first, tf.as_dtype(array.dtype), array.shape)
    return tf.make_tensor_proto(array)


def warmup_requests(version_directory: str | os.PathLike) -> list[tuple[str, dict[str, Any]]]:
    """What a version asks to be computed before it is served, whoever has written it.

    Returns:
        (signature, {input: array (rows, …)}) of each request for a prediction, in order; none
        where there is no such file.

    Raises:
        ModuleNotFoundError: as `check_can_write`.
        tf.errors.DataLossError: the file is damaged.
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
            "requests to warm up with are messages of the package tensorflow-serving-api, which is "
            "missing: pip install 'kdist[serve]', or export with examples={} for no warm-up"
        ) from error
