"""Writer of MLflow runs, which never blocks training.

All communication with mlflow happens in a process of its own
(`kdist.telemetry.writers.mlflow_process`).
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from kdist.run_directory import finite
from kdist.telemetry.writers.tracker import TrackerWriter


class MlflowWriter(TrackerWriter):
    """Writes metrics, parameters, results, the report, and models to an MLflow run.

    The step of a metric is the number of examples seen; for devices it is seconds. An exported
    model becomes an MLflow model, which `mlflow models serve` loads. A run directory that is
    resumed continues its run. The writer logs where the run is, and its first problem. It needs
    `kdist[mlflow]`.

    Args:
        run_directory: the run directory.
        uri: tracking URI, such as "http://127.0.0.1:5000", or "sqlite:///mlflow.db" for a file.
            Defaults to MLFLOW_TRACKING_URI.
        experiment: name of the experiment. Defaults to MLFLOW_EXPERIMENT_NAME, or "kdist".
        name: name of the run. Defaults to the name of the run directory.
        config: parameters of the run; those of `write_config` are added.
        close_seconds: longest time that `close` waits, without uploads of models. Defaults to 20.

    Raises:
        ValueError: there is no tracking URI.

    Example:

        writer = MlflowWriter("runs/first", "http://127.0.0.1:5000")
        writer.write({"kind": "epoch", "epoch": 1, "examples": 60000, "loss": 0.4})
        writer.close()  # takes at most 20 s
    """

    tracker, library = "MLflow", "mlflow"

    def __init__(
        self,
        run_directory: str | os.PathLike,
        uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        close_seconds: float = 20.0,
    ):
        super().__init__(run_directory, close_seconds)
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise ValueError("MlflowWriter: pass a tracking URI, such as http://127.0.0.1:5000")
        self._begin(
            {
                "directory": str(self._directory),
                "uri": uri,
                "experiment": experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "kdist",
                "name": name or self._directory.name,
                "config": finite(dict(config or {})),
                "program": sys.argv[0],
            }
        )

    def _environment(self, files):
        return {
            # mlflow would try again for minutes, while records are queued behind it.
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **os.environ,
        }
