"""What tasks write becomes lines on the launcher's screen.

    lines = Lines()
    for line in lines.feed(data, time.monotonic()):
        screen.show("worker 1", line)       # [worker 1] epoch 3 …

A progress bar writes itself over and over, after a carriage return; of such a line its last state
is shown, and while it grows, one state every few seconds.
"""

import contextlib
import os
import sys
from typing import TextIO

_PROGRESS_SECONDS = 5.0
# What has no line break for so long is shown in pieces.
_LONGEST_LINE = 1 << 16
# Cyan, yellow, green, magenta, blue, red: by the tasks' order.
_COLOURS = (36, 33, 32, 35, 34, 31)


class Lines:
    """Bytes come in as a task writes them, and go out as whole lines of text.

    Args:
        progress_seconds: a line that overwrites itself is shown so often before it ends.
    """

    def __init__(self, progress_seconds: float = _PROGRESS_SECONDS):
        self._progress_seconds = progress_seconds
        self._shown_at = -progress_seconds
        self._rest = b""  # of a line, after its last carriage return
        self._state = b""  # what it said before that
        self._state_is_shown = False

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines to show, without their ends; bytes that are no UTF-8 become �.

        Args:
            data: the next bytes, cut anywhere.
            now: seconds on any clock that goes on.
        """
        *ended, self._rest = (self._rest + data).split(b"\n")
        shown = []
        for line in ended:
            shown += self._end(line)
        shown += self._progress(now)
        if len(self._rest) > _LONGEST_LINE:
            shown += self._end(self._rest)
            self._rest = b""
        return shown

    def close(self) -> list[str]:
        """What is left to show when nothing more comes: a line without its end."""
        rest, self._rest = self._rest, b""
        return self._end(rest) if rest or self._state else []

    def _end(self, line):
        """The last state of a line that has ended: [] if that is on the screen already."""
        written_over, state = b"\r" in line or bool(self._state), _last_state(line)
        state_before, was_shown = self._state, self._state_is_shown
        self._state, self._state_is_shown = b"", False
        if not written_over or state:
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
    """The launcher's own output; one call writes one whole line.

    Args:
        out: takes the tasks' lines; by default standard output as it is when a line is shown.
            Prefixes are coloured if it is a terminal and NO_COLOR is not set.
        errors: takes what the launcher itself says; by default standard error.
        shows_tasks: whether the tasks' lines are shown at all.
    """

    def __init__(
        self, out: TextIO | None = None, errors: TextIO | None = None, shows_tasks: bool = True
    ):
        self._out, self._errors, self._shows_tasks = out, errors, shows_tasks
        self._is_gone = False
        self._colours: dict[str, int] = {}

    def show(self, name: str, line: str):
        """A line of the task of this name."""
        if not self._shows_tasks:
            return
        out = self._out or sys.stdout
        self._write(out, f"{self._prefix(out, name)} {line}\n")

    def say(self, message: str):
        """What the launcher has to say."""
        self._write(self._errors or sys.stderr, f"launch: {message}\n")

    def _prefix(self, out, name):
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        if out.isatty() and not os.environ.get("NO_COLOR"):
            return f"\x1b[{colour}m[{name}]\x1b[0m"
        return f"[{name}]"

    def _write(self, stream, text):
        """Writes what the stream's encoding can say; a reader that has gone ends no training."""
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(text.encode(encoding, "replace").decode(encoding, "replace"))
            stream.flush()
        except OSError as error:
            self._say_once_that_it_is_gone(error)

    def _say_once_that_it_is_gone(self, error):
        if self._is_gone:
            return
        self._is_gone = True
        with contextlib.suppress(OSError):
            print(
                f"launch: nobody reads the output any more ({error.strerror}); the job goes on, "
                "and its log files hold everything",
                file=sys.stderr,
                flush=True,
            )


def _last_state(line):
    """What a terminal shows of a line in the end: its last part that is not blank."""
    parts = [part.replace(b"\b", b"") for part in line.split(b"\r")]
    return next((part for part in reversed(parts) if part.strip()), b"")


def _text(line):
    return line.decode("utf-8", "replace").rstrip()
