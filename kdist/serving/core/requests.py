"""Rows of a request, and bounds on the bodies and messages of all requests."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from kdist.serving.core.errors import RequestError
from kdist.serving.core.resources import MemoryCeiling
from kdist.serving.core.settings import ServerLimits

# Named arrays of shape (rows, …).
Arrays = Mapping[str, np.ndarray]

_RETRY_SECONDS = 1.0
# A message that takes longer is large, or its client is slow or silent.
_QUICK_SECONDS = 0.25


def count_rows(arrays: Arrays) -> int:
    """Returns the number of rows of all arrays; raises ValueError if it is zero or differs."""
    counts = {name: len(array) if np.ndim(array) else None for name, array in arrays.items()}
    first = next(iter(counts.values()), None)
    if not first or any(count != first for count in counts.values()):
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(
            f"rows of a request: {shown or 'none'}; send the same number for each input, at least 1"
        )
    return first


def parse_version(text: str | None) -> int | None:
    """Returns the version that a request names; None for the highest.

    Raises RequestError if the text is not a whole number.
    """
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,19}", text):
        raise RequestError("invalid", f"the version {text!r} is not a whole number")
    return int(text)


# A string's pointer and object in Python, and its object in TensorFlow, besides its bytes.
_BYTES_PER_STRING = 8 + 33 + 24


def bytes_of_strings(
    lengths: Iterable[int], count: int, bytes_per_string: int = _BYTES_PER_STRING
) -> int:
    """Returns the memory of strings, of which each input has an array and TensorFlow a copy.

    Args:
        lengths: bytes of each string; the last one stands for all that are missing, as in a
            TensorProto.
        count: number of strings.
        bytes_per_string: memory of a string besides its bytes.
    """
    lengths = list(lengths)
    missing = max(0, count - len(lengths)) * (lengths[-1] if lengths else 0)
    return count * bytes_per_string + sum(lengths) + missing


def bytes_of_arrays(arrays: Arrays) -> int:
    """Returns the memory of the inputs of a request."""
    return sum(
        bytes_of_strings(map(len, array.flat), array.size)
        if array.dtype == object
        else array.nbytes
        for array in arrays.values()
    )


def pad_rows(parts: Sequence[np.ndarray], padding: int) -> np.ndarray:
    """Returns all rows in one array, followed by `padding` copies of the first row.

    A copy of a row is a valid input; zeros may not be.
    """
    if padding:
        parts = [*parts, np.repeat(parts[0][:1], padding, axis=0)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class BodyMemory:
    """Bytes of all request bodies in flight, over REST and gRPC together.

    Args:
        max_bytes: limit of all bodies.
        ceiling: limit of all memory of the server. Defaults to none.
        on_rejected: called with "memory" or "bodies", the limit that a request would exceed.

    Attributes:
        held_bytes: bytes in flight.
    """

    def __init__(
        self,
        max_bytes: int,
        ceiling: MemoryCeiling | None = None,
        on_rejected: Callable[[str], None] = lambda reason: None,
    ):
        self.held_bytes, self._max_bytes = 0, max_bytes
        self._ceiling, self._on_rejected = ceiling, on_rejected

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[..., None]]:
        """Yields a function that reserves bytes until the request ends.

        The function raises RequestError when the total would exceed the limit, unless the bytes are
        those of a response (`is_response`). The start of a request raises it while the server uses
        too much memory.
        """
        own_bytes = 0
        self._check_ceiling(0)

        def reserve(size: int, is_response: bool = False):
            nonlocal own_bytes
            if self.held_bytes + size > self._max_bytes and not is_response:
                self._on_rejected("bodies")
                raise RequestError(
                    "overloaded",
                    f"other requests in flight hold {self.held_bytes - own_bytes:,} bytes; try "
                    "again later",
                    _RETRY_SECONDS,
                )
            if not is_response:
                self._check_ceiling(size)
            own_bytes += size
            self.held_bytes += size

        try:
            yield reserve
        finally:
            self.held_bytes -= own_bytes

    def _check_ceiling(self, size):
        if self._ceiling:
            try:
                self._ceiling.check(self.held_bytes + size)
            except RequestError:
                self._on_rejected("memory")
                raise


class MessageSlots:
    """Slots for messages, each of which may have up to `limits.body_bytes`.

    gRPC buffers little of a message until the server asks for it, and then all of it. The size is
    known only afterwards, so as many messages are received at once as would fit if they were as
    large as allowed. Half of the slots are for messages that have just begun. A message that is not
    complete soon moves to the other half, or is rejected if none is free there: clients that send
    nothing hold up slow clients, and no others. `on_rejected` is called with "messages".
    """

    def __init__(self, limits: ServerLimits, on_rejected: Callable[[str], None]):
        half = max(1, limits.all_bodies_bytes // limits.body_bytes // 2)
        self._quick, self._free_slow = asyncio.Semaphore(half), half
        self._waiting, self._limits, self._on_rejected = 0, limits, on_rejected

    async def receive(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the message that `read` receives; raises RequestError if it does not arrive."""
        if self._quick.locked():
            await self._wait_for_slot()
        else:
            await self._quick.acquire()
        is_slow, loop = False, asyncio.get_running_loop()

        def leave_quick_slot():
            nonlocal is_slow
            if self._free_slow:
                is_slow = True
                self._free_slow -= 1
                self._quick.release()
            remaining = max(0.0, self._limits.body_seconds - _QUICK_SECONDS) if is_slow else 0.0
            limit.reschedule(loop.time() + remaining)

        timer = loop.call_later(_QUICK_SECONDS, leave_quick_slot)
        try:
            async with asyncio.timeout(None) as limit:  # until `leave_quick_slot`
                return await read()
        except TimeoutError as error:
            raise self._failure(is_slow) from error
        finally:
            timer.cancel()
            if is_slow:
                self._free_slow += 1
            else:
                self._quick.release()

    async def _wait_for_slot(self):
        if self._waiting >= self._limits.connections:
            raise self._rejection("too many requests wait to be read; try again later")
        self._waiting += 1
        try:
            await self._quick.acquire()
        finally:
            self._waiting -= 1

    def _failure(self, is_slow):
        if is_slow:
            seconds = self._limits.body_seconds
            return RequestError("slow", f"the message did not arrive within {seconds:g} s")
        return self._rejection("other large or slow messages are being received; try again later")

    def _rejection(self, text):
        self._on_rejected("messages")
        return RequestError("overloaded", text, _RETRY_SECONDS)
