"""Whether another task is still there: it is as long as somebody listens at its address.

presence = Presence("10.0.0.1:2222")
while not presence.has_gone():
    ...
"""

import socket
import time

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 10.0
# So many times in a row without an answer, and it has gone.
_LOOKS_WITHOUT_ANSWER = 4


class Presence:
    """Looks now and then whether a task listens.

    Args:
        address: "host:port". Before somebody has listened there, nobody can have gone.
    """

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._has_come, self._missed, self._looked = False, 0, float("-inf")

    def has_gone(self) -> bool:
        """Whether nobody listens any more; answers at once if it was looked shortly before."""
        if time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._look()
        return self._has_come and self._missed >= _LOOKS_WITHOUT_ANSWER

    def wait_until_gone(self):
        """Returns when nobody listens any more."""
        while not self.has_gone():
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _look(self):
        try:
            socket.create_connection(self._address, _SECONDS_TO_ANSWER).close()
            self._has_come, self._missed = True, 0
        except OSError:
            self._missed += 1
        self._looked = time.monotonic()
