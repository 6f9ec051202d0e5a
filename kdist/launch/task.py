"""One process of a job, and its output on the launcher's screen."""

import collections
import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from kdist.cluster import Cluster, heartbeat
from kdist.cluster.heartbeat import Beat
from kdist.launch.supervision import SupervisedTask
from kdist.launch.watchdog import signal_group, tied_command

PREFIX = "kdist launch: "  # of the launcher's own messages
_NUM_LAST_LINES = 15
_READ_BYTES = 1 << 16
_PROGRESS_INTERVAL_SECONDS = 5.0
# Longer output without a line break is shown in pieces.
_MAX_LINE_BYTES = 1 << 16
# Cyan, yellow, green, magenta, blue, red, in the order of the tasks.
_COLORS = (36, 33, 32, 35, 34, 31)


class LineSplitter:
    """Splits the bytes that a task writes into whole lines of text.

    A line that overwrites itself is shown every `progress_seconds`.
    """

    def __init__(self, progress_seconds: float = _PROGRESS_INTERVAL_SECONDS):
        self._progress_seconds = progress_seconds
        self._shown_at = -progress_seconds
        self._rest = b""  # of the current line, after its last carriage return
        self._state = b""  # of the current line, before that
        self._state_is_shown = False

    def feed(self, data: bytes, now: float) -> list[str]:
        """Returns the lines to show, without line breaks; invalid UTF-8 becomes �.

        The data may be cut anywhere; `now` is in seconds of a monotonic clock.
        """
        *ended, self._rest = (self._rest + data).split(b"\n")
        shown = []
        for line in ended:
            shown += self._end(line)
        shown += self._progress(now)
        if len(self._rest) > _MAX_LINE_BYTES:
            shown += self._end(self._rest)
            self._rest = b""
        return shown

    def close(self) -> list[str]:
        """Returns the remaining lines at the end of output: a line without a line break."""
        rest, self._rest = self._rest, b""
        return self._end(rest) if rest or self._state else []

    def _end(self, line):
        """Returns the final state of a line, or [] if it has been shown."""
        overwritten, state = b"\r" in line or bool(self._state), _last_state(line)
        state_before, was_shown = self._state, self._state_is_shown
        self._state, self._state_is_shown = b"", False
        if not overwritten or state:
            return [_text(state or line)]
        return [_text(state_before)] if state_before and not was_shown else []

    def _progress(self, now):
        states, _, rest = self._rest.rpartition(b"\r")
        if state := _last_state(states):
            self._state, self._state_is_shown = state, False
        self._rest = rest
        if not self._state or self._state_is_shown or now < self._shown_at + self._progress_seconds:
            return []
        self._shown_at, self._state_is_shown = now, True
        return [_text(self._state)]


class Screen:
    """Output of the launcher; each call writes one whole line.

    The tasks' lines go to `out`, standard output by default, unless they are hidden. Prefixes have
    colors if it is a terminal and NO_COLOR is not set. The launcher's own messages go to `errors`,
    standard error by default.
    """

    def __init__(
        self, out: TextIO | None = None, errors: TextIO | None = None, shows_tasks: bool = True
    ):
        self._out, self._errors, self._shows_tasks = out, errors, shows_tasks
        self._is_closed = False
        self._colors: dict[str, int] = {}

    def show(self, name: str, line: str):
        """Writes a line of the task with this name."""
        if not self._shows_tasks:
            return
        out = self._out or sys.stdout
        self._write(out, f"{self._prefix(out, name)} {line}\n")

    def announce(self, message: str):
        """Writes a message of the launcher."""
        self._write(self._errors or sys.stderr, f"{PREFIX}{message}\n")

    def _prefix(self, out, name):
        color = self._colors.setdefault(name, _COLORS[len(self._colors) % len(_COLORS)])
        if out.isatty() and not os.environ.get("NO_COLOR"):
            return f"\x1b[{color}m[{name}]\x1b[0m"
        return f"[{name}]"

    def _write(self, stream, text):
        """Writes text, replacing characters that the stream cannot encode; never fails."""
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(text.encode(encoding, "replace").decode(encoding, "replace"))
            stream.flush()
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error):
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"{PREFIX}the output has no reader any more ({error.strerror}); the job "
                "continues, and its log files are complete\n"
            )
            sys.stderr.flush()


def _last_state(line):
    """Returns the last part of a line that is not blank: what a terminal shows in the end."""
    parts = [part.replace(b"\b", b"") for part in line.split(b"\r")]
    return next((part for part in reversed(parts) if part.strip()), b"")


def _text(line):
    return line.decode("utf-8", "replace").rstrip()


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
