"""Connections: an answer's head and body leave together, and a client that stops is let go."""

import contextlib
import fcntl
import functools
import struct
import termios
from http import HTTPStatus

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kdist.serving.settings import Limits


def protocol(limits: Limits):
    """What makes a connection's `Protocol`, as uvicorn takes it."""
    return functools.partial(Protocol, limits)


class Protocol(HttpToolsProtocol):
    """Writes at once what a step of the event loop gives: one call of the system an answer.

    uvicorn waits for good for the rest of a request's head, of any length, and for a client to
    take its answer; this one does not.

    Args:
        limits: of requests.

    Attributes:
        is_silent: whether the client has not sent anything yet.
        since: when it connected, by the event loop's clock.
    """

    def __init__(self, limits: Limits, *args, **options):
        super().__init__(*args, **options)
        self._limits = limits
        self._head_bytes = 0  # or others that are in no body
        self.is_silent, self.since = True, self.loop.time()
        self._owing = self._taking = None

    def connection_made(self, transport):
        """A client has connected."""
        super().connection_made(_Gathered(transport, self.loop, self._look_again))
        self._wait_for_head()
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def connection_lost(self, exc):
        """It has gone."""
        self._unset_owing()
        self._unset_taking()
        super().connection_lost(exc)

    def data_received(self, data):
        """It has sent something."""
        self.is_silent = False
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._limits.head_bytes:
            self._end(431, f"the head is larger than {self._limits.head_bytes:,} bytes")
        elif self._owes and self._owing is None:
            self._wait_for_head()

    def on_headers_complete(self):
        """A request begins to be served."""
        self._head_bytes = 0
        self._unset_owing()
        super().on_headers_complete()

    def on_body(self, body):
        """Some of its body has come."""
        self._head_bytes = 0
        super().on_body(body)

    def on_chunk_header(self):
        """A part of its body begins."""
        self._head_bytes = 0

    def send_400_response(self, msg):
        """To what is no HTTP."""
        self._end(400, msg)

    def pause_writing(self):
        """The client does not take what it is sent."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self):
        """It has."""
        if not self.transport.is_closing():
            self._unset_taking()
        super().resume_writing()

    def _make_room(self):
        """By letting the client go that has been silent for longest, or else this one."""
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_ones) <= self._limits.connections:
            return
        silent = [each for each in open_ones if each.is_silent and each is not self]
        if silent:
            min(silent, key=lambda each: each.since).transport.abort()
        else:
            self._end(503, f"{self._limits.connections:,} clients are connected: try again later")

    @property
    def _owes(self):
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self):
        self._owing = self.loop.call_later(self._limits.silent_seconds, self._owed_too_long)

    def _unset_owing(self):
        if self._owing:
            self._owing.cancel()
            self._owing = None

    def _owed_too_long(self):
        if self._head_bytes and self._owes:
            self._end(408, f"the head did not come within {self._limits.silent_seconds:g} s")
        else:  # nothing at all, or the rest of a body that is refused
            self.transport.close()

    def _unset_taking(self):
        if self._taking:
            self._taking.cancel()
            self._taking = None

    def _look_again(self):
        """Whether the client has taken something meanwhile."""
        self._unset_taking()
        seconds = self._limits.silent_seconds
        self._taking = self.loop.call_later(seconds, self._has_taken, self._left())

    def _has_taken(self, before):
        if self._left() < before:
            self._look_again()
        else:
            self.transport.abort()

    def _left(self):
        """Bytes that it has not taken, here and in the system."""
        left = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):  # only Linux tells
            socket = self.transport.get_extra_info("socket")
            left += struct.unpack("i", fcntl.ioctl(socket, termios.TIOCOUTQ, bytes(4)))[0]
        return left

    def _end(self, status, text):
        if self.transport.is_closing():
            return
        body = orjson.dumps({"error": f"{HTTPStatus(status).phrase}: {text}"})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


class _Gathered:
    """A transport whose writes wait for the end of the event loop's step."""

    def __init__(self, transport, loop, on_closing):
        self._transport, self._loop, self._on_closing = transport, loop, on_closing
        self._held: list[bytes] = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self):
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._on_closing()

    def _flush(self):
        if self._held:
            data, self._held = b"".join(self._held), []
            self._transport.write(data)
