"""Measurements as lines of JSON, each readable the moment it is written.

writer = JsonlWriter("runs/first/metrics.jsonl")
writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})
writer.close()
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from kdist.run_directory import finite


class JsonlWriter:
    """Appends one JSON object a line to a file; NaN and infinities become null.

    Training does not stop for it: when the file cannot be written (a full disk, say), that is said
    once and the rest is left out.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = path
        # Buffered by the line: a run that is killed leaves whole lines behind.
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]):
        """Writes one object; values are numbers, strings, lists, or None."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(finite(record)) + "\n")
        except OSError as error:
            print(f"kdist: no more metrics: {self._path}: {error.strerror}", file=sys.stderr)
            self.close()

    def close(self):
        """Closes the file; what is written afterwards is left out."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                print(f"kdist: {self._path} is cut short: {error.strerror}", file=sys.stderr)
