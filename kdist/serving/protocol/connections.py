"""HTTP connections with time limits for slow clients, and one system call per response."""

import contextlib
import fcntl
import functools
import struct
import termios
from http import HTTPStatus

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kdist.serving.core.metrics import Metrics
from kdist.serving.core.settings import ServerLimits

# Headers, and tokens of the header Connection, that ask for another protocol.
_OF_UPGRADES = (b"upgrade", b"http2-settings")


def connection_factory(limits: ServerLimits, metrics: Metrics):
    """Returns the factory of `HttpConnection` that uvicorn calls for each client."""
    return functools.partial(HttpConnection, limits, metrics)


class HttpConnection(HttpToolsProtocol):
    """Connection of one client.

    The head and body of a response are written in one system call. uvicorn would wait forever for
    the rest of a request's head, of any length, and for a client to read its response; this class
    enforces limits, and counts what they reject before a request exists.
    """

    def __init__(self, limits: ServerLimits, metrics: Metrics, *args, **options):
        super().__init__(*args, **options)
        self._limits, self._metrics = limits, metrics
        self._head_bytes = 0  # bytes received outside of bodies
        self.is_silent, self.since = True, self.loop.time()
        self._head_timer = self._write_timer = None

    def connection_made(self, transport):
        """Starts the timers of a new client."""
        super().connection_made(_BufferedTransport(transport, self.loop, self._start_write_timer))
        self._start_head_timer()
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def connection_lost(self, exc):
        """Stops the timers of a client that has disconnected."""
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data):
        """Counts bytes outside of bodies, and enforces their limit."""
        self.is_silent = False
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._head_bytes > self._limits.head_bytes:
            text = f"the head is larger than {self._limits.head_bytes:,} bytes"
            self._reject("head", 431, text)
        elif self._awaits_head and self._head_timer is None:
            self._start_head_timer()

    def _parse(self, data):
        """Feeds the parser; the head of a request to upgrade is fed once more, without that.

        The protocol may be refused by continuing in HTTP/1.1 (RFC 9110, 7.8), as Java's client
        expects, which asks for HTTP/2 (h2c) with each request. The parser, however, takes what
        follows such a head for another protocol, and the body after it for the next request.
        """
        while data and not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._reject("invalid", 501, "CONNECT is not supported")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn's: data after "Connection: close" do not void the answer.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _head_without_upgrade(self):
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(each for each in tokens if each.lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self):
        """Stops the timer of the head when the request starts."""
        if self.parser.should_upgrade():  # see `_parse`
            return
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body):
        """Resets the count of bytes outside of bodies."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self):
        """Ends the request, unless its head is parsed again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_chunk_header(self):
        """Resets the count at the start of a chunk."""
        self._head_bytes = 0

    def send_400_response(self, msg):
        """Responds to data that is not HTTP."""
        self._reject("invalid", 400, msg)

    def pause_writing(self):
        """Starts the timer of a client that does not read its response."""
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self):
        """Stops the timer when the client reads again."""
        if not self.transport.is_closing():
            self._stop_write_timer()
        super().resume_writing()

    def _make_room(self):
        """Disconnects the client that has been silent longest, or else this one."""
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_ones) <= self._limits.connections:
            return
        silent = [each for each in open_ones if each.is_silent and each is not self]
        if silent:
            self._metrics.record_rejection("connections")
            min(silent, key=lambda each: each.since).transport.abort()
        else:
            text = f"{self._limits.connections:,} clients are connected: try again later"
            self._reject("connections", 503, text)

    @property
    def _awaits_head(self):
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self):
        self._head_timer = self.loop.call_later(self._limits.silent_seconds, self._on_head_timeout)

    def _stop_head_timer(self):
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self):
        if self._head_bytes and self._awaits_head:
            text = f"the head did not arrive within {self._limits.silent_seconds:g} s"
            self._reject("silent", 408, text)
        else:  # idle, or sending the rest of a body that was rejected
            self.transport.close()

    def _stop_write_timer(self):
        if self._write_timer:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_write_timer(self):
        """Starts the timer that checks whether the client reads its response."""
        self._stop_write_timer()
        seconds, unread = self._limits.silent_seconds, self._unread_bytes()
        self._write_timer = self.loop.call_later(seconds, self._on_write_timeout, unread)

    def _on_write_timeout(self, before):
        if self._unread_bytes() < before:
            self._start_write_timer()
        else:
            self.transport.abort()

    def _unread_bytes(self):
        """Returns the bytes that the client has not read, in this process and in the kernel."""
        size = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):  # only Linux reports it
            socket = self.transport.get_extra_info("socket")
            size += struct.unpack("i", fcntl.ioctl(socket, termios.TIOCOUTQ, bytes(4)))[0]
        return size

    def _reject(self, reason, status, text):
        if self.transport.is_closing():
            return
        self._metrics.record_rejection(reason)
        body = orjson.dumps({"error": f"{HTTPStatus(status).phrase}: {text}"})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


class _BufferedTransport:
    """Transport that collects the writes of one event loop step."""

    def __init__(self, transport, loop, on_closing):
        self._transport, self._loop, self._on_closing = transport, loop, on_closing
        self._buffer: list[bytes] = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        if not self._buffer:
            self._loop.call_soon(self._flush)
        self._buffer.append(data)

    def close(self):
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._on_closing()

    def _flush(self):
        if self._buffer:
            data, self._buffer = b"".join(self._buffer), []
            self._transport.write(data)
