"""Thread that samples this task's devices every few seconds, and samplers of the host.

    host, process = HostSampler(), ProcessSampler("worker-0")
    time.sleep(1)
    host.sample()       # [{"device": "cpu/0", "utilization": 0.7}, …, {"device": "disk", …}, …]
    process.sample()    # [{"device": "process/worker-0", "utilization": 1.4, …}]

Shares and rates of the host are means since the last sample, or since the sampler was created.
"""

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import psutil

from kdist.telemetry.devices.nvml import NvmlSampler

# Fraction of one core; the interval grows until sampling takes less.
_MAX_OVERHEAD_SHARE = 0.01
# The first sample is early, so that a short training has one.
_SECONDS_TO_FIRST = 1.0
# Calls of a driver cannot be interrupted; a thread that hangs in one is abandoned.
_SECONDS_TO_STOP = 2.0

_logger = logging.getLogger(__name__)

# Errors in containers, where files are missing or unreadable, and psutil's errors for counters that
# do not exist.
_UNAVAILABLE = (OSError, RuntimeError, NotImplementedError, AttributeError, psutil.Error)
_LOOPBACK = {"lo", "lo0", "Loopback Pseudo-Interface 1"}


class Sampler(Protocol):
    """One kind of devices; created, called, and closed in the sampling thread."""

    def sample(self) -> Iterable[dict[str, Any]]:
        """Yields records with `device` and its measurements."""

    def close(self):
        """Frees resources at the end."""


class DeviceSampler:
    """Samples the GPUs that this process may use, the process, and the host, in a thread.

    An exception of a sampler or of `write` is logged once, and the others continue.

    Args:
        write: receives each record, in the sampling thread: `time` (Unix seconds), `seconds` (since
            `began`), `host`, `device`, and measurements.
        every_seconds: interval between samples; the first is taken after one second. If sampling
            takes more than 1 % of a core, the interval grows. Defaults to 5.
        task: name of the process, such as "worker-0". Defaults to "chief-0".
        node: number of this host in the job; None on one host. Defaults to None.
        samples_host: whether to sample cores, disks, and network; one task per host does.
            Defaults to True.
        began: when training began, in Unix seconds; by default when `start` is called.
        ahead_seconds: how far this host's clock is ahead of the clock of `began`. Defaults to 0.
        samplers: functions that create samplers, instead of those of GPUs, process, and host.

    Raises:
        ValueError: `every_seconds` is not positive.

    Example:

        sampler = DeviceSampler(writer.write_device, every_seconds=5, task="worker-0")
        sampler.start()
        ...
        sampler.stop()
        sampler.overhead_share  # 0.0004: CPU seconds of sampling per second
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        every_seconds: float = 5.0,
        task: str = "chief-0",
        *,
        node: int | None = None,
        samples_host: bool = True,
        began: float | None = None,
        ahead_seconds: float = 0.0,
        samplers: Sequence[Callable[[], Sampler]] | None = None,
    ):
        if every_seconds <= 0:
            raise ValueError(f"every_seconds={every_seconds} must be positive")
        self._write = write
        self._every_seconds = every_seconds
        self._began, self._ahead_seconds = began, ahead_seconds
        if samplers is None:
            host = [HostSampler] if samples_host else []
            samplers = [NvmlSampler, lambda: ProcessSampler(task), *host]
        self._samplers = samplers
        self._place: dict[str, str | int] = {"host": socket.gethostname()}
        if node is not None:
            self._place["node"] = node
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._reported: set[str] = set()
        self._cpu_seconds = self._seconds = 0.0

    @property
    def overhead_share(self) -> float | None:
        """CPU seconds of the sampling thread per second; None before the first sample.

        It includes the start of the thread, so that it decreases with time.
        """
        return self._cpu_seconds / self._seconds if self._seconds else None

    def start(self):
        """Starts sampling; does nothing if it is running."""
        if self._thread is not None:
            return
        began = time.time() - self._ahead_seconds if self._began is None else self._began
        self._stopped = threading.Event()
        # Each thread has its own event, so that an abandoned thread does not continue.
        self._thread = threading.Thread(
            target=self._run, args=(self._stopped, began), name="kdist-devices", daemon=True
        )
        self._thread.start()

    def stop(self):
        """Stops sampling; waits up to 2 s for a running sample. Does nothing if it is stopped."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_SECONDS_TO_STOP)

    # The methods below run in the thread.

    def _run(self, stopped, began):
        began_here, cpu_before = time.monotonic(), time.thread_time()
        with contextlib.ExitStack() as stack:
            created = [self._guarded(create, "a sampler") for create in self._samplers]
            samplers = [sampler for sampler in created if sampler is not None]
            for sampler in samplers:
                stack.callback(self._guarded, sampler.close, type(sampler).__name__)
            wait = min(_SECONDS_TO_FIRST, self._every_seconds)
            while not stopped.wait(wait):
                sample_began, sample_cpu = time.monotonic(), time.thread_time()
                self._sample_all(samplers, began, stopped)
                cost = time.thread_time() - sample_cpu
                interval = max(self._every_seconds, cost / _MAX_OVERHEAD_SHARE)
                wait = max(sample_began + interval - time.monotonic(), 0.0)
                self._account(began_here, cpu_before)
                began_here, cpu_before = time.monotonic(), time.thread_time()
            if not self._seconds:  # a run that is shorter than the first interval has one sample
                self._sample_all(samplers, began, threading.Event())
        self._account(began_here, cpu_before)

    def _account(self, began, cpu_before):
        self._seconds += time.monotonic() - began
        self._cpu_seconds += time.thread_time() - cpu_before

    def _sample_all(self, samplers, began, stopped):
        for sampler in samplers:
            self._sample(sampler, began, stopped)

    def _sample(self, sampler, began, stopped):
        def sample():
            for record in sampler.sample():
                if stopped.is_set():
                    return
                now = time.time() - self._ahead_seconds
                record = {"time": now, "seconds": now - began, **self._place, **record}
                self._guarded(functools.partial(self._write, record), "writing")

        self._guarded(sample, type(sampler).__name__)

    def _guarded(self, function, name):
        """Returns the result of `function`; None if it raises, which is logged once per name."""
        try:
            return function()
        except Exception as error:  # training continues without these measurements
            if name not in self._reported:
                self._reported.add(name)
                _logger.warning(
                    "devices: %s failed: %s: %s; the others continue",
                    name,
                    type(error).__name__,
                    error,
                )
            return None


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
