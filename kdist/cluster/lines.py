"""Receives lines over TCP in a way that no client can delay the others.

    for connection, host, line in first_lines(listener, deadline): ...
    answer = receive_line(connection, listener, deadline)

Port scans, health checks, and programs that send nothing also connect to the addresses of a job.
Each of them has a few seconds, while other clients are served. Deadlines are on the clock of
`time.monotonic`, and limit the whole line: a client cannot extend them by sending slowly.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

# No task sends a longer line; longer input comes from another program.
MAX_LINE_BYTES = 1 << 20

# Time for a client to send its line, and the number of clients that may be without one.
_SECONDS_TO_SEND, _MAX_CLIENTS = 10.0, 64
_RECEIVE_BYTES = 1 << 16
_MAX_SELECT_SECONDS = 1.0


def first_lines(
    listener: socket.socket, deadline: float
) -> Iterator[tuple[socket.socket, str, bytes]]:
    """Yields the connection, host, and first line of each client that sends one.

    It ends at the deadline. The caller closes the connections, which do not block.
    """
    with contextlib.closing(_Clients(listener)) as clients:
        while (left := deadline - time.monotonic()) > 0:
            yield from clients.receive(min(left, _MAX_SELECT_SECONDS))


def receive_line(connection: socket.socket, listener: socket.socket, deadline: float) -> bytes:
    """Returns one line, or the bytes received until the connection ended or the deadline.

    Meanwhile it closes what connects to the listener. Otherwise many clients could fill its queue,
    and it would no longer answer.
    """
    client = _Client(connection, "")
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and not client.has_ended:
            for key, _ in selector.select(left):
                if key.fileobj is connection:
                    client.receive()
                elif accepted := _accept(listener):
                    accepted[0].close()
    return client.line


class _Clients:
    """The clients of a listener that have not sent a line, oldest first."""

    def __init__(self, listener):
        self._listener, self._clients = listener, []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def receive(self, seconds):
        """Yields what has arrived, after up to `seconds`, and accepts at most one client."""
        events = self._selector.select(seconds)
        # Lines come first, so that a task that has sent one is not dropped for a new client.
        for client in [key.data for key, _ in events if key.data]:
            client.receive()
            if client.has_line:
                self._remove(client)
                yield client.connection, client.host, client.line
            elif client.has_ended:
                self._drop(client)
        if any(key.fileobj is self._listener for key, _ in events):
            self._accept()
        while self._clients and self._clients[0].is_late():
            self._drop(self._clients[0])

    def close(self):
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()

    def _accept(self):
        accepted = _accept(self._listener)
        if accepted is None or len(self._clients) >= _MAX_CLIENTS:
            # The oldest client is the least likely one to be a task. Without an accepted one, the
            # limit of open files may be reached.
            for client in self._clients[:1]:
                self._drop(client)
        if accepted is not None:
            client = _Client(*accepted)
            self._clients.append(client)
            self._selector.register(client.connection, selectors.EVENT_READ, client)

    def _remove(self, client):
        self._clients.remove(client)
        self._selector.unregister(client.connection)

    def _drop(self, client):
        self._remove(client)
        client.connection.close()


class _Client:
    """A connection and the part of a line that it has sent."""

    def __init__(self, connection, host):
        connection.setblocking(False)
        self.connection, self.host = connection, host
        self._connected_at = time.monotonic()
        self._received = bytearray()
        self.has_line = self.has_ended = False

    @property
    def line(self) -> bytes:
        """The line, or the beginning of it that has arrived."""
        return bytes(self._received.partition(b"\n")[0])

    def is_late(self):
        return time.monotonic() - self._connected_at > _SECONDS_TO_SEND

    def receive(self):
        """Receives what has arrived."""
        try:
            data = self.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        self.has_line = b"\n" in data
        self.has_ended = not data or self.has_line or len(self._received) > MAX_LINE_BYTES


def _accept(listener):
    """Returns a connection and the client's host; None if the client has disconnected."""
    try:
        connection, address = listener.accept()
    except OSError:
        return None
    return connection, address[0]
