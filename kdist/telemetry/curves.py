"""Names of curves in W&B and TensorBoard: the same measurement has the same name in every run.

metric_curves({"kind": "epoch", "examples": 128, "loss": 0.4})
# {"examples": 128, "epoch/loss": 0.4}
device_curves({"host": "node7", "device": "gpu/0", "utilization": 0.9})
# {"gpu/node7/0/utilization": 0.9}
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

# What every kind of record has goes into one curve; the rest is named after its kind.
COMMON = ("epoch", "step", "examples", "seconds", "learning_rate")

METRIC_KINDS = ("train", "epoch", "timing")
DEVICE_KINDS = ("gpu", "cpu", "process", "disk", "network")

_NOT_MEASURED = ("time", "seconds", "host", "device")


def metric_curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of metrics.jsonl, by the names of their curves.

    What is no finite number is left out; a list becomes a curve for each of its places, such as
    `timing/replica_busy_seconds/0`.
    """
    kind = record["kind"]
    return dict(
        item
        for name, value in record.items()
        for item in _numbers(name if name in COMMON else f"{kind}/{name}", value)
    )


def device_curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of devices.jsonl, as `<device kind>/<host>/<index>/<metric>`.

    A kind that a host has one of goes without index: `disk/node7/read_bytes_per_second`.
    """
    kind, _, index = record["device"].partition("/")
    path = "/".join(filter(None, (kind, record["host"], index)))
    return dict(
        item
        for name, value in record.items()
        if name not in _NOT_MEASURED
        for item in _numbers(f"{path}/{name}", value)
    )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _numbers(f"{name}/{place}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value
