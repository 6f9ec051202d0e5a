"""Copy of what this program writes to its standard output and error."""

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_STREAMS = ("stdout", "stderr")
# Lines of a program that never ends one.
_MAX_LINE = 10_000


class ConsoleCopy:
    """Passes the lines of `sys.stdout` and `sys.stderr` to a function, from `start` to `stop`.

    Of a line that a progress bar writes again and again, only the last state is passed. Output that
    does not come from Python, such as that of TensorFlow's own code, is not copied.

    Args:
        receive: function of the stream's name and complete lines. It must not write to a stream.
    """

    def __init__(self, receive: Callable[[str, str], Any]):
        self._receive = receive
        self._originals: dict[str, tuple[Any, Callable]] = {}
        self._open = dict.fromkeys(_STREAMS, "")  # a line without its end
        self._lock = threading.RLock()

    def start(self):
        """Starts copying; does nothing for a stream that cannot be copied."""
        for name in _STREAMS:
            stream = getattr(sys, name)
            with contextlib.suppress(AttributeError, TypeError):
                write = stream.write
                stream.write = self._copying(name, write)
                self._originals[name] = stream, write

    def stop(self):
        """Stops copying, and passes lines that have not ended."""
        for name, (stream, write) in self._originals.items():
            # Another program that has replaced it in the meantime still calls ours.
            if getattr(stream.write, "of", None) is self:
                stream.write = write
            with self._lock:
                rest, self._open[name] = self._open[name], ""
                if rest:
                    self._receive(name, _last_state(rest) + "\n")
        self._originals = {}

    def _copying(self, name, write):
        def copying(text):
            result = write(text)
            if name in self._originals:
                self._copy(name, text)
            return result

        copying.of = self  # type: ignore[attr-defined]
        return copying

    def _copy(self, name, text):
        with self._lock:
            *lines, rest = (self._open[name] + str(text)).split("\n")
            self._open[name] = rest[-_MAX_LINE:]
            if lines:
                self._receive(name, "".join(_last_state(line) + "\n" for line in lines))


def _last_state(line):
    """Returns what remains of a line after carriage returns and backspaces."""
    states = line.replace("\b", "").split("\r")
    return next((state for state in reversed(states) if state), "")
