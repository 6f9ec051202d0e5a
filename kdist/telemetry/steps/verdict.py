"""Diagnosis of what slows a training down, with numbers and what to change.

    timing = {"input_share": 0.86, "examples_per_second": 410.0}
    verdict({**timing, "window_steps": 500, "window_seconds": 60.0})
    # ["input-bound: the pipeline delivers 410 examples/s, the devices could train on 2,929; …"]

An empty list means that nothing but the steps themselves takes a noticeable share of the time, or
that too few steps were measured.
"""

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Smallest shares of a step that are reported: that of waiting for input, and those of other fields
# of a `timing` record with the text about them.
_MIN_INPUT_SHARE = 0.1
_SHARES = {
    "reduce_share": (
        0.25,
        "all-reduce is {:.0%} of a step; raise the local batch (--local_batch_size) or the "
        "accumulation (--accumulate), or use local SGD (--local_steps)",
    ),
    "callback_share": (
        0.1,
        "callbacks take {:.0%} of a step; run several steps per call "
        "(--steps_per_execution=auto), or use callbacks that read logs less often",
    ),
    "bubble_share": (
        0.25,
        "the devices of the split model wait {:.0%} of the time for each other; use more "
        "micro-batches in the pipeline (--layout=…,micro_batches=8), or balance the work of the "
        "devices (`kdist check --layout` shows the placement of layers)",
    ),
}
# Logical devices of one CPU take turns on its cores, so that none of them waits for the others.
_NOT_ON_SHARED_CORES = ("reduce_share", "bubble_share")
# Fewer steps and shorter trainings show how a training starts, not how it runs.
MIN_STEPS = 20
MIN_SECONDS = 5.0
# Smallest lag of one device behind the others, and smallest utilization that is not idle.
_MIN_LAG = 0.1
_MIN_UTILIZATION = 0.5


def verdict(
    timing: Mapping[str, Any],
    devices: Sequence[Mapping[str, Any]] = (),
    shares_cores: bool = False,
) -> list[str]:
    """Returns what slows the training down, one finding per string, the costliest first.

    Args:
        timing: a `timing` record of `metrics.jsonl` for the whole training.
        devices: mean measurements of each GPU: `host`, `device`, `utilization`, and `sm_clock_mhz`
            where measured.
        shares_cores: whether the replicas share the cores of one machine. They are then not
            compared. Defaults to False.
    """
    if not is_long_enough(timing):
        return []
    findings = [_input(timing), *_over_share(timing, shares_cores)]
    if not shares_cores:
        findings.append(_slow_replica(timing.get("replica_busy_seconds") or []))
    findings += [*_slow_gpus(devices), _idle(timing, devices)]
    return [text for _, text in sorted(filter(None, findings), key=lambda f: f[0], reverse=True)]


def is_long_enough(timing: Mapping[str, Any]) -> bool:
    """Returns whether a training has enough steps and seconds for a verdict."""
    steps, seconds = timing.get("window_steps") or 0, timing.get("window_seconds") or 0.0
    return steps >= MIN_STEPS and seconds >= MIN_SECONDS


class DeviceMeans:
    """Running means of the samples of each device, without the samples themselves."""

    def __init__(self):
        self._sums = collections.defaultdict(collections.Counter)
        self._counts = collections.defaultdict(collections.Counter)

    def add(self, record: Mapping[str, Any]):
        """Adds a record of `devices.jsonl`."""
        key = record["host"], record["device"]
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("time", "seconds", "node"):
                self._sums[key][name] += value
                self._counts[key][name] += 1

    def gpus(self) -> list[dict[str, Any]]:
        """Returns one record per GPU with the means of its measurements."""
        return [
            {
                "host": host,
                "device": device,
                **{name: total / self._counts[host, device][name] for name, total in sums.items()},
            }
            for (host, device), sums in sorted(self._sums.items())
            if device.startswith("gpu/")
        ]


