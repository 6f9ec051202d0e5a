"""Thread that samples this task's devices every few seconds."""

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kdist.telemetry.devices.host import HostSampler, ProcessSampler
from kdist.telemetry.devices.nvml import NvmlSampler

# Fraction of one core; the interval grows until sampling takes less.
_MAX_OVERHEAD_SHARE = 0.01
# The first sample is early, so that a short training has one.
_SECONDS_TO_FIRST = 1.0
# Calls of a driver cannot be interrupted; a thread that hangs in one is abandoned.
_SECONDS_TO_STOP = 2.0

_logger = logging.getLogger(__name__)


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
                for sampler in samplers:
                    self._sample(sampler, began, stopped)
                cost = time.thread_time() - sample_cpu
                interval = max(self._every_seconds, cost / _MAX_OVERHEAD_SHARE)
                wait = max(sample_began + interval - time.monotonic(), 0.0)
                self._account(began_here, cpu_before)
                began_here, cpu_before = time.monotonic(), time.thread_time()
        self._account(began_here, cpu_before)

    def _account(self, began, cpu_before):
        self._seconds += time.monotonic() - began
        self._cpu_seconds += time.thread_time() - cpu_before

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
