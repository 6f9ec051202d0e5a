"""What each device did on average, from its samples."""

import collections
from collections.abc import Mapping
from typing import Any


class DeviceMeans:
    """Adds up samples of devices as they come.

    Nothing is kept of the samples themselves, however long a training is.
    """

    def __init__(self):
        self._sums = collections.defaultdict(collections.Counter)
        self._counts = collections.defaultdict(collections.Counter)

    def note(self, record: Mapping[str, Any]):
        """Takes a record of `devices.jsonl`."""
        place = record["host"], record["device"]
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("time", "seconds"):
                self._sums[place][name] += value
                self._counts[place][name] += 1

    def gpus(self) -> list[dict[str, Any]]:
        """A record for each GPU, with the mean of all that was measured of it."""
        return [
            {
                "host": host,
                "device": device,
                **{name: total / self._counts[host, device][name] for name, total in sums.items()},
            }
            for (host, device), sums in sorted(self._sums.items())
            if device.startswith("gpu/")
        ]
