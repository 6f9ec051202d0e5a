"""What slows a training down, in words with a number, and what to change.

    verdict({"input_share": 0.86, "examples_per_second": 410.0})
    # ["input-bound: the pipeline gives 410 examples/s, the devices would take 2,929; …"]

Only what is worth a change is said; an empty list means that the steps themselves take the time.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Shares of a step below which nothing is said.
_INPUT = 0.1
_CALLBACKS = 0.1
_REDUCTION = 0.25
_BUBBLE = 0.25
# How far one device may be behind the others, and how idle they may be.
_BEHIND = 0.1
_IDLE = 0.5


def verdict(timing: Mapping[str, Any], devices: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Sentences, the costliest thing first.

    Args:
        timing: what a `timing` line of `metrics.jsonl` holds, of the whole training.
        devices: the mean of what each GPU's samples hold: `host`, `device`, `utilization`,
            `sm_clock_mhz`, as far as they were measured.
    """
    found = [
        _input(timing),
        _reduction(timing),
        _callbacks(timing),
        _bubble(timing),
        _slow_replica(timing.get("replica_busy_seconds") or []),
        *_slow_gpus(devices),
        _idle(timing, devices),
    ]
    return [text for _, text in sorted(filter(None, found), key=lambda f: f[0], reverse=True)]


def _input(timing):
    share, rate = timing.get("input_share"), timing.get("examples_per_second")
    if share is None or share < _INPUT or not rate:
        return None
    return share, (
        f"input-bound: the pipeline gives {rate:,.0f} examples/s, the devices would take "
        f"{rate / max(1 - share, 0.001):,.0f} ({share:.0%} of a step is waiting for input); keep "
        "what is decoded in memory (cache=True), make the operations cheaper, or take more cores; "
        "scripts/check.py --input measures the pipeline alone"
    )


def _reduction(timing):
    return _share(
        timing.get("reduce_share"),
        _REDUCTION,
        "all-reduce is {:.0%} of a step; raise the local batch (--local_batch_size) or the "
        "accumulation (--accumulate), or let replicas take steps alone (--local_steps)",
    )


def _callbacks(timing):
    return _share(
        timing.get("callback_share"),
        _CALLBACKS,
        "callbacks take {:.0%} of a step; take several steps a call "
        "(--steps_per_execution=auto), or callbacks that read logs less often",
    )


def _bubble(timing):
    return _share(
        timing.get("bubble_share"),
        _BUBBLE,
        "the devices of the split model wait {:.0%} of the time for each other; give a pipeline "
        "more micro-batches (--layout=…,micro_batches=8), or balance what each device computes "
        "(scripts/check.py --layout shows what lies where)",
    )


def _share(share, least, text):
    """The share and its sentence, if it is worth one."""
    return None if share is None or share < least else (share, text.format(share))


def _slow_replica(busy):
    """Replicas compute equal shares: who takes longer is slower, and the others wait."""
    if len(busy) < 2:
        return None
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = statistics.median(b for n, b in enumerate(busy) if n != slowest)
    behind = 1 - others / busy[slowest] if busy[slowest] else 0.0
    if behind < _BEHIND:
        return None
    return behind, (
        f"replica {slowest} runs {behind:.0%} behind the others (busy {busy[slowest] * 1000:,.1f} "
        f"ms a step, the others {others * 1000:,.1f} ms), which wait for it; look at what else "
        "runs on its device"
    )


def _slow_gpus(devices):
    """GPUs of one job that run slower than the others: throttled, or shared with somebody."""
    for gpu, others in _one_and_others(devices, "sm_clock_mhz"):
        behind = 1 - gpu["sm_clock_mhz"] / others
        if behind >= _BEHIND:
            heat = gpu.get("temperature_celsius")
            yield (
                behind,
                (
                    f"{_name(gpu, devices)} runs {behind:.0%} behind the others: its clock is "
                    f"{gpu['sm_clock_mhz']:,.0f} MHz, theirs {others:,.0f}"
                    + (f", at {heat:.0f} °C" if heat is not None else "")
                    + "; look at its cooling and its power limit"
                ),
            )
    for gpu, others in _one_and_others(devices, "utilization"):
        behind = others - gpu["utilization"]
        if behind >= _BEHIND:
            yield (
                behind,
                (
                    f"{_name(gpu, devices)} is busy {gpu['utilization']:.0%} of the time, the "
                    f"others {others:.0%}; see that all get equal shares of a batch"
                ),
            )


def _one_and_others(devices, key):
    """(a device, the median of the others) for `key`, of those that measured it."""
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
    """GPUs that wait for nothing that was measured: the host cannot start work fast enough."""
    known = [d["utilization"] for d in devices if d.get("utilization") is not None]
    if not known or (timing.get("input_share") or 0) >= _INPUT:
        return None
    busy = statistics.mean(known)
    if busy >= _IDLE:
        return None
    return 1 - busy, (
        f"the GPUs are busy {busy:.0%} of the time, and input is not what they wait for; raise the "
        "local batch (--local_batch_size), or take several steps a call "
        "(--steps_per_execution=auto)"
    )
