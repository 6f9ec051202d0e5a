"""Resources of a server and its workers: memory, and file descriptors of connections."""

import contextlib
import ctypes
import dataclasses
import logging
import os
import pathlib
import resource
import threading
import time
from collections.abc import Callable, Iterable

import psutil

from kdist.serving.core.errors import RequestError
from kdist.serving.core.settings import ServerLimits

_logger = logging.getLogger(__name__)
# Default ceiling, so that requests are rejected before the kernel kills processes.
_DEFAULT_FRACTION = 0.9
_CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_SAMPLE_SECONDS = 0.1
# A body, its arrays, their batch, TensorFlow's tensors, and the outputs.
_BODY_COPIES = 6
_TRIM_SECONDS = 1.0
_RETRY_SECONDS = 1.0
# For models, workers, and the files and sockets that the libraries open later.
_RESERVE, _RESERVE_PER_WORKER = 64, 8
_MIN_CONNECTIONS = 8


def default_memory_bytes(root: str = "/") -> int:
    """Returns nine tenths of the memory of the control group, or of the machine if it has less.

    A container sees its own control group at the path that is read here.
    """
    sizes = [psutil.virtual_memory().total]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            sizes.append(int(pathlib.Path(root, path).read_text()))
    return int(min(sizes) * _DEFAULT_FRACTION)


def used_bytes(pids: Iterable[int]) -> int:
    """Returns the resident memory of processes, without files and libraries that they share."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # a worker that has just ended
            memory = psutil.Process(pid).memory_info()
            total += memory.rss - getattr(memory, "shared", 0)
    return total


class MemoryCeiling:
    """Rejects requests while the processes of a server use more than `max_bytes`; 0 is no limit.

    Bodies in flight count several times in addition, for copies that may not exist yet.

    Args:
        max_bytes: limit.
        read: returns the bytes in use; called at most ten times per second.
    """

    def __init__(self, max_bytes: int, read: Callable[[], int]):
        self._max_bytes, self._read = max_bytes, read
        self._bytes, self._sampled_at, self._trimmed_at = 0, -float("inf"), -float("inf")
        self._is_exceeded = False

    def check(self, body_bytes: int) -> None:
        """Raises RequestError if memory exceeds the limit, or will with `body_bytes` in flight."""
        if not self._max_bytes:
            return
        now = time.monotonic()
        if now - self._sampled_at >= _SAMPLE_SECONDS:
            self._bytes, self._sampled_at = self._read(), now
            self._report(self._bytes > self._max_bytes)
        if self._bytes + _BODY_COPIES * body_bytes > self._max_bytes:
            # Freed memory that the C library keeps must not cause rejections forever.
            if now - self._trimmed_at >= _TRIM_SECONDS:
                self._trimmed_at = now
                threading.Thread(target=return_free_memory, daemon=True).start()
            raise RequestError(
                "out_of_memory",
                f"the server uses {self._bytes:,} bytes of memory for bodies of {body_bytes:,} and "
                f"all else, and its limit (--memory_mb) is {self._max_bytes:,}; try again later",
                _RETRY_SECONDS,
            )

    def _report(self, is_exceeded):
        if is_exceeded and not self._is_exceeded:
            _logger.warning(
                "the server uses %s bytes of memory: requests are rejected until it uses less than "
                "%s (--memory_mb)",
                f"{self._bytes:,}",
                f"{self._max_bytes:,}",
            )
        self._is_exceeded = is_exceeded


def return_free_memory() -> None:
    """Returns freed memory to the operating system, which the C library would keep for later."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def limit_connections(limits: ServerLimits, workers: int = 0) -> ServerLimits:
    """Returns the limits with no more connections than there are file descriptors for.

    The soft limit of the process is raised to its hard limit. REST and gRPC have an equal share, so
    that clients of one cannot take the descriptors of the other.

    Raises:
        OSError: the descriptors are not sufficient for a few connections.
    """
    limit = _raise_limit()
    available = limit - _count_open() - _RESERVE - _RESERVE_PER_WORKER * workers
    connections = min(limits.connections, available // 2)
    if connections < min(_MIN_CONNECTIONS, limits.connections):
        raise OSError(f"{limit} file descriptors are too few: raise `ulimit -n`")
    if connections < limits.connections:
        _logger.warning(
            "the limit of file descriptors (%d) allows %d connections each over REST and gRPC "
            "instead of %d: raise `ulimit -n` for more",
            limit,
            connections,
            limits.connections,
        )
    return dataclasses.replace(limits, connections=connections)


def _raise_limit():
    """Returns the number of descriptors that the process may open, raised as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows less than its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return _finite(hard)
    return _finite(soft)


def _finite(limit):
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def _count_open():
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0
