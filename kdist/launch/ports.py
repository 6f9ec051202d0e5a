"""Ports of this machine that nobody else takes before a task listens on them.

    with reserved(3) as ports:
        ...  # start three tasks and tell them

They lie below those that Linux gives to outgoing connections, and a lock on a file keeps other
launchers of kdist off them until the context ends, by whatever way.
"""

import contextlib
import fcntl
import os
import pathlib
import random
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence

_FIRST, _LAST = 12000, 19999


@contextlib.contextmanager
def reserved(number: int) -> Iterator[list[int]]:
    """`number` free ports, which no other `reserved` of this machine's user gives meanwhile.

    Raises:
        OSError: there are not so many.
    """
    candidates = list(range(_FIRST, _LAST + 1))
    random.SystemRandom().shuffle(candidates)  # not the seed that the user has set
    with contextlib.ExitStack() as locks:
        ports: list[int] = []
        for port in candidates:
            if len(ports) == number:
                break
            if _is_free(port) and _lock(port, locks):
                ports.append(port)
        if len(ports) < number:
            raise OSError(f"{number} free ports between {_FIRST} and {_LAST}: only {len(ports)}")
        yield ports


def addresses(counts: Mapping[str, int], ports: Sequence[int]) -> dict[str, list[str]]:
    """Role -> addresses on loopback, of as many tasks as `counts` says; the ports are dealt out."""
    left = iter(ports)
    return {role: [f"127.0.0.1:{next(left)}" for _ in range(n)] for role, n in counts.items()}


def _is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _lock(port, locks):
    directory = pathlib.Path(tempfile.gettempdir()) / f"kdist-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    file = open(directory / str(port), "w")  # noqa: SIM115 (it is the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    locks.enter_context(file)
    return True
