"""The process that communicates with mlflow; `MlflowWriter` starts it and sends it commands."""

import json
import os
import pathlib
import tempfile
import time

from kdist.json_text import parse_json
from kdist.run_directory import replacing
from kdist.telemetry.provenance import git_commit
from kdist.telemetry.writers import device_curves, metric_curves
from kdist.telemetry.writers.mlflow_model import is_saved_model, write_mlflow_model
from kdist.telemetry.writers.tracker import serve

# Limits of MLflow's REST API.
_MAX_PARAMETERS, _MAX_CHARACTERS = 100, 6000
# File of the run directory with the identifier of the run, so that a resumed run continues it.
_MARK = pathlib.PurePath("mlflow", "run.json")


def main():
    """Opens a run, executes commands until the input ends, and finishes the run."""
    serve(_MlflowRun)


class _MlflowRun:
    """A run on an MLflow server, or in a database."""

    def __init__(self, start, send):
        import mlflow  # takes a second

        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(start["uri"])
        self._mark = pathlib.Path(start["directory"], _MARK)
        run = self._resumed(start["uri"]) or self._created(start)
        self._id, self._parameters = run.info.run_id, dict(run.data.params)
        self.write_config(start["config"])
        uri, where = start["uri"].rstrip("/"), f"runs/{self._id}"
        if uri.startswith("http"):
            where = f"#/experiments/{run.info.experiment_id}/{where}"
        send(location=f"{uri}/{where}")

    def _resumed(self, uri):
        """Returns the run that an earlier process has created for the run directory, or None."""
        try:
            mark = parse_json(self._mark.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(mark, dict) or mark.get("uri") != uri:
            return None
        self._client.set_terminated(mark["run"], "RUNNING")
        return self._client.get_run(mark["run"])

    def _created(self, start):
        found = self._client.get_experiment_by_name(start["experiment"])
        if found is None:
            experiment = self._client.create_experiment(start["experiment"])
        else:
            experiment = found.experiment_id
        tags = {"mlflow.source.name": start["program"]}
        if commit := git_commit(start["program"]):
            tags["mlflow.source.git.commit"] = commit
        run = self._client.create_run(experiment, run_name=start["name"], tags=tags)
        with replacing(self._mark) as file:
            json.dump({"uri": start["uri"], "run": run.info.run_id}, file)
        return run

    def write(self, record):
        """Adds the numbers of a record, at the number of examples."""
        self._log(metric_curves(record), record.get("examples") or record.get("step") or 0)

    def write_device(self, record):
        """Adds the measurements of a device, at its seconds."""
        self._log(device_curves(record), record.get("seconds") or 0)

    def write_config(self, config):
        """Adds parameters; MLflow does not change one that exists."""
        new = {
            name: str(value)[:_MAX_CHARACTERS]
            for name, value in _flat(config)
            if name not in self._parameters
        }
        self._parameters.update(new)
        parameters = [self._entities.Param(*item) for item in new.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MAX_PARAMETERS])

    def write_summary(self, summary):
        """Adds the numbers of the summary by their names, and all of it as a file."""
        numbers = {
            name: value
            for name, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._log(numbers, 0)
        self._client.log_dict(self._id, summary, "summary.json")

    def write_report(self, path):
        """Adds the page."""
        self._client.log_artifact(self._id, path)

    def write_model(self, path, name, metadata, aliases):
        """Adds a file, or a directory; an exported model as an MLflow model."""
        if not is_saved_model(path):
            add = self._client.log_artifacts if os.path.isdir(path) else self._client.log_artifact
            add(self._id, path, name)
            return
        with tempfile.TemporaryDirectory(prefix="kdist-") as directory:
            write_mlflow_model(path, directory, {**metadata, "aliases": aliases}, self._id)
            self._client.log_artifacts(self._id, directory, name)

    def finish(self, exit_code):
        """Marks the run as finished, or as failed."""
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")

    def _log(self, numbers, step):
        now = int(time.time() * 1e3)
        metrics = [
            self._entities.Metric(name, float(value), now, int(step))
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)


def _flat(values, prefix=""):
    """Yields the names and values of a dictionary; those of inner ones are joined by dots."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
