"""Measurements of the host and of this process, from the operating system.

    host, process = HostSampler(), ProcessSampler("worker-0")
    time.sleep(1)
    host.sample()       # [{"device": "cpu/0", "utilization": 0.7}, …, {"device": "disk", …}, …]
    process.sample()    # [{"device": "process/worker-0", "utilization": 1.4, …}]

Shares and rates are means since the last sample, or since the sampler was created.
"""

import contextlib
import time
from typing import Any

import psutil

# Errors in containers, where files are missing or unreadable, and psutil's errors for counters that
# do not exist.
_UNAVAILABLE = (OSError, RuntimeError, NotImplementedError, AttributeError, psutil.Error)
_LOOPBACK = {"lo", "lo0", "Loopback Pseudo-Interface 1"}


class HostSampler:
    """Samples the host's cores, disks, and network; omits what the host does not count."""

    def __init__(self):
        self._cores = _cores()
        self._rates = {"disk": _Rates(_disk_bytes), "network": _Rates(_network_bytes)}

    def sample(self) -> list[dict[str, Any]]:
        """Returns one record per core, one for all disks, and one for all network interfaces.

        Their `device` is "cpu/<core>" with `utilization` (0 to 1: the share of time in which it was
        neither idle nor waiting for a disk), "disk" with `read_bytes_per_second` and
        `written_bytes_per_second`, or "network" with `sent_bytes_per_second` and
        `received_bytes_per_second` (without the loopback interface).
        """
        records = self._utilizations()
        for device, rates in self._rates.items():
            values = rates.since_last()
            if values:
                records.append({"device": device, **values})
        return records

    def close(self):
        """Does nothing, as the sampler holds no resources."""

    def _utilizations(self):
        before, self._cores = self._cores, _cores()
        if len(before) != len(self._cores):  # a core was switched on or off
            return []
        records = []
        for core, (old, new) in enumerate(zip(before, self._cores, strict=True)):
            busy, total = new[0] - old[0], new[1] - old[1]
            if total > 0:  # else the clock has not moved
                utilization = min(max(busy / total, 0.0), 1.0)
                records.append({"device": f"cpu/{core}", "utilization": utilization})
        return records


class ProcessSampler:
    """Samples this process, as "process/<task>"."""

    def __init__(self, task: str):
        self._device = f"process/{task}"
        self._process = psutil.Process()
        self._seconds = _Rates(self._cpu_seconds)

    def sample(self) -> list[dict[str, Any]]:
        """Returns a record of `utilization` (cores in use), `memory_used_bytes`, and `threads`."""
        record = {"device": self._device, **self._seconds.since_last()}
        with contextlib.suppress(*_UNAVAILABLE):
            record["memory_used_bytes"] = self._process.memory_info().rss
        with contextlib.suppress(*_UNAVAILABLE):
            record["threads"] = self._process.num_threads()
        return [record]

    def close(self):
        """Does nothing, as the sampler holds no resources."""

    def _cpu_seconds(self):
        times = self._process.cpu_times()
        return {"utilization": times.user + times.system}


class _Rates:
    """Growth rates of the counters (name -> value) that `read` returns, without missing ones."""

    def __init__(self, read):
        self._read = read
        self._last = self._counters()

    def since_last(self):
        """Returns name -> growth per second, without counters that were reset."""
        (then, before), (now, after) = self._last, self._counters()
        if now <= then:
            return {}
        self._last = now, after
        return {
            name: (value - before[name]) / (now - then)
            for name, value in after.items()
            if name in before and value >= before[name]
        }

    def _counters(self):
        try:
            return time.monotonic(), self._read()
        except _UNAVAILABLE:
            return time.monotonic(), {}


def _cores():
    """Returns (busy seconds, total seconds) of each core."""
    try:
        return [_busy_and_total(times) for times in psutil.cpu_times(percpu=True)]
    except _UNAVAILABLE:
        return []


def _busy_and_total(times):
    # Linux includes the time of guests in that of users.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _disk_bytes():
    counters = psutil.disk_io_counters()
    if counters is None:  # no disk
        return {}
    return {
        "read_bytes_per_second": counters.read_bytes,
        "written_bytes_per_second": counters.write_bytes,
    }


def _network_bytes():
    interfaces = psutil.net_io_counters(pernic=True)
    counted = [counters for name, counters in interfaces.items() if name not in _LOOPBACK]
    if not counted:
        return {}
    return {
        "sent_bytes_per_second": sum(counters.bytes_sent for counters in counted),
        "received_bytes_per_second": sum(counters.bytes_recv for counters in counted),
    }
