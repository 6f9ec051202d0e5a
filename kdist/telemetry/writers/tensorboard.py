"""Writer of TensorBoard event files.

To look at them: `pip install tensorboard`, `tensorboard --logdir runs`. Writing needs TensorFlow
only.
"""

import itertools
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kdist.telemetry.writers import Writer, device_curves, metric_curves

# tf.summary runs an eager operation for each number and cannot set its time: a record of a host
# with many cores would take milliseconds. The file format is the same.
_Event, _Summary = tf.compat.v1.Event, tf.compat.v1.Summary

_numbers = itertools.count()  # of the files of this process

_logger = logging.getLogger(__name__)


class TensorBoardWriter(Writer):
    """Writes scalars to an event file; their step is the number of examples seen.

    When the file cannot be written, for example because the disk is full, the writer logs this once
    and discards later records; training continues.

    Args:
        directory: the directory of the event file; created if it does not exist.

    Example:

        writer = TensorBoardWriter("runs/first/tensorboard")
        writer.write({"kind": "epoch", "epoch": 1, "examples": 60000, "loss": 0.4})
        writer.close()
    """

    def __init__(self, directory: str | os.PathLike):
        self._directory = pathlib.Path(directory)
        self._lock = threading.Lock()
        self._file: tf.io.TFRecordWriter | None = None
        self._closed = False
        self._step = 0

    def write(self, record: Mapping[str, Any]):
        """Adds the numbers of a record as `<kind>/<name>`.

        Their step is `examples`, or `step` where the number of examples is unknown.
        """
        examples = record.get("examples")
        self._step = int(record.get("step") or 0) if examples is None else int(examples)
        self._add(metric_curves(record), time.time())

    def write_device(self, record: Mapping[str, Any]):
        """Adds the measurements of a device at their time and the latest step."""
        self._add(device_curves(record), record["time"])

    def write_summary(self, summary: Mapping[str, Any]):
        """Adds the numbers of the summary as `summary/<name>`."""
        numbers = {name: value for name, value in summary.items() if name != "kind"}
        self._add(metric_curves({"kind": "summary", **numbers}), time.time())

    def close(self):
        """Closes the file; later records are discarded."""
        with self._lock:
            self._closed = True
            try:
                if self._file is not None:
                    self._file.close()
            except (OSError, tf.errors.OpError) as error:
                self._log(error)
            self._file = None

    def _add(self, curves, when):
        values = [_Summary.Value(tag=tag, simple_value=value) for tag, value in curves.items()]
        event = _Event(wall_time=when, step=self._step, summary=_Summary(value=values))
        with self._lock:
            if self._closed or not values:
                return
            try:
                if self._file is None:
                    self._file = self._open()
                self._file.write(event.SerializeToString())
                # Flushed for each record, so that a killed run leaves all of them.
                self._file.flush()
            except (OSError, tf.errors.OpError) as error:
                self._closed = True
                self._file = None
                self._log(error)

    def _open(self):
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard expects this name, and orders files by the time in it. Within a second, a
        # process may write several.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        name += f".{next(_numbers)}"
        file = tf.io.TFRecordWriter(str(self._directory / name))
        version = _Event(wall_time=time.time(), file_version="brain.Event:2")
        file.write(version.SerializeToString())
        return file

    def _log(self, error):
        reason = getattr(error, "message", None) or str(error)
        _logger.warning("cannot write for TensorBoard to %s: %s", self._directory, reason)
