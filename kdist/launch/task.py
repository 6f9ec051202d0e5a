"""One process of a job."""

import collections
import contextlib
import os
import pathlib
import subprocess
import time
from collections.abc import Mapping, Sequence

from kdist.cluster import Cluster, heartbeat
from kdist.cluster.heartbeat import Beat
from kdist.launch.output import LineSplitter
from kdist.launch.supervision import SupervisedTask
from kdist.launch.watchdog import signal_group, tied_command

_NUM_LAST_LINES = 15
_READ_BYTES = 1 << 16


class Task(SupervisedTask):
    """A command that runs as a task; it leads its own session and process group.

    The command is found on the PATH of the `environment`, which is complete. The output is appended
    to `log`, unchanged. `returncode` is as in `subprocess`, None until the task has ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
    ):
        super().__init__(cluster)
        self.log = log
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._command, self._environment = list(command), dict(environment)
        self.hung = ""  # why the task was considered hung
        self._beats: int | None = None
        self._splitter = LineSplitter()
        self._file = None
        self._started = self._ended = 0.0

    def start(self):
        """Starts or restarts the process; the calling thread must live until it has ended."""
        self.returncode, self.beat, self.hung = None, None, ""
        self._splitter, self._ended = LineSplitter(), 0.0
        self._file = open(self.log, "ab", buffering=0)  # noqa: SIM115 (until the end of output)
        self._started = time.monotonic()
        self._beats, writer = os.pipe()
        os.set_blocking(self._beats, False)
        self._process = subprocess.Popen(
            tied_command(self._command),
            env={**self._environment, heartbeat.PIPE_VARIABLE: heartbeat.pipe_name(writer)},
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        os.close(writer)
        os.set_blocking(self.output, False)

    @property
    def pid(self) -> int | None:
        """The id of the process and of its group; None if it runs on another machine."""
        return self._process.pid

    @property
    def output(self) -> int:
        """The file descriptor from which the task's output is read."""
        return self._process.stdout.fileno()

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + n if signal n ended the task."""
        code = self.returncode or 0
        return code if code >= 0 else 128 - code

    @property
    def seconds(self) -> float:
        """Running time of the task so far."""
        return (self._ended or time.monotonic()) - self._started

    def has_ended(self) -> bool:
        """Returns whether the process has ended, without waiting."""
        if self.returncode is None:
            self.returncode = self._process.poll()
            if self.returncode is not None:
                self._ended = time.monotonic()
        return self.returncode is not None

    def signal(self, number: int):
        """Sends a signal to the task and its children, unless it has ended."""
        # After its end, another process may have the same id.
        if not self.has_ended():
            signal_group(self._process.pid, number)

    def read(self) -> tuple[list[str], bool]:
        """Returns the new lines of output, and whether more may come."""
        shown, more = [], True
        while more:
            try:
                data = os.read(self.output, _READ_BYTES)
            except BlockingIOError:
                break
            shown += self._write_log(data)
            more = bool(data)
            splitter = self._splitter
            shown += splitter.feed(data, time.monotonic()) if data else splitter.close()
            if len(data) == _READ_BYTES:
                break  # gives other tasks their turn
        self.last_lines.extend(shown)
        return shown, more

    def read_heartbeat(self):
        """Updates `beat` from the last complete line in the pipe."""
        if self._beats is None:
            return
        try:
            *_, line, _ = os.read(self._beats, _READ_BYTES).rsplit(b"\n", 2)
        except (BlockingIOError, ValueError):  # no new heartbeat, or no writer left
            return
        if beat := Beat.from_line(line):
            self.note_beat(beat)

    def close_output(self):
        """Stops reading the output; the process may continue."""
        with contextlib.suppress(OSError):
            self._process.stdout.close()
        if self._file:
            self._file.close()

    def close(self):
        """Stops reading the output and the heartbeat."""
        self.close_output()
        if self._beats is not None:
            os.close(self._beats)
            self._beats = None

    def _write_log(self, data):
        """Appends to the log file; returns a message if that fails, for example on a full disk."""
        try:
            if self._file:
                self._file.write(data)
        except OSError as error:  # the job continues
            self._file.close()
            self._file = None
            return [f"(kdist: cannot write the rest of {self.log}: {error.strerror})"]
        return []
