"""Writers of the run directory: JSON lines, the files of a run, and the axes of its curves."""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from kdist.run_directory import RunDirectory, finite, is_open_at
from kdist.telemetry.writers import Writer

_logger = logging.getLogger(__name__)

# Contains the last records of every kind.
_TAIL_BYTES = 1 << 16


class JsonlWriter(Writer):
    """Appends one JSON object per line to a file; NaN and infinities become null.

    Each line can be read as soon as it is written. If the file is deleted, moved, or replaced, the
    writer logs this and continues in a new one, as its earlier lines are lost. When the file cannot
    be written, for example because the disk is full, the writer logs this once and discards later
    records; training continues, and the file consists of complete lines.

    Args:
        path: the file, created with the first line; its directory must exist.

    Example:

        writer = JsonlWriter("runs/first/metrics.jsonl")
        writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})
        writer.close()
    """

    def __init__(self, path: str | os.PathLike):
        self._path = path
        self._file: int | None = None
        self._closed = False

    def write(self, record: Mapping[str, Any]):
        """Appends one object; values are numbers, strings, lists, or None."""
        if self._closed:
            return
        line = json.dumps(finite(record)).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            _logger.warning("cannot write metrics to %s: %s", self._path, error.strerror)
            self.close()

    def close(self):
        """Closes the file; later records are discarded."""
        self._closed = True
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.close(file)
            except OSError as error:
                _logger.warning("%s is incomplete: %s", self._path, error.strerror)

    def _append(self, line):
        """Writes unbuffered, so that a killed run or a full disk leaves complete lines."""
        if self._file is not None and not is_open_at(self._file, self._path):
            _logger.warning(
                "%s was deleted, moved, or replaced during the run; its earlier lines are lost",
                self._path,
            )
            lost, self._file = self._file, None
            os.close(lost)
        if self._file is None:
            self._file = self._open()
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise

    def _open(self):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        return os.open(self._path, flags, 0o666)


class RunWriter(Writer):
    """Writes the files of a run directory: configuration, metrics, devices, and summary.

    A file that cannot be written is logged once, and training continues without it.

    Args:
        run: the run directory; created if it does not exist.

    Example:

        writer = RunWriter(RunDirectory("runs/first"))
        writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})  # metrics.jsonl
        writer.write_summary({"test_accuracy": 0.9})              # summary.json
        writer.close()
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _logger.warning("cannot create the run directory: %s", error)
        self._metrics = JsonlWriter(run.metrics)
        self._devices = JsonlWriter(run.devices)

    def write(self, record: Mapping[str, Any]):
        """Appends a line to `metrics.jsonl`."""
        self._metrics.write(record)

    def write_device(self, record: Mapping[str, Any]):
        """Appends a line to `devices.jsonl`."""
        self._devices.write(record)

    def write_config(self, config: Mapping[str, Any]):
        """Writes `config.json`; adds to the one of an earlier training in the same directory.

        A program that created the run with `RunDirectory.create` has written its own.
        """
        try:
            self._run.update_config(config)
        except OSError as error:
            _logger.warning("cannot write %s: %s", self._run.config, error.strerror)

    def write_summary(self, summary: Mapping[str, Any]):
        """Writes `summary.json` atomically."""
        try:
            self._run.write_summary(summary)
        except OSError as error:
            _logger.warning("cannot write the summary %s: %s", self._run.summary, error.strerror)

    def close(self):
        """Closes the files; later records are discarded."""
        self._metrics.close()
        self._devices.close()


@dataclasses.dataclass
class Axes:
    """Offsets from this training's counts to those of the run, which may have several trainings.

    Attributes:
        epochs: added to the number of an epoch.
        steps: added to the optimizer's count of steps.
        examples: added to the examples of these steps.
        seconds: added to the seconds since this training began.
    """

    epochs: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0

    @classmethod
    def after(
        cls, last: Mapping[str, Any], epoch: int, step: int, global_batch: int | None
    ) -> "Axes":
        """Returns the axes of a training that follows the record `last`.

        A model that continues where that record ends needs no offsets. For other models, the counts
        continue from there.

        Args:
            last: the largest values of earlier records; empty for none.
            epoch: first epoch of this training, from 0.
            step: the optimizer's steps before this training.
            global_batch: examples per step; None if unknown.
        """
        if not last:
            return cls()
        last_step = int(last.get("step") or 0)
        shown_step = max(step, last_step)
        examples = 0
        if global_batch and last.get("examples") is not None:
            since = (shown_step - last_step) * global_batch
            examples = int(last["examples"]) + since - step * global_batch
        return cls(
            epochs=max(0, int(last.get("epoch") or 0) - epoch),
            steps=shown_step - step,
            examples=examples,
            seconds=float(last.get("seconds") or 0.0),
        )


def last_values(path: pathlib.Path) -> dict[str, Any]:
    """Returns the largest values on the axes at the end of `metrics.jsonl`; empty without any."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    last: dict[str, Any] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the tail begins, or a killed run ended, within a line
            continue
        if isinstance(record, dict):
            note_largest(last, record)
    return last


def note_largest(last: dict[str, Any], record: Mapping[str, Any]):
    """Updates the largest values on the axes with those of a record."""
    for name in ("epoch", "step", "examples", "seconds"):
        value = record.get(name)
        if isinstance(value, int | float) and value >= last.get(name, value):
            last[name] = value