def _input(timing):
    share, rate = timing.get("input_share"), timing.get("examples_per_second")
    if share is None or share < _MIN_INPUT_SHARE or not rate:
        return None
    workers = math.ceil(round(1 / max(1 - share, 0.001), 6))
    counts = sorted({2, workers} if workers > 2 else {workers})
    predictions = " and ".join(
        f"{count} data worker{'s' * (count > 1)} to {predicted_input_share(share, count):.0%}"
        for count in counts
    )
    return share, (
        f"input-bound: the pipeline delivers {rate:,.0f} examples/s, the devices could train on "
        f"{rate / max(1 - share, 0.001):,.0f} ({share:.0%} of a step is waiting for input); keep "
        "decoded examples in memory (cache=True), make the operations cheaper, or use data "
        f"workers: {predictions} of waiting, if each prepares as much as this machine does now "
        f"(`kdist launch --data_workers={workers}` if cores are idle or storage is slow, else "
        "`kdist data_worker` on other machines); `kdist check --input` measures the pipeline alone"
    )


def predicted_input_share(share: float, workers: int) -> float:
    """Returns the fraction of a step that is waiting for input with data workers.

    The input of an input-bound training takes as long as its step. `n` data workers divide this
    time by `n`, and the rest of the step takes as long as before: `max(0, 1 - n (1 - share))`.

    Args:
        share: the fraction without data workers.
        workers: number of data workers, each as fast as the pipeline of the training itself.

    Returns:
        The fraction with them.

    Example:

        >>> predicted_input_share(0.75, 2), predicted_input_share(0.75, 4)
        (0.5, 0.0)
    """
    return max(0.0, 1 - workers * (1 - share))


def _over_share(timing, shares_cores):
    """Yields the shares in `_SHARES` that exceed their minimum, with their texts."""
    for name, (minimum, text) in _SHARES.items():
        share = None if shares_cores and name in _NOT_ON_SHARED_CORES else timing.get(name)
        if share is not None and share >= minimum:
            yield share, text.format(share)


def _slow_replica(busy):
    """Compares replicas, which all process equal shares of a batch."""
    if len(busy) < 2:
        return None
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = statistics.median(b for n, b in enumerate(busy) if n != slowest)
    lag = 1 - others / busy[slowest] if busy[slowest] else 0.0
    if lag < _MIN_LAG:
        return None
    return lag, (
        f"replica {slowest} runs {lag:.0%} behind the others, which wait for it (busy "
        f"{busy[slowest] * 1000:,.1f} ms per step, the others {others * 1000:,.1f} ms); check "
        "whether other programs use its device"
    )


def _slow_gpus(devices):
    """Yields the GPUs that are slower than the others: throttled, or used by other programs."""
    for gpu, others in _each_and_median(devices, "sm_clock_mhz"):
        lag = 1 - gpu["sm_clock_mhz"] / others
        if lag >= _MIN_LAG:
            celsius = gpu.get("temperature_celsius")
            heat = "" if celsius is None else f", at {celsius:.0f} °C"
            text = (
                f"{_name(gpu, devices)} runs {lag:.0%} behind the others: its clock is "
                f"{gpu['sm_clock_mhz']:,.0f} MHz, theirs {others:,.0f}{heat}; check its cooling "
                "and its power limit"
            )
            yield lag, text
    for gpu, others in _each_and_median(devices, "utilization"):
        lag = others - gpu["utilization"]
        if lag >= _MIN_LAG:
            text = (
                f"{_name(gpu, devices)} is busy {gpu['utilization']:.0%} of the time, the others "
                f"{others:.0%}; check that all GPUs get equal shares of a batch"
            )
            yield lag, text


def _each_and_median(devices, key):
    """Yields each device that has `key`, with the median of the others."""
    known = [device for device in devices if device.get(key) is not None]
    for number, device in enumerate(known):
        others = [other[key] for n, other in enumerate(known) if n != number]
        if others and (median := statistics.median(others)):
            yield device, median


def _name(gpu, devices):
    index = gpu["device"].split("/")[-1]
    several_hosts = len({device.get("host") for device in devices}) > 1
    return f"GPU {index}" + (f" of {gpu['host']}" if several_hosts else "")


def _idle(timing, devices):
    """Reports GPUs that are idle although input is fast: the host launches work too slowly."""
    known = [d["utilization"] for d in devices if d.get("utilization") is not None]
    if not known or (timing.get("input_share") or 0) >= _MIN_INPUT_SHARE:
        return None
    busy = statistics.mean(known)
    if busy >= _MIN_UTILIZATION:
        return None
    return 1 - busy, (
        f"the GPUs are busy {busy:.0%} of the time, although they do not wait for input; raise the "
        "local batch (--local_batch_size), or run several steps per call "
        "(--steps_per_execution=auto)"
    )
