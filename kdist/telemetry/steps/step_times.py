"""Metrics of training windows: speed, and the share of time that each part of a step takes."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist.telemetry.steps.trace import ProfileSummary
    from kdist.training.groups.clock import Times

PERCENTILES = (50, 90, 99)


class StepTimes:
    """Computes the metrics of `timing` records from the times of the model's clock.

    `global_batch` is in examples per step, `flops_per_example` counts the forward and backward
    pass, and `peak_flops` is the FLOP/s of all devices; each is None where unknown. `devices` are
    those of a split model.
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
        self._total: Times | None = None
        self._profile: ProfileSummary | None = None
        self._own_seconds = 0.0

    def window(
        self,
        times: "Times",
        profile: "ProfileSummary | None" = None,
        own_seconds: float = 0.0,
    ) -> dict[str, Any]:
        """Returns the metrics of one window.

        Args:
            times: times of the model's clock in the window.
            profile: a profile taken in the window.
            own_seconds: part of `times.callback_seconds` that telemetry itself took.
        """
        self._total = times if self._total is None else _sum(self._total, times)
        self._profile = profile or self._profile
        self._own_seconds += own_seconds
        return self._metrics(times, profile, own_seconds)

    def total(self) -> dict[str, Any]:
        """Returns the metrics of all windows combined; empty without any."""
        return self._metrics(self._total, self._profile, self._own_seconds) if self._total else {}

    def _metrics(self, times, profile, own_seconds):
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
            **_shares(times, own_seconds, profile, self._devices),
            "model_flops_utilization": self._utilization(rate),
        }

    def _utilization(self, rate):
        """Returns the model FLOPs utilization (Chowdhery et al. 2022, PaLM, appendix B).

        It counts the model's own FLOPs, without recomputation.
        """
        if not (rate and self._flops_per_example and self._peak_flops):
            return None
        return rate * self._flops_per_example / self._peak_flops


def _sum(first, second):
    """Returns the times of two windows combined."""
    waits = [times.input_seconds for times in (first, second) if times.input_seconds is not None]
    return dataclasses.replace(
        first,
        steps=first.steps + second.steps,
        seconds=first.seconds + second.seconds,
        input_seconds=sum(waits) if waits else None,
        callback_seconds=first.callback_seconds + second.callback_seconds,
        step_seconds=collections.Counter(first.step_seconds)
        + collections.Counter(second.step_seconds),
    )


def _percentiles(step_seconds: Mapping[float, int]):
    """Returns the percentiles of the seconds per step."""
    total = sum(step_seconds.values())
    percentiles: dict[str, float] = {}
    done = 0
    for seconds, steps in sorted(step_seconds.items()):
        done += steps
        for percent in PERCENTILES:
            if done * 100 >= total * percent:
                percentiles.setdefault(f"step_seconds_p{percent}", seconds)
    return percentiles


def _shares(times, own_seconds, profile, devices):
    all_callbacks = min(times.callback_seconds / times.seconds, 1.0)
    telemetry = min(own_seconds / times.seconds, all_callbacks)
    waiting = times.input_seconds
    share = None if waiting is None else min(waiting / times.seconds, 1.0 - all_callbacks)
    steps = 1.0 - all_callbacks - (share or 0.0)
    shares = {
        "input_share": share,
        "callback_share": all_callbacks - telemetry,
        "telemetry_share": telemetry,
        "step_share": steps,
    }
    if profile is None or not profile.compute_seconds + profile.reduce_seconds:
        return shares
    # Profiled steps are slower; only the ratio of their parts is used.
    reduction = profile.reduce_seconds / (profile.compute_seconds + profile.reduce_seconds)
    busy = {"replica_busy_seconds": list(profile.busy_seconds)}
    return {
        **shares,
        "compute_share": steps * (1 - reduction),
        "reduce_share": steps * reduction,
        **(_busy_shares(profile, devices) if devices else busy),
    }


def _busy_shares(profile, devices):
    """Returns each device's share of the time in which any device of a split model computes.

    The mean idle share is the bubble: devices that wait for others.
    """
    # Profiles use this host's names of its GPUs.
    here = [device.rpartition("/")[2] for device in devices]
    names = (device.rpartition("/")[2] for device in profile.devices)
    busy = dict(zip(names, profile.busy_seconds, strict=True))
    if not (busy.keys() & set(here) and profile.compute_seconds):
        return {}  # the devices of operations are unknown
    shares = [busy.get(device, 0.0) / profile.compute_seconds for device in here]
    return {"device_busy_share": shares, "bubble_share": 1 - sum(shares) / len(shares)}
