"""Measurements as lines of JSON, each readable the moment it is written.

writer = JsonlWriter("runs/first/metrics.jsonl")
writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})
writer.close()
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from kdist.run_directory import finite


class JsonlWriter:
    """Appends one JSON object a line to a file; NaN and infinities become null.

    Training does not stop for it: when the file cannot be written (a full disk, say), that is said
    once and the rest is left out; what is in the file stays whole lines.

    Args:
        path: the file; made by the first line, in a directory that is there.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = path
        self._file: int | None = None
        self._ended = False

    def write(self, record: Mapping[str, Any]):
        """Writes one object; values are numbers, strings, lists, or None."""
        if self._ended:
            return
        line = json.dumps(finite(record)).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            print(f"kdist: no more metrics: {self._path}: {error.strerror}", file=sys.stderr)
            self.close()

    def write_device(self, record: Mapping[str, Any]):
        """Does nothing: the file has one kind of lines."""

    def write_summary(self, summary: Mapping[str, Any]):
        """Does nothing."""

    def write_report(self, path: pathlib.Path):
        """Does nothing."""

    def close(self):
        """Closes the file; what is written afterwards is left out."""
        self._ended = True
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.close(file)
            except OSError as error:
                print(f"kdist: {self._path} is cut short: {error.strerror}", file=sys.stderr)

    def _append(self, line):
        """Without a buffer: a run that is killed leaves whole lines behind, and so does a disk
        that fills in the middle of one."""
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._file = os.open(self._path, flags, 0o666)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise
