"""Clients that stop sending are disconnected; slow clients are not."""

import contextlib
import json
import select
import socket
import time

import pytest

from kdist.serving.core.settings import ServerLimits
from tests.serving.running import received, running

SILENT = 0.4
GOOD = json.dumps({"instances": [[0.5, 1, 2, 3]]}).encode()
HEAD = b"POST /v1/models/first:predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(
    GOOD
)


@pytest.fixture(scope="module")
def hasty(directories):
    limits = ServerLimits(silent_seconds=SILENT, body_seconds=20.0)
    names = ("first", "mixed")
    with running({name: directories[name] for name in names}, limits=limits) as it:
        yield it


def connected(served):
    return socket.create_connection(("127.0.0.1", served.port), 20)


def is_ended(client, seconds=20):
    """Returns whether the server disconnects the client."""
    poll = select.poll()
    poll.register(client, select.POLLHUP)
    return bool(poll.poll(seconds * 1000))


def test_who_sends_nothing_is_let_go(hasty):
    with connected(hasty) as client:
        assert client.recv(100) == b""


def test_silent_clients_keep_nobody_out(directories):
    limits = ServerLimits(connections=3)
    with (
        running({"first": directories["first"]}, limits=limits) as served,
        connected(served) as known,
        contextlib.ExitStack() as stack,
    ):
        known.sendall(HEAD + GOOD)
        assert received(known).startswith(b"HTTP/1.1 200 ")
        silent = [stack.enter_context(connected(served)) for _ in range(6)]
        known.sendall(HEAD + GOOD)
        assert received(known).startswith(b"HTTP/1.1 200 ")
        assert served.get("/healthz").status_code == 200
        assert [client.recv(1) for client in silent[:4]] == [b""] * 4
        # Those that have said something are not let go for others.
        asking = [stack.enter_context(connected(served)) for _ in range(2)]
        for client in asking:
            client.sendall(HEAD + GOOD)
            assert received(client).startswith(b"HTTP/1.1 200 ")
        answer = served.get("/healthz")
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
        assert "3 clients are connected: try again later" in answer.json()["error"]
        known.sendall(HEAD + GOOD)
        assert received(known).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"\r\n", b"\r\n\r\n", HEAD[:40]], ids=["line", "lines", "half"])
def test_who_sends_no_whole_head_is_told_so(hasty, sent):
    with connected(hasty) as client:
        client.sendall(sent)
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error":"Request Timeout: the head did not arrive within 0.4 s"}' in answer


def test_a_head_that_comes_byte_by_byte_has_no_more_time(hasty):
    with connected(hasty) as client:
        client.settimeout(0.05)
        client.sendall(HEAD[:40])
        for _ in range(200):
            client.sendall(b"x")
            try:
                assert client.recv(20).startswith(b"HTTP/1.1 408 ")
                break
            except TimeoutError:
                pass
        else:
            pytest.fail("it waits for good")


def test_half_a_head_after_an_answer(hasty):
    with connected(hasty) as client:
        client.sendall(HEAD + GOOD)
        assert received(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(HEAD[:40])
        assert received(client).startswith(b"HTTP/1.1 408 ")


def test_the_rest_of_a_body_that_is_refused_is_waited_for_as_long(hasty):
    with connected(hasty) as client:
        client.sendall(b"POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
        assert received(client).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"{")
        assert client.recv(100) == b""


def test_a_slow_body_is_no_slow_head(hasty):
    with connected(hasty) as client:
        client.sendall(HEAD + GOOD[:5])
        time.sleep(2 * SILENT)
        client.sendall(GOOD[5:])
        assert received(client).startswith(b"HTTP/1.1 200 ")


def test_requests_in_a_row_are_answered_in_order(hasty):
    with connected(hasty) as client:
        client.sendall(10 * (HEAD + GOOD) + b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        data = b""
        while part := client.recv(1 << 16):
            data += part
    assert data.count(b'{"predictions":') == 10
    assert data.endswith(b"ok\n")


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"], ids=["more", "last"])
def test_who_takes_no_answer_is_let_go(hasty, last):
    body = json.dumps({"signature_name": "any", "inputs": [[0.25] * 400_000]}).encode()
    head = b"POST /v1/models/mixed:predict HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", hasty.port))
    with client:
        for line in (b"", b"", b"", b"", b"", last):
            try:
                client.sendall(head % (line, len(body)) + body)
            except ConnectionError:
                return
        assert is_ended(client)


def test_who_takes_an_answer_slowly_gets_it(hasty):
    body = json.dumps({"signature_name": "any", "inputs": [[0.25] * 1_500_000]}).encode()
    head = b"POST /v1/models/mixed:predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    client.settimeout(20)
    client.connect(("127.0.0.1", hasty.port))
    with client:
        client.sendall(head % len(body) + body)
        data, began = b"", time.monotonic()
        while not data.endswith(b"}"):
            part = client.recv(1 << 17)
            assert part, "it is let go"
            data += part
            if time.monotonic() < began + 4 * SILENT:
                time.sleep(0.05)
    assert data.count(b"1.25") == 1_500_000
