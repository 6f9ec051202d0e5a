"""Measurements that nobody wants: those of a task that is not the chief."""

import pathlib
from collections.abc import Mapping
from typing import Any


class NullWriter:
    """Takes what other writers take, and writes nothing."""

    def write(self, record: Mapping[str, Any]):
        """Does nothing."""

    def write_device(self, record: Mapping[str, Any]):
        """Does nothing."""

    def write_summary(self, summary: Mapping[str, Any]):
        """Does nothing."""

    def write_report(self, path: pathlib.Path):
        """Does nothing."""

    def close(self):
        """Does nothing."""
