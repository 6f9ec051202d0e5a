"""A thread that looks at this task's devices every few seconds.

sampler = DeviceSampler(writer.write_device, every_seconds=5, task="worker-0")
sampler.start()
...
sampler.stop()
sampler.overhead_share    # 0.0004: CPU seconds that it took, for each second
"""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kdist.telemetry.host import HostSampler, ProcessSampler
from kdist.telemetry.nvml import NvmlSampler

# Of one core; an interval grows until sampling takes no more.
_LARGEST_OVERHEAD_SHARE = 0.01
# The first sample comes sooner, so that a short training has one.
_SECONDS_TO_FIRST = 1.0
# Calls of a driver are not interrupted; a thread that hangs in one is left behind.
_SECONDS_TO_STOP = 2.0


class Sampler(Protocol):
    """One kind of devices; made, called and closed in the sampling thread."""

    def sample(self) -> Iterable[dict[str, Any]]:
        """Records with `device` and what was measured; each may take its time."""

    def close(self):
        """Called at the end."""


class DeviceSampler:
    """Samples the GPUs that this process may use, the process, and the machine.

    Nothing of it runs in the thread that calls `start`. An exception of a sampler or of `write` is
    said once, and the others go on.

    Args:
        write: gets each record, in the sampling thread: `time` (Unix seconds), `seconds` (since
            `began`), `host`, `device`, and what was measured.
        every_seconds: from one sample to the next; the first comes after one second. Where
            sampling takes more than 1 % of a core, the interval grows until it does not.
            Defaults to 5.
        task: what the process is called, such as "worker-0".
        samples_host: whether cores, disks and network are sampled; of several tasks on a machine,
            one does it.
        began: when training began, in Unix seconds; by default when `start` is called.
        ahead_seconds: by how much this machine's clock is ahead of that of `began`.
        samplers: functions that make samplers, in the place of all of the above.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        every_seconds: float = 5.0,
        task: str = "chief-0",
        *,
        samples_host: bool = True,
        began: float | None = None,
        ahead_seconds: float = 0.0,
        samplers: Sequence[Callable[[], Sampler]] | None = None,
    ):
        if every_seconds <= 0:
            raise ValueError(f"every_seconds={every_seconds}; it has to be more than 0")
        self._write = write
        self._every_seconds = every_seconds
        self._began, self._ahead_seconds = began, ahead_seconds
        if samplers is None:
            host = [HostSampler] if samples_host else []
            samplers = [NvmlSampler, lambda: ProcessSampler(task), *host]
        self._samplers = samplers
        self._host = socket.gethostname()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._said: set[str] = set()
        self._cpu_seconds = self._seconds = 0.0

    @property
    def overhead_share(self) -> float | None:
        """CPU seconds of the sampling thread for each second that it ran; None before a sample.

        What it takes to start is in it: it is smaller the longer the thread runs.
        """
        return self._cpu_seconds / self._seconds if self._seconds else None

    def start(self):
        """Begins to sample; does nothing if it samples already."""
        if self._thread is not None:
            return
        began = time.time() - self._ahead_seconds if self._began is None else self._began
        self._stopped = threading.Event()
        # Its own event: a thread that was left behind does not come back to life.
        self._thread = threading.Thread(
            target=self._run, args=(self._stopped, began), name="kdist-devices", daemon=True
        )
        self._thread.start()

    def stop(self):
        """Ends it; waits for a sample under way, up to 2 s. Does nothing if it does not run."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_SECONDS_TO_STOP)

    # In the thread.

    def _run(self, stopped, began):
        began_here, cpu_before = time.monotonic(), time.thread_time()
        with contextlib.ExitStack() as stack:
            samplers = [made for make in self._samplers if (made := self._made(make)) is not None]
            for sampler in samplers:
                stack.callback(self._guarded, sampler.close, type(sampler).__name__)
            wait = min(_SECONDS_TO_FIRST, self._every_seconds)
            while not stopped.wait(wait):
                sample_began, sample_cpu = time.monotonic(), time.thread_time()
                for sampler in samplers:
                    self._sample(sampler, began, stopped)
                cost = time.thread_time() - sample_cpu
                interval = max(self._every_seconds, cost / _LARGEST_OVERHEAD_SHARE)
                wait = max(sample_began + interval - time.monotonic(), 0.0)
                self._account(began_here, cpu_before)
                began_here, cpu_before = time.monotonic(), time.thread_time()
        self._account(began_here, cpu_before)

    def _account(self, began, cpu_before):
        self._seconds += time.monotonic() - began
        self._cpu_seconds += time.thread_time() - cpu_before

    def _made(self, make):
        return self._guarded(make, "a sampler")

    def _sample(self, sampler, began, stopped):
        def sample():
            for record in sampler.sample():
                if stopped.is_set():
                    return
                now = time.time() - self._ahead_seconds
                whole = {"time": now, "seconds": now - began, "host": self._host, **record}
                self._guarded(lambda: self._write(whole), "writing")  # noqa: B023 (called at once)

        self._guarded(sample, type(sampler).__name__)

    def _guarded(self, function, name):
        """What `function` returns; None if it raises, which is said once for each name."""
        try:
            return function()
        except Exception as error:  # training goes on without
            if name not in self._said:
                self._said.add(name)
                print(
                    f"kdist: devices: {name} failed: {type(error).__name__}: {error}; the others "
                    "go on",
                    file=sys.stderr,
                )
            return None
