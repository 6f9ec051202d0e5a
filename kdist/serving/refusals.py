"""What a request is told that is not served, over REST and over gRPC alike."""

import asyncio
import math

from kdist.serving.batcher import Overloaded

# Kind -> (HTTP status, name of the gRPC status).
KINDS = {
    "invalid": (400, "INVALID_ARGUMENT"),
    "not_found": (404, "NOT_FOUND"),
    "slow": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "encoding": (415, "INVALID_ARGUMENT"),
    "overloaded": (429, "RESOURCE_EXHAUSTED"),
    "failed": (500, "INTERNAL"),
    "unavailable": (503, "UNAVAILABLE"),
    "late": (504, "DEADLINE_EXCEEDED"),
}

_MOST_CHARACTERS = 1000


class Refusal(Exception):
    """A request that is not served.

    Args:
        kind: of `KINDS`.
        message: what the client should change.
        retry_after_seconds: when it may come again; None if that changes nothing.
    """

    def __init__(self, kind: str, message: str, retry_after_seconds: float | None = None):
        # A name that a client has made up may be as long as a body.
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[: _MOST_CHARACTERS // 2]} … {message[-_MOST_CHARACTERS // 2 :]}"
        super().__init__(message)
        self.kind = kind
        self._retry_after_seconds = retry_after_seconds

    @property
    def retry_after(self) -> int | None:
        """Whole seconds, one at least, as a Retry-After says them; None if it says nothing."""
        after = self._retry_after_seconds
        return None if after is None else max(1, math.ceil(after))

    @property
    def http_status(self) -> int:
        """Such as 400."""
        return KINDS[self.kind][0]

    @property
    def grpc_status(self) -> str:
        """The name of a `grpc.StatusCode`, such as "INVALID_ARGUMENT"."""
        return KINDS[self.kind][1]


def refusal_of(error: BaseException) -> Refusal:
    """What a client is told of an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Overloaded):
        kind = "unavailable" if error.ending else "overloaded"
        return Refusal(kind, str(error), error.retry_after_seconds)
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return Refusal("late", str(error) or "the request was not served in time")
    if isinstance(error, ValueError):  # BadInput is one
        return Refusal("invalid", str(error))
    return Refusal("failed", f"{type(error).__name__}: {error}")
