"""No process of a job outlives its launcher, even one that is killed with SIGKILL.

    with Watchdog(mark) as watchdog:
        watchdog.guard(pid)   # of each task, which leads a process group of its own

Three things see to it. The kernel kills a task when the launcher ends (`tied`, on Linux). Tasks'
own children it does not know; so there is the watchdog, a process in a session of its own that does
nothing but read a pipe whose other end the launcher alone holds. When the pipe closes without a
word, it kills the tasks' process groups, and then every process whose environment has the job's
mark: children inherit it, those too that went to a session of their own (Linux, by /proc). A
process that both leaves its group and clears its environment escapes.

This file is the watchdog's program as well; it imports nothing of kdist, to start in no time.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection

# Holds the marks of all jobs that a process belongs to, as a task may launch a job itself.
MARKS = "KDIST_JOBS"

_DONE = "done"
_PAUSE_SECONDS, _LONGEST_SECONDS = 0.02, 5.0


class Watchdog:
    """The launcher's end of the pipe; leaving the context ends the watchdog without a kill."""

    def __init__(self, mark: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what is sent to the launcher's group does not reach it
            text=True,
            bufsize=1,
        )

    def guard(self, pid: int):
        """Kills the process group that `pid` leads if the launcher ends without leaving."""
        self._tell(str(pid))

    def _tell(self, line):
        with contextlib.suppress(OSError):  # somebody killed it; the job goes on
            self._process.stdin.write(f"{line}\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._tell(_DONE)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def processes_of(mark: str) -> list[int]:
    """The ids of this user's processes whose environment has the mark; [] where there is no /proc.

    One that has ended and is not yet reaped is none of them.
    """
    name = MARKS.encode() + b"="
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            variables = path.read_bytes().split(b"\0")
            marks = next((v[len(name) :] for v in variables if v.startswith(name)), b"")
            if mark.encode() in marks.split(b","):
                found.append(int(path.parent.name))
    return found


def signal_processes(mark: str, number: int, but_groups: Collection[int] = ()):
    """Sends a signal to each process that has the mark and is in none of these process groups."""
    for pid in processes_of(mark):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getpgid(pid) not in but_groups:
                os.kill(pid, number)


def signal_group(pid: int, number: int):
    """Sends a signal to the process group that `pid` leads, if there still is one."""
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def watch(mark):
    """Waits until the launcher says that it is done, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = []
    for line in sys.stdin:
        if line.strip() == _DONE:
            return
        groups.append(int(line))
    for pid in groups:
        signal_group(pid, signal.SIGKILL)
    deadline = time.monotonic() + _LONGEST_SECONDS
    while processes_of(mark) and time.monotonic() < deadline:
        signal_processes(mark, signal.SIGKILL)  # again: one may just have forked
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    watch(sys.argv[1])
