"""Devices that several batchers compute on."""

import concurrent.futures
from collections.abc import Callable


class Devices:
    """So many batches can be computed at a time; of batchers that wait, the first is next.

    Args:
        count: of batches.
    """

    def __init__(self, count: int = 1):
        self.free = count
        self.threads = concurrent.futures.ThreadPoolExecutor(count, "kdist-serving")
        self._waiting: dict[Callable[[], None], None] = {}  # in their order, each once

    def call_when_free(self, function: Callable[[], None]) -> None:
        """Calls it, once, when a batch has ended."""
        self._waiting.setdefault(function)

    def release(self) -> None:
        """A batch has ended."""
        self.free += 1
        while self.free and self._waiting:
            function = next(iter(self._waiting))
            del self._waiting[function]
            function()

    def close(self) -> None:
        """Ends the threads; nothing may be computed afterwards."""
        self.threads.shutdown()
