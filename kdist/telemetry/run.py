"""Measurements as files of the run directory.

writer = RunWriter(RunDirectory("runs/first"))
writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})   # metrics.jsonl
writer.write_summary({"test_accuracy": 0.9})               # summary.json
writer.close()
"""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from kdist.run_directory import RunDirectory
from kdist.telemetry.jsonl import JsonlWriter


class RunWriter:
    """Writes `metrics.jsonl`, `devices.jsonl` and `summary.json`.

    Training does not stop for it: a file that cannot be written (a full disk, say) is said once
    and the rest of it is left out.

    Args:
        run: where to write; made if it is not there.
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"kdist: no run directory: {error}", file=sys.stderr)
        self._metrics = JsonlWriter(run.metrics)
        self._devices = JsonlWriter(run.devices)

    def write(self, record: Mapping[str, Any]):
        """Adds a line to metrics.jsonl."""
        self._metrics.write(record)

    def write_device(self, record: Mapping[str, Any]):
        """Adds a line to devices.jsonl."""
        self._devices.write(record)

    def write_summary(self, summary: Mapping[str, Any]):
        """Writes summary.json, whole or not at all."""
        try:
            self._run.write_summary(summary)
        except OSError as error:
            print(f"kdist: no summary: {self._run.summary}: {error.strerror}", file=sys.stderr)

    def write_report(self, path: pathlib.Path):
        """Does nothing: the page is in the run directory already."""

    def close(self):
        """Closes the files."""
        self._metrics.close()
        self._devices.close()
