"""Measurements as curves for TensorBoard.

writer = TensorBoardWriter("runs/first/tensorboard")
writer.write({"kind": "epoch", "epoch": 1, "examples": 60000, "loss": 0.4})
writer.close()

To look at them: `pip install tensorboard`, `tensorboard --logdir runs`. Writing needs TensorFlow
alone.
"""

import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kdist.telemetry.curves import device_curves, metric_curves

# tf.summary would take an eager operation for each number, and the present for its time: a record
# of a host with many cores would cost milliseconds. The file is the same.
_Event, _Summary = tf.compat.v1.Event, tf.compat.v1.Summary


class TensorBoardWriter:
    """Writes scalars to an event file; their step is examples seen.

    Training does not stop for it: when the file cannot be written (a full disk, say), that is said
    once and the rest is left out.

    Args:
        directory: where to; made if it is not there.
    """

    def __init__(self, directory: str | os.PathLike):
        self._directory = pathlib.Path(directory)
        self._lock = threading.Lock()
        self._file: tf.io.TFRecordWriter | None = None
        self._ended = False
        self._step = 0

    def write(self, record: Mapping[str, Any]):
        """Adds the numbers of a record, as `<kind>/<name>`; examples are their step.

        Where the number of examples is not known, updates are counted instead.
        """
        examples = record.get("examples")
        self._step = int(record.get("step") or 0) if examples is None else int(examples)
        self._add(metric_curves(record), time.time())

    def write_device(self, record: Mapping[str, Any]):
        """Adds what a device did, at its time and at the examples seen until then."""
        self._add(device_curves(record), record["time"])

    def write_summary(self, summary: Mapping[str, Any]):
        """Adds the numbers among it, as `summary/<name>`."""
        numbers = {name: value for name, value in summary.items() if name != "kind"}
        self._add(metric_curves({"kind": "summary", **numbers}), time.time())

    def write_report(self, path: pathlib.Path):
        """Does nothing: TensorBoard shows no pages."""

    def close(self):
        """Closes the file; what is written afterwards is left out."""
        with self._lock:
            self._ended = True
            try:
                if self._file is not None:
                    self._file.close()
            except tf.errors.OpError as error:
                self._say(error)
            self._file = None

    def _add(self, curves, when):
        values = [_Summary.Value(tag=tag, simple_value=value) for tag, value in curves.items()]
        event = _Event(wall_time=when, step=self._step, summary=_Summary(value=values))
        with self._lock:
            if self._ended or not values:
                return
            try:
                if self._file is None:
                    self._file = self._open()
                self._file.write(event.SerializeToString())
                # Readable the moment it is written; a run that is killed leaves it behind.
                self._file.flush()
            except (OSError, tf.errors.OpError) as error:
                self._ended = True
                self._file = None
                self._say(error)

    def _open(self):
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard knows such files by this name, and orders them by the time in it.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        file = tf.io.TFRecordWriter(str(self._directory / name))
        version = _Event(wall_time=time.time(), file_version="brain.Event:2")
        file.write(version.SerializeToString())
        return file

    def _say(self, error):
        what = getattr(error, "message", None) or str(error)
        print(f"kdist: no more for TensorBoard: {self._directory}: {what}", file=sys.stderr)
