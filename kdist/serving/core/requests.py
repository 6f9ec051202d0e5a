"""Rows of a request, and the memory that the bodies of all requests use."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from kdist.serving.core.errors import RequestError
from kdist.serving.core.resources import MemoryCeiling

# Named arrays of shape (rows, …).
Arrays = Mapping[str, np.ndarray]

_RETRY_SECONDS = 1.0


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
