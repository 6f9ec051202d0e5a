"""Connections of the live page's server that clients leave open."""

import http.client
import socket
import threading
import types

import pytest

from kdist.report import live


@pytest.fixture
def port():
    """Yields the port of a server of a short page."""
    page = types.SimpleNamespace(text="the page", version="1", error="", made_at="12:00:00")
    with live._server(0, page) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def connect(port, head=b"GET / HTTP/1.1\r\nHost: local"):
    """Returns a connection on which an unfinished request head was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(head)
    return connection


def get(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/")
    return connection.getresponse().read()


def is_closed(connection):
    """Waits until the server has closed the connection; an answer may come before."""
    while True:
        try:
            if not connection.recv(1000):
                return True
        except ConnectionError:
            return True
        except TimeoutError:
            return False


def wait_for_threads(most):
    """Waits until the server has at most this number of connection threads."""
    while sum("process_request" in thread.name for thread in threading.enumerate()) > most:
        threading.Event().wait(0.01)


@pytest.mark.parametrize("head", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: local", b"POST "])
def test_an_unfinished_head_is_closed_after_some_seconds(port, monkeypatch, head):
    monkeypatch.setattr(live, "_MAX_CONNECTION_SECONDS", 0.2)
    assert is_closed(connect(port, head))


def test_many_unfinished_heads_occupy_few_threads_and_block_nobody(port):
    connections = [connect(port) for _ in range(live._MAX_CONNECTIONS + 16)]
    assert get(port) == b"the page"
    assert is_closed(connections[0])
    wait_for_threads(live._MAX_CONNECTIONS)
    for connection in connections:
        connection.close()


def test_a_client_that_resets_its_connection_leaves_no_traceback(port, capsys):
    connection = connect(port)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert get(port) == b"the page"
    wait_for_threads(0)
    assert capsys.readouterr().err == ""
