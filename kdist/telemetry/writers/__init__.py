"""Destinations of measurements: the run directory, W&B, MLflow, and TensorBoard.

This module has the interface of writers, writers that discard or distribute records, the names of
curves, and the results of a run.
"""

import logging
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.run_directory import RunDirectory

_logger = logging.getLogger(__name__)


class Writer:
    """Base class of writers: the run directory, W&B, MLflow, TensorBoard. Its methods do nothing.

    Several threads may call a writer. No method raises because of a file, a network, or a server,
    and none blocks training. A writer logs its first failure and discards what follows.

    Example:

        writer: Writer = create_writer(run, is_chief=True, wandb_mode="auto")
        writer.write({"kind": "epoch", "epoch": 1, "examples": 12800, "seconds": 9.5, "loss": 0.4})
        writer.write_device({"time": 1.8e9, "host": "node7", "device": "gpu/0", "power_watts": 70})
        writer.close()
    """

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes a record of `metrics.jsonl`; values are numbers, strings, lists, or None.

        Args:
            record: has `kind`, `epoch` (from 1), `step`, `examples` (seen), and `seconds` (since
                training began); the other fields are measurements.
        """

    def write_device(self, record: Mapping[str, Any]) -> None:
        """Writes a record of `devices.jsonl`: the state of one device at one time.

        Args:
            record: has `time` (Unix seconds), `seconds` (since training began), `host`, and
                `device` ("gpu/0", "cpu/3", "process/worker-0", "disk", "network"); on several
                hosts also `node`, the number of the host. The other fields are measurements.
        """

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration of the run; called before the records of each training."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the results of the run; called once, at its end."""

    def write_report(self, path: pathlib.Path) -> None:
        """Adds the finished report page, which stays where it is."""

    def write_samples(self, record: Mapping[str, Any]) -> None:
        """Writes sample predictions after an epoch.

        Args:
            record: has the axes of `write`, and `rows` of `kdist.telemetry.Samples`.
        """

    def write_model(
        self,
        path: str | os.PathLike,
        metadata: Mapping[str, Any],
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Adds a trained model, whose files stay where they are.

        Args:
            path: a file, or a directory such as an export for `kdist serve`.
            metadata: facts about the model, such as its accuracy.
            name: name of the model, whose versions are counted. Defaults to the last part of
                `path` that is not a number.
            aliases: names of this version, such as "best".
        """

    def close(self) -> None:
        """Ends writing; later records are discarded. May be called twice."""


class NullWriter(Writer):
    """Writer that discards everything, for tasks that are not the chief.

    Example:

        writer = NullWriter()
        writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})  # does nothing
    """


class SeveralWriters(Writer):
    """Writer that passes everything to several writers.

    A writer that raises an exception is logged, closed, and skipped from then on. The others
    continue.

    Args:
        writers: called in this order.

    Example:

        writer = SeveralWriters([RunWriter(run), TensorBoardWriter(run.path / "tensorboard")])
        writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})
    """

    def __init__(self, writers: Sequence[Writer]):
        self._writers = list(writers)

    def write(self, record: Mapping[str, Any]):
        """Passes the record to each writer."""
        self._call_each("write", record)

    def write_device(self, record: Mapping[str, Any]):
        """Passes the record to each writer."""
        self._call_each("write_device", record)

    def write_config(self, config: Mapping[str, Any]):
        """Passes the configuration to each writer."""
        self._call_each("write_config", config)

    def write_summary(self, summary: Mapping[str, Any]):
        """Passes the summary to each writer."""
        self._call_each("write_summary", summary)

    def write_report(self, path: pathlib.Path):
        """Passes the path of the page to each writer."""
        self._call_each("write_report", path)

    def write_samples(self, record: Mapping[str, Any]):
        """Passes the sample predictions to each writer."""
        self._call_each("write_samples", record)

    def write_model(self, path, metadata, *, name=None, aliases=()):
        """Passes the model to each writer."""
        self._call_each("write_model", path, metadata, name=name, aliases=aliases)

    def close(self):
        """Closes all of the writers."""
        self._call_each("close")

    def _call_each(self, method, *arguments, **options):
        # Iterates over a copy, as another thread may remove a writer at the same time.
        for writer in tuple(self._writers):
            try:
                getattr(writer, method)(*arguments, **options)
            except Exception as error:
                self._remove(writer, error)

    def _remove(self, writer, error):
        try:
            self._writers.remove(writer)
        except ValueError:  # another thread has removed it
            return
        name = type(writer).__name__
        _logger.warning("%s failed and is disabled: %s: %s", name, type(error).__name__, error)
        # It may hold files or a process, and may still save what it has.
        try:
            writer.close()
        except Exception as second:
            _logger.warning("%s failed to close: %s", name, second)


def create_writer(
    run: RunDirectory,
    *,
    is_chief: bool,
    wandb_mode: str = "off",
    tensorboard: bool = False,
    config: Mapping[str, Any] | None = None,
    project: str | None = None,
    group: str | None = None,
    job_type: str | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    notes: str | None = None,
    mlflow_uri: str | None = None,
    mlflow_experiment: str | None = None,
) -> Writer:
    """Creates the writer of a run: the run directory, and optionally W&B, MLflow, and TensorBoard.

    Args:
        run: the run directory, which is always written.
        is_chief: whether this task writes; other tasks get a `NullWriter`.
        wandb_mode: "auto", "online", "offline", "disabled", or "off"; see `WandbWriter`. Defaults
            to "off".
        tensorboard: whether to write event files for TensorBoard to `<run>/tensorboard/`. Defaults
            to False.
        config: configuration of the run, for W&B and MLflow.
        project: W&B project; see `WandbWriter`.
        group: W&B group; see `WandbWriter`.
        job_type: W&B job type; see `WandbWriter`.
        name: name of the run in W&B and MLflow; see `WandbWriter`.
        tags: tags of the run in W&B; see `WandbWriter`.
        notes: notes on the run in W&B; see `WandbWriter`.
        mlflow_uri: tracking URI of MLflow; see `MlflowWriter`. Defaults to None, no MLflow.
        mlflow_experiment: MLflow experiment; see `MlflowWriter`.

    Returns:
        The writer. The caller closes it.

    Raises:
        ValueError: `wandb_mode` is unknown.

    Example:

        writer = create_writer(RunDirectory("runs/first"), is_chief=True, wandb_mode="offline")
        writer.write({"kind": "epoch", "epoch": 1, "examples": 60000, "loss": 0.4})
        writer.close()
    """
    if not is_chief:
        return NullWriter()
    from kdist.telemetry.writers.run_directory import RunWriter

    writers: list[Writer] = [RunWriter(run)]
    if wandb_mode not in ("off", "disabled"):
        from kdist.telemetry.writers.wandb import WandbWriter

        names = project, group, job_type, name
        writer = WandbWriter(run.path, wandb_mode, *names, config=config, tags=tags, notes=notes)
        writers.append(writer)
    if mlflow_uri is not None:
        from kdist.telemetry.writers.mlflow import MlflowWriter

        writers.append(MlflowWriter(run.path, mlflow_uri, mlflow_experiment, name, config))
    if tensorboard:
        from kdist.telemetry.writers.tensorboard import TensorBoardWriter  # imports TensorFlow

        writers.append(TensorBoardWriter(run.path / "tensorboard"))
    return writers[0] if len(writers) == 1 else SeveralWriters(writers)


# Fields that share one curve across all kinds of records; other curves are named after the kind.
COMMON = ("epoch", "step", "examples", "seconds", "learning_rate")

METRIC_KINDS = ("train", "epoch", "timing")
DEVICE_KINDS = ("gpu", "cpu", "process", "disk", "network")

_NOT_MEASURED = ("time", "seconds", "host", "node", "device")


def metric_curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record of `metrics.jsonl` by the names of their curves.

    Values that are not finite numbers are omitted. A list becomes one curve for each position, such
    as `timing/replica_busy_seconds/0`.

    Args:
        record: a record as `Writer.write` receives it.

    Returns:
        Names and numbers. The axes, such as `examples`, keep their names; others are named after
        the kind of the record.

    Example:

        metric_curves({"kind": "train", "examples": 64, "loss": 0.5})
        # {"examples": 64, "train/loss": 0.5}
    """
    kind = record["kind"]
    return dict(
        item
        for name, value in record.items()
        for item in _numbers(name if name in COMMON else f"{kind}/{name}", value)
    )


