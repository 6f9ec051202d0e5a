"""One process of a job.

task = Task(cluster, ["python", "train.py"], environment, pathlib.Path("logs/worker-1.log"))
task.start()
"""

import collections
import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from kdist import heartbeat
from kdist.cluster import Cluster
from kdist.heartbeat import Beat
from kdist.launch import tied
from kdist.launch.orphans import signal_group
from kdist.launch.output import Lines

_LAST_LINES = 15
_READ_BYTES = 1 << 16


class Task:
    """A command that runs as a task; it leads a session, and so a process group, of its own.

    Args:
        cluster: the job, as this task sees it.
        command: to be found by the environment's PATH.
        environment: all of it.
        log: the file that gets what the task writes, byte by byte; after what it holds already.

    Attributes:
        returncode: as `subprocess` has it; None until the task has ended.
        last_lines: what it wrote last, as text.
        beat: what it said last that it does; None before it has said anything.
        beat_at: when it did, by `time.monotonic`.
        hung: why it was ended, if it hung.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
    ):
        self.cluster, self.log = cluster, log
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.returncode: int | None = None
        self._command, self._environment = list(command), dict(environment)
        self.beat: Beat | None = None
        self.beat_at = 0.0
        self.hung = ""
        self._beats: int | None = None
        self._lines = Lines()
        self._file = None
        self._started = self._ended = 0.0

    def start(self):
        """Starts the process, also again; the thread that does has to stay until it has ended."""
        self.returncode, self.beat, self.hung = None, None, ""
        self._lines, self._ended = Lines(), 0.0
        self._file = open(self.log, "ab", buffering=0)  # noqa: SIM115 (until the end of output)
        self._started = time.monotonic()
        self._beats, told = os.pipe()
        os.set_blocking(self._beats, False)
        self._process = subprocess.Popen(
            # Without the user's site packages: it only starts the command.
            [sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), *self._command],
            env={**self._environment, heartbeat.PIPE: heartbeat.pipe_name(told)},
            pass_fds=[told],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        os.close(told)
        os.set_blocking(self.output, False)

    @property
    def name(self) -> str:
        """Such as "worker 1"."""
        return self.cluster.name

    @property
    def pid(self) -> int:
        """The process's id, and its group's."""
        return self._process.pid

    @property
    def output(self) -> int:
        """The descriptor that what it writes can be read from."""
        return self._process.stdout.fileno()

    @property
    def only_serves(self) -> bool:
        """It waits for what the coordinator asks of it, and need not end by itself."""
        return "ps" in self.cluster.tasks and self.cluster.role in ("ps", "worker")

    @property
    def trains(self) -> bool:
        """It makes steps that others wait for."""
        return self.cluster.role in ("chief", "worker") and not self.only_serves

    @property
    def exit_code(self) -> int:
        """As a shell says it: 128 + n if signal n ended the task."""
        code = self.returncode or 0
        return code if code >= 0 else 128 - code

    @property
    def seconds(self) -> float:
        """How long it has run, until its end."""
        return (self._ended or time.monotonic()) - self._started

    def has_ended(self) -> bool:
        """Looks whether the process has; without waiting."""
        if self.returncode is None:
            self.returncode = self._process.poll()
            if self.returncode is not None:
                self._ended = time.monotonic()
        return self.returncode is not None

    def signal(self, number: int):
        """Sends a signal to the task and its children, if it has not ended."""
        # Afterwards the number may be another process's.
        if not self.has_ended():
            signal_group(self.pid, number)

    def read(self) -> tuple[list[str], bool]:
        """What it has written since, as lines to show, and whether more may come."""
        shown, more = [], True
        while more:
            try:
                data = os.read(self.output, _READ_BYTES)
            except BlockingIOError:
                break
            shown += self._keep(data)
            more = bool(data)
            shown += self._lines.feed(data, time.monotonic()) if data else self._lines.close()
            if len(data) == _READ_BYTES:
                break  # the others have their turn
        self.last_lines.extend(shown)
        return shown, more

    def listen(self):
        """Takes the last of the beats that have come."""
        if self._beats is None:
            return
        try:
            *_, line, _ = os.read(self._beats, _READ_BYTES).rsplit(b"\n", 2)
        except (BlockingIOError, ValueError):  # none, or nobody is left who writes
            return
        if beat := Beat.of_line(line):
            self.beat, self.beat_at = beat, time.monotonic()

    def close_output(self):
        """Reads no more of what it writes; it may go on."""
        with contextlib.suppress(OSError):
            self._process.stdout.close()
        if self._file:
            self._file.close()

    def close(self):
        """Reads and hears no more."""
        self.close_output()
        if self._beats is not None:
            os.close(self._beats)
            self._beats = None

    def _keep(self, data):
        """Writes to the log; what there is to say about it."""
        try:
            if self._file:
                self._file.write(data)
        except OSError as error:  # a full disk, say: the job goes on
            self._file.close()
            self._file = None
            return [f"(kdist: no more of this in {self.log}: {error.strerror})"]
        return []
