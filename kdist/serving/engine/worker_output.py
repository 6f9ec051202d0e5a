"""Standard error of a worker process: shown as before, and its last lines kept for messages."""

import collections
import contextlib
import os
import sys
import threading

_KEPT_LINES = 5
# Longer lines are passed in pieces.
_MAX_LINE_BYTES = 1 << 12
# Time to read what an ended process wrote; longer only if a child of it has the pipe.
_END_SECONDS = 1.0


class WorkerOutput:
    """Passes lines from a pipe to standard error in a thread, and keeps the last ones.

    `redirect` runs in the worker, with the other end of the pipe. The thread ends when the worker
    does.
    """

    def __init__(self, connection):
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._pass, args=[connection], daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Returns the last lines of a worker that has ended."""
        self.join()
        return list(self._last)

    def join(self):
        """Waits until everything from a worker that has ended is read."""
        self._thread.join(_END_SECONDS)

    def _pass(self, connection):
        with connection, open(connection.fileno(), "rb", closefd=False) as pipe:
            while data := pipe.readline(_MAX_LINE_BYTES):
                line = data.decode("utf-8", "replace")
                self._last.append(line.rstrip())
                with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
                    sys.stderr.write(line)
                    sys.stderr.flush()


def redirect(connection):
    """Redirects the standard error of this process to a pipe."""
    os.dup2(connection.fileno(), 2)
    connection.close()
