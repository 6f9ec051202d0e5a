"""Ties the processes of a job to their launcher: none outlives it, even after SIGKILL.

    with Watchdog(mark) as watchdog:
        watchdog.guard(pid)   # of each task, which leads its own process group

Three mechanisms work together:

- On Linux, the kernel kills a task when its launcher ends. This file, run as `exec`, requests that
  and then executes the task's command.
- The watchdog, this file run as `watch`, covers the tasks' own children. It reads a pipe whose
  other end only the launcher holds. If the pipe closes without a final message, it kills the
  process groups of all tasks.
- The watchdog then kills every process whose environment has the job's mark (Linux, from /proc).
  Children inherit the mark even in a session of their own.

Only a process that leaves its group and also clears its environment escapes. This file imports
nothing of kdist, so that it starts quickly.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

# Environment variable with the marks of all jobs of a process; a task may itself launch a job.
MARKS_VARIABLE = "KDIST_JOBS"

_DONE = "done"
_KILL_INTERVAL_SECONDS, _MAX_KILL_SECONDS = 0.02, 5.0
_PR_SET_PDEATHSIG = 1  # Linux, linux/prctl.h


class Watchdog:
    """The launcher's side of the watchdog; leaving the context ends it without killing anything.

    `mark` is the mark of the job in the environment of its tasks.
    """

    def __init__(self, mark: str):
        self._process = subprocess.Popen(
            [*_program("watch"), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the launcher's group do not reach it
            text=True,
            bufsize=1,
        )

    def guard(self, pid: int):
        """Registers the process group that `pid` leads, to be killed if the launcher dies."""
        self._send(str(pid))

    def _send(self, line):
        with contextlib.suppress(OSError):  # the watchdog was killed; the job continues
            self._process.stdin.write(f"{line}\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._send(_DONE)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def tied_command(command: Sequence[str]) -> list[str]:
    """Returns a command that executes `command` and dies with this process (on Linux)."""
    return [*_program("exec"), str(os.getpid()), *command]


def end_with_parent():
    """Requests that the kernel kills this process when its parent ends (on Linux).

    The request outlives `exec`. It is for the end of the thread that started the process.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def with_mark(environment: Mapping[str, str], mark: str) -> str:
    """Returns the value of `MARKS_VARIABLE` for a job that a process of other jobs launches."""
    return ",".join(filter(None, [environment.get(MARKS_VARIABLE), mark]))


def processes_of(mark: str) -> list[int]:
    """Returns the process ids of a job, which share an environment variable; [] without /proc."""
    name = MARKS_VARIABLE.encode() + b"="
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or it has just ended
            variables = path.read_bytes().split(b"\0")
            marks = next((v[len(name) :] for v in variables if v.startswith(name)), b"")
            if mark.encode() in marks.split(b","):
                found.append(int(path.parent.name))
    return found


def signal_processes(mark: str, number: int, except_groups: Collection[int] = ()):
    """Sends a signal to each process with the mark, except those in some process groups."""
    for pid in processes_of(mark):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getpgid(pid) not in except_groups:
                os.kill(pid, number)


def signal_group(pid: int, number: int):
    """Sends a signal to the process group that `pid` leads, if it exists."""
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def _program(name):
    # Without the user's site packages, which would only slow the start.
    return [sys.executable, "-I", "-S", __file__, name]


# Programs.


def watch(mark):
    """Waits for the launcher's final message; kills all processes of the job if it never comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = []
    for line in sys.stdin:
        if line.strip() == _DONE:
            return
        groups.append(int(line))
    for pid in groups:
        signal_group(pid, signal.SIGKILL)
    deadline = time.monotonic() + _MAX_KILL_SECONDS
    while processes_of(mark) and time.monotonic() < deadline:
        signal_processes(mark, signal.SIGKILL)  # repeated, because a process may just have forked
        time.sleep(_KILL_INTERVAL_SECONDS)


def exec_tied(parent, *command):
    """Replaces this process by a command that the kernel kills when `parent` ends.

    It is a program of its own because a multi-threaded process, such as a notebook's, can do almost
    nothing safely between fork and exec.
    """
    # Restore signals that Python or the launcher's shell ignores.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    if os.getppid() != int(parent):  # it ended before the request
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(126)


if __name__ == "__main__":
    {"watch": watch, "exec": exec_tied}[sys.argv[1]](*sys.argv[2:])
