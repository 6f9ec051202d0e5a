"""What a writer is: the one interface behind which the run directory, W&B and TensorBoard stand.

writer: Writer = create_writer(run, is_chief=True, wandb_mode="auto")
writer.write({"kind": "epoch", "epoch": 1, "examples": 12800, "seconds": 9.5, "loss": 0.4})
writer.write_device({"time": 1.8e9, "host": "node7", "device": "gpu/0", "power_watts": 70})
writer.close()
"""

import pathlib
from collections.abc import Mapping
from typing import Any, Protocol


class Writer(Protocol):
    """Takes measurements; several threads may call it.

    No method raises because of a file, a network or a server, and none makes training wait for
    them: what fails is said once on stderr and left out from then on.
    """

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes a record of metrics.jsonl; values are numbers, strings, lists, or None.

        Each has `kind`, `epoch` (from 1), `step`, `examples` (seen) and `seconds` (since training
        began); the rest is measurements.
        """

    def write_device(self, record: Mapping[str, Any]) -> None:
        """Takes a record of devices.jsonl: what one device did at one moment.

        Each has `time` (Unix, in seconds), `seconds` (since training began), `host` and `device`
        ("gpu/0", "cpu/3", "process/worker-0", "disk", "network"); the rest is measurements.
        """

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Takes all that came out of the run; once, at its end."""

    def write_report(self, path: pathlib.Path) -> None:
        """Takes the finished page about the run, which stays where it is."""

    def close(self) -> None:
        """Ends the writing; what is written afterwards is left out. May be called twice."""
