"""Where measurements go: `JsonlWriter` writes them into the run directory, `NullWriter` nowhere."""

from kdist.telemetry.jsonl import JsonlWriter
from kdist.telemetry.null import NullWriter

__all__ = ["JsonlWriter", "NullWriter"]
