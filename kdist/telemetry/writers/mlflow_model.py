"""Exported models as MLflow models, which `mlflow models serve` loads.

    write_mlflow_model("models/digits/1", "mlflow_model")
    # mlflow models serve --model-uri=mlflow_model --env-manager=local

An MLflow model is a directory with the file MLmodel. It names this module, whose `_load_pyfunc`
MLflow calls, so that the server needs `kdist`.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Mapping
from typing import Any

_DATA = "data"
_REQUIREMENTS = ("kdist", "tensorflow")


def is_saved_model(path: str | os.PathLike) -> bool:
    """Returns whether a path is a version that `kdist.serving.export` or TensorFlow wrote."""
    return pathlib.Path(path, "saved_model.pb").is_file()


def write_mlflow_model(
    version: str | os.PathLike,
    directory: str | os.PathLike,
    metadata: Mapping[str, Any] | None = None,
    run_id: str | None = None,
):
    """Writes an MLflow model of an exported version.

    Args:
        version: directory of the version, such as models/digits/1.
        directory: directory to write to; created if needed.
        metadata: facts about the model, which MLflow shows.
        run_id: identifier of the run that trained it.
    """
    directory = pathlib.Path(directory)
    shutil.copytree(version, directory / _DATA)
    flavor = {
        "loader_module": __name__,
        "data": _DATA,
        "python_version": platform.python_version(),
        "env": {"virtualenv": "python_env.yaml"},
    }
    model: dict[str, Any] = {"flavors": {"python_function": flavor}}
    model |= {"run_id": run_id} if run_id else {}
    model |= {"metadata": dict(metadata)} if metadata else {}
    # JSON is YAML.
    (directory / "MLmodel").write_text(json.dumps(model, indent=1, default=str) + "\n")
    requirements = [f"{name}=={importlib.metadata.version(name)}" for name in _REQUIREMENTS]
    (directory / "requirements.txt").write_text("\n".join(requirements) + "\n")
    environment = {"python": platform.python_version(), "dependencies": ["-r requirements.txt"]}
    (directory / "python_env.yaml").write_text(json.dumps(environment, indent=1) + "\n")


class _Predictor:
    """Model that MLflow calls with rows, or with a dictionary of inputs."""

    def __init__(self, path):
        import tensorflow as tf

        self._loaded = tf.saved_model.load(path)
        self._signature = self._loaded.signatures["serving_default"]
        self._specs = self._signature.structured_input_signature[1]

    def predict(self, rows, params=None):
        """Returns an array (N, …), or {name: array} of several outputs."""
        import numpy as np
        import tensorflow as tf

        if not isinstance(rows, dict):  # an array, or a table of one input
            ((name, spec),) = self._specs.items()
            values, shape = np.asarray(rows), spec.shape[1:]
            rows = {name: values.reshape(-1, *shape) if None not in shape else values}
        given = {name: tf.cast(rows[name], spec.dtype) for name, spec in self._specs.items()}
        outputs = {name: value.numpy() for name, value in self._signature(**given).items()}
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _load_pyfunc(path):
    """Returns the model in a directory; called by `mlflow.pyfunc.load_model`."""
    return _Predictor(path)