def device_curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record of `devices.jsonl` by the names of their curves.

    Names have the form `<device kind>/<index>/<metric>`, on several hosts
    `<device kind>/node<number>/<index>/<metric>`. Devices that a host has only one of have no
    index, such as `disk/read_bytes_per_second`. The same device of two runs has the same curves,
    also on other hosts.
    """
    kind, _, index = record["device"].partition("/")
    node = record.get("node")
    path = "/".join(filter(None, (kind, "" if node is None else f"node{node}", index)))
    return dict(
        item
        for name, value in record.items()
        if name not in _NOT_MEASURED
        for item in _numbers(f"{path}/{name}", value)
    )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _numbers(f"{name}/{position}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value


def write_results(
    run: RunDirectory, writer: Writer, summary: Mapping[str, Any], report: bool = True
) -> pathlib.Path | None:
    """Writes the summary and the report page of a run, and passes them to its writer.

    A page that cannot be written is logged, as training has succeeded, and the page can be made
    later.

    Args:
        run: the run directory.
        writer: the writer of the run; it stays open.
        summary: results of the run.
        report: whether to write the page. Defaults to True.

    Returns:
        The path of the page; None without one.

    Raises:
        FileNotFoundError: the run directory was lost while the run continued.
    """
    from kdist.report import write

    writer.write_summary(summary)
    run.check_intact()
    if not report:
        return None
    try:
        page = write([run.path], run.report)
    except (OSError, ValueError) as error:
        _logger.warning(
            "the report was not written: %s. The results are in %s; write the report later with "
            "`kdist report %s --output=report.html`",
            error,
            run.summary,
            run.path,
        )
        return None
    writer.write_report(page)
    return page
