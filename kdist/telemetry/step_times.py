"""Windows of training, in figures: how fast it went, and where the time went.

times = StepTimes(global_batch=128, replicas=2)
figures = times.window(model.clock.take())    # of one window
times.together()                              # of all windows
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.telemetry.trace import Work
from kdist.training.clock import Times

PERCENTILES = (50, 90, 99)


class StepTimes:
    """Turns what the model's clock saw into the figures of a `timing` record.

    Args:
        global_batch: examples behind a step; None where that is not known.
        replicas: how many share a step.
        flops_per_example: of forward and backward pass; None where that is not known.
        peak_flops: what all devices together could do in a second; None where not known.
        devices: of a split model, those that its layers are on.
    """

    def __init__(
        self,
        global_batch: int | None,
        replicas: int,
        flops_per_example: float | None = None,
        peak_flops: float | None = None,
        devices: Sequence[str] = (),
    ):
        self._global_batch, self._replicas = global_batch, replicas
        self._flops_per_example, self._peak_flops = flops_per_example, peak_flops
        self._devices = devices
        self._steps, self._seconds, self._callback_seconds = 0, 0.0, 0.0
        self._input_seconds: float | None = None
        self._step_seconds: collections.Counter[float] = collections.Counter()
        self._work: Work | None = None

    def window(self, times: Times, work: Work | None = None) -> dict[str, Any]:
        """The figures of one window, with what a profile taken in it has shown."""
        self._steps += times.steps
        self._seconds += times.seconds
        self._callback_seconds += times.callback_seconds
        if times.input_seconds is not None:
            self._input_seconds = (self._input_seconds or 0.0) + times.input_seconds
        self._step_seconds.update(times.step_seconds)
        self._work = work or self._work
        return self._figures(times, work)

    def together(self) -> dict[str, Any]:
        """The figures of all windows together; empty if there was none."""
        together = Times(
            self._steps,
            self._seconds,
            self._input_seconds,
            self._callback_seconds,
            self._step_seconds,
        )
        return self._figures(together, self._work)

    def _figures(self, times, work):
        if not (times.steps and times.seconds):
            return {}
        step_seconds = times.seconds / times.steps
        rate = self._global_batch / step_seconds if self._global_batch else None
        return {
            "window_seconds": times.seconds,
            "window_steps": times.steps,
            **_percentiles(times.step_seconds),
            "examples_per_second": rate,
            "examples_per_second_per_replica": rate / self._replicas if rate else None,
            **_shares(times, work, self._devices),
            "model_flops_utilization": self._utilization(rate),
        }

    def _utilization(self, rate):
        """After Chowdhery et al. 2022 (PaLM), appendix B: the model's own FLOPs, none redone."""
        if not (rate and self._flops_per_example and self._peak_flops):
            return None
        return rate * self._flops_per_example / self._peak_flops


def _percentiles(step_seconds: Mapping[float, int]):
    """Seconds a step that so many per cent of the steps did not exceed."""
    total = sum(step_seconds.values())
    found: dict[str, float] = {}
    done = 0
    for seconds, steps in sorted(step_seconds.items()):
        done += steps
        for percent in PERCENTILES:
            if done * 100 >= total * percent:
                found.setdefault(f"step_seconds_p{percent}", seconds)
    return found


def _shares(times, work, devices):
    callbacks = min(times.callback_seconds / times.seconds, 1.0)
    waiting = times.input_seconds
    share = None if waiting is None else min(waiting / times.seconds, 1.0 - callbacks)
    steps = 1.0 - callbacks - (share or 0.0)
    shares = {"input_share": share, "callback_share": callbacks, "step_share": steps}
    if work is None or not work.compute_seconds + work.reduce_seconds:
        return shares
    # What a profile shows slows a step down; how its parts compare is what it is asked for.
    reducing = work.reduce_seconds / (work.compute_seconds + work.reduce_seconds)
    return {
        **shares,
        "compute_share": steps * (1 - reducing),
        "reduce_share": steps * reducing,
        **(_busy_shares(work, devices) if devices else _of_replicas(work)),
    }


def _of_replicas(work):
    return {"replica_busy_seconds": list(work.busy_seconds)}


def _busy_shares(work, devices):
    """Of the time in which any device of a split model computed, the share in which each did.

    What is missing to 1, on average, is the bubble: devices that wait for others.
    """
    # Profiles call GPUs by the names that this host has for them.
    here = [device.rpartition("/")[2] for device in devices]
    names = (device.rpartition("/")[2] for device in work.devices)
    busy = dict(zip(names, work.busy_seconds, strict=True))
    if not (busy.keys() & set(here) and work.compute_seconds):
        return {}  # where operations are was not known
    shares = [busy.get(device, 0.0) / work.compute_seconds for device in here]
    return {"device_busy_share": shares, "bubble_share": 1 - sum(shares) / len(shares)}
