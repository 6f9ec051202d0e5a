"""Liveness of another task, probed by connecting to its address."""

import socket
import time

_PROBE_INTERVAL_SECONDS = 0.5
_CONNECT_TIMEOUT_SECONDS = 10.0
# Consecutive failed probes after which the task is considered gone.
_MAX_FAILED_PROBES = 4


class LivenessProbe:
    """Checks from time to time whether a task at `"host:port"` accepts connections.

    A task that has never answered does not count as gone.
    """

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._has_answered, self._failed_probes, self._probed_at = False, 0, float("-inf")

    def is_gone(self) -> bool:
        """Returns whether the task has stopped answering; probes at most every 0.5 s."""
        if time.monotonic() - self._probed_at >= _PROBE_INTERVAL_SECONDS:
            self._probe()
        return self._has_answered and self._failed_probes >= _MAX_FAILED_PROBES

    def wait_until_gone(self):
        """Blocks until the task has stopped answering."""
        while not self.is_gone():
            time.sleep(_PROBE_INTERVAL_SECONDS)

    def _probe(self):
        try:
            socket.create_connection(self._address, _CONNECT_TIMEOUT_SECONDS).close()
            self._has_answered, self._failed_probes = True, 0
        except OSError:
            self._failed_probes += 1
        self._probed_at = time.monotonic()
