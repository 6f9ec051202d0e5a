"""Measurements that go to several places.

writer = SeveralWriters([RunWriter(run), TensorBoardWriter(run.path / "tensorboard")])
writer.write({"kind": "epoch", "epoch": 1, "loss": 0.4})
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.telemetry.writer import Writer


class SeveralWriters:
    """Hands everything to each of several writers.

    A writer that raises although it should not is said and left out from then on; the others go on.

    Args:
        writers: the first gets everything first.
    """

    def __init__(self, writers: Sequence[Writer]):
        self._writers = list(writers)

    def write(self, record: Mapping[str, Any]):
        """To each."""
        self._each("write", record)

    def write_device(self, record: Mapping[str, Any]):
        """To each."""
        self._each("write_device", record)

    def write_summary(self, summary: Mapping[str, Any]):
        """To each."""
        self._each("write_summary", summary)

    def write_report(self, path: pathlib.Path):
        """To each."""
        self._each("write_report", path)

    def close(self):
        """Closes each."""
        self._each("close")

    def _each(self, method, *arguments):
        # A copy: another thread may leave one out at the same moment.
        for writer in tuple(self._writers):
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:
                self._leave_out(writer, error)

    def _leave_out(self, writer, error):
        try:
            self._writers.remove(writer)
        except ValueError:  # another thread was faster
            return
        what = f"{type(error).__name__}: {error}"
        print(f"kdist: no more of {type(writer).__name__}: {what}", file=sys.stderr)
        # It may hold files or a process; what it has already may still be saved.
        try:
            writer.close()
        except Exception as second:
            print(f"kdist: {type(writer).__name__} does not close: {second}", file=sys.stderr)
