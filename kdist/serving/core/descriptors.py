"""File descriptors of a server: raises their limit, and divides them among connections."""

import contextlib
import dataclasses
import logging
import os
import resource

from kdist.serving.core.settings import ServerLimits

_logger = logging.getLogger(__name__)
# For models, workers, and the files and sockets that the libraries open later.
_RESERVE, _RESERVE_PER_WORKER = 64, 8
_MIN_CONNECTIONS = 8


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
