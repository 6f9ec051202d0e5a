"""Client-visible errors with their HTTP and gRPC status codes."""

import asyncio
import math

# Kind -> (HTTP status, name of the gRPC status).
STATUS_CODES = {
    "invalid": (400, "INVALID_ARGUMENT"),
    "not_found": (404, "NOT_FOUND"),
    "unacceptable": (406, "INVALID_ARGUMENT"),
    "slow": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "encoding": (415, "INVALID_ARGUMENT"),
    "overloaded": (429, "RESOURCE_EXHAUSTED"),
    "failed": (500, "INTERNAL"),
    "out_of_memory": (503, "RESOURCE_EXHAUSTED"),
    "unavailable": (503, "UNAVAILABLE"),
    "late": (504, "DEADLINE_EXCEEDED"),
}

_MAX_CHARACTERS = 1000


class BadInput(ValueError):
    """The model's own operations reject the values of a request."""


class Overloaded(RuntimeError):
    """The queue is full, or the server is shutting down; the request is rejected.

    Attributes:
        retry_after_seconds: expected time until the current queue is served.
        ending: whether the server is shutting down, so that a retry fails as well.
    """

    def __init__(self, message: str, retry_after_seconds: float, ending: bool = False):
        super().__init__(message)
        self.retry_after_seconds, self.ending = retry_after_seconds, ending


class RequestError(Exception):
    """Error that is reported to the client of one request.

    `kind` is a key of `STATUS_CODES`. `retry_after_seconds` is None if a retry would fail as well.
    """

    def __init__(self, kind: str, message: str, retry_after_seconds: float | None = None):
        # A name that the client has made up can be as long as a body.
        if len(message) > _MAX_CHARACTERS:
            message = f"{message[: _MAX_CHARACTERS // 2]} … {message[-_MAX_CHARACTERS // 2 :]}"
        super().__init__(message)
        self.kind = kind
        self._retry_after_seconds = retry_after_seconds

    @property
    def retry_after(self) -> int | None:
        """Value of a Retry-After header in whole seconds, at least 1; None without one."""
        after = self._retry_after_seconds
        return None if after is None else max(1, math.ceil(after))

    @property
    def http_status(self) -> int:
        """HTTP status code, such as 400."""
        return STATUS_CODES[self.kind][0]

    @property
    def grpc_status(self) -> str:
        """Name of the `grpc.StatusCode`, such as "INVALID_ARGUMENT"."""
        return STATUS_CODES[self.kind][1]


def to_request_error(error: BaseException) -> RequestError:
    """Returns the error that a client receives for any exception, which loses its traceback."""
    _drop_tracebacks(error)
    if isinstance(error, RequestError):
        return error
    if isinstance(error, Overloaded):
        kind = "unavailable" if error.ending else "overloaded"
        return RequestError(kind, str(error), error.retry_after_seconds)
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return RequestError("late", str(error) or "the request was not served in time")
    if isinstance(error, ValueError):  # includes BadInput
        return RequestError("invalid", str(error))
    return RequestError("failed", f"{type(error).__name__}: {error}")


def _drop_tracebacks(error):
    """Drops the frames of an error and its causes, and with them the body of the request.

    An error that a frame or a future refers to would hold them until garbage is collected, which
    is rare in a server.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
