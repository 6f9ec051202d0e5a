"""Output of tasks, shown as whole lines on the launcher's screen.

    splitter = LineSplitter()
    for line in splitter.feed(data, time.monotonic()):
        screen.show("worker 1", line)       # [worker 1] epoch 3 …

A progress bar overwrites itself with carriage returns. Only its last state is shown, and one state
every few seconds while it grows.
"""

import contextlib
import os
import sys
from typing import TextIO

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
        self._write(self._errors or sys.stderr, f"launch: {message}\n")

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
                f"launch: the output has no reader any more ({error.strerror}); the job continues, "
                "and its log files are complete\n"
            )
            sys.stderr.flush()


def _last_state(line):
    """Returns the last part of a line that is not blank: what a terminal shows in the end."""
    parts = [part.replace(b"\b", b"") for part in line.split(b"\r")]
    return next((part for part in reversed(parts) if part.strip()), b"")


def _text(line):
    return line.decode("utf-8", "replace").rstrip()
