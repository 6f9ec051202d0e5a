"""Where measurements go: `JsonlWriter` writes them into the run directory."""

from kdist.telemetry.jsonl import JsonlWriter

__all__ = ["JsonlWriter"]
