"""What is measured, and where it goes.

`DeviceSampler` samples this task's devices, the collector that `collector_of` gives those of all of
a job's tasks. `JsonlWriter` writes into the run directory, `NullWriter` nowhere.
"""

from kdist.telemetry.collector import Collector, collector_of
from kdist.telemetry.jsonl import JsonlWriter
from kdist.telemetry.null import NullWriter
from kdist.telemetry.sampler import DeviceSampler

__all__ = ["Collector", "DeviceSampler", "JsonlWriter", "NullWriter", "collector_of"]
