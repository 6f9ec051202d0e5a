"""What requests that are under way take of the memory, REST's and gRPC's together."""

import contextlib
from collections.abc import Callable, Iterator

from kdist.serving.refusals import Refusal

_AGAIN_SECONDS = 1.0


class Bodies:
    """Counts the bytes of bodies from when they come until their requests are answered.

    Args:
        most_bytes: of all together.

    Attributes:
        held_bytes: now.
    """

    def __init__(self, most_bytes: int):
        self.held_bytes, self._most = 0, most_bytes

    @contextlib.contextmanager
    def of_request(self) -> Iterator[Callable[[int], None]]:
        """Gives what is to be called with the bytes of each part; raises Refusal for too many."""
        mine = 0

        def hold(size: int):
            nonlocal mine
            if self.held_bytes + size > self._most:
                others = self.held_bytes - mine
                said = f"other requests under way hold {others:,} bytes: try again later"
                raise Refusal("overloaded", said, _AGAIN_SECONDS)
            mine += size
            self.held_bytes += size

        try:
            yield hold
        finally:
            self.held_bytes -= mine
