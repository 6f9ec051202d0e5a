"""Bad REST requests get an error that names the problem, while other clients are served."""

import contextlib
import json
import socket
import time

import numpy as np
import pytest
import requests

from kdist.serving.core.settings import ServerLimits
from tests.serving.running import SECONDS, received, running, unharmed

PREDICT = "/v1/models/first:predict"
GOOD = {"instances": [[0.5, 1, 2, 3]]}
LARGE = b"9" * (2 << 20)  # of a limit of 1 MiB


@pytest.fixture(scope="module", autouse=True)
def neighbour(served):
    """Sends valid requests during all tests."""

    def ask():
        response = served.post(PREDICT, GOOD)
        predictions = response.json().get("predictions")
        assert predictions is not None, response.text
        return response.status_code, np.round(predictions, 4).tolist()

    with unharmed(ask):
        yield


def refused(response, status, says):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert says in error
    assert len(error) < 2000


def rows(*values):
    return {"instances": list(values)}


def mixed(signature, **rest):
    return {"signature_name": signature, **rest}


BODIES = {
    "empty": (b"", "not valid JSON"),
    "truncated": (b'{"instances": [[1, 2', "not valid JSON"),
    "no UTF-8": (b'{"instances": ["\xff\xfe"]}', "not valid JSON"),
    "half of a surrogate": (b'{"instances": ["\\ud800"]}', "not valid JSON"),
    "deeply nested": (b'{"instances": ' + b"[" * 100_000, "not valid JSON"),
    "deeply nested, and closed": (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
    "nested as far as JSON may be": (
        b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}",
        "not an array",
    ),
    "NaN": (b'{"instances": [[NaN, 1, 2, 3]]}', "JSON has no NaN"),
    "Infinity": (b'{"instances": [[-Infinity, 1, 2, 3]]}', "JSON has no NaN and no Infinity"),
    "1e400": (b'{"instances": [[1e400, 1, 2, 3]]}', "infinity"),
    "too large for the type": (b'{"instances": [[1e300, 1, 2, 3]]}', "too large for float32"),
    "a list": ([[1, 2, 3, 4]], "an object"),
    "a number": (b"7", "an object"),
    "null": (b"null", "an object"),
    "neither format": ({"signature_name": "serving_default"}, '"instances" or "inputs"'),
    "both formats": ({"instances": [[1] * 4], "inputs": [[1] * 4]}, "not both"),
    "unknown key": ({**GOOD, "instance": 1}, "unknown keys ['instance']"),
    "signature that is no string": ({**GOOD, "signature_name": 5}, "must be a string"),
    "unknown signature": ({**GOOD, "signature_name": "train"}, "not 'train'"),
    "no rows": (rows(), "at least one row"),
    "no rows in columns": ({"inputs": []}, "shape (0)"),
    "rows that are no list": ({"instances": 5}, "must be a list"),
    "too few columns": (rows([1, 2, 3]), "shape (1, 3), and the model takes (any, 4)"),
    "too high a rank": (rows([[1, 2, 3, 4]]), "shape (1, 1, 4)"),
    "too low a rank": (rows(1, 2), "shape (2)"),
    "ragged": (rows([1, 2, 3, 4], [1, 2, 3]), "rows differ in shape"),
    "null among numbers": (rows([1, None, 3, 4]), "not null"),
    "strings for numbers": (rows(["1", "2", "3", "4"]), "not strings"),
    "a string among numbers": (rows([1, 2, "x", 4]), "not strings"),
    "booleans for numbers": (rows([True, False, True, True]), "not booleans"),
    "an object among numbers": (rows([1, 2, {}, 4]), "not null, or values of several kinds"),
    "bytes for numbers": (rows([{"b64": "AAAA"}] * 4), "not null, or values of several kinds"),
    "unknown input": (rows({"inputs": [1] * 4, "more": 1}), "unknown inputs ['more']"),
    "missing input": ({"inputs": {"other": [1]}}, "inputs ['inputs'] are missing"),
    "other inputs in a later row": (rows({"inputs": [1] * 4}, {"x": [1] * 4}), "row 1 of"),
    "a row without names": (rows({"inputs": [1] * 4}, [1] * 4), "row 1 of"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies(served, kind):
    body, says = BODIES[kind]
    refused(served.post(PREDICT, body), 400, says)


MIXED = {
    "different numbers of rows": ({"inputs": {"a": [[1, 2]], "n": [1, 2]}}, "same number"),
    "one of two inputs": ({"inputs": {"a": [[1, 2]]}}, "['n'] are missing"),
    "no names": (rows([1, 2]), "name each of ['a', 'n']"),
    "floats for integers": (rows({"a": [1, 2], "n": 1.5}), "only int32, not floats"),
    "beyond int32": (rows({"a": [1, 2], "n": 1 << 31}), "-2147483648 to 2147483647"),
    "beyond 64 bits": (rows({"a": [1, 2], "n": 1 << 80}), "not floats"),
    "a string among integers": (rows({"a": [1, 2], "n": "5"}), "not strings"),
    "beyond uint8": (mixed("pixels", instances=[[[0, 256], [0, 0]]]), "0 to 255"),
    "below uint8": (mixed("pixels", instances=[[[0, -1], [0, 0]]]), "0 to 255"),
    "a float for uint8": (mixed("pixels", instances=[[[0.5, 1], [0, 0]]]), "not floats"),
    "bad base64": (mixed("text", instances=[{"b64": "a-b_"}]), "invalid base64"),
    "base64 cut off": (mixed("text", instances=[{"b64": "aaaaa"}]), "invalid base64"),
    "base64 that is no text": (mixed("text", instances=[{"b64": "é"}]), "invalid base64"),
    "base64 of a number": (mixed("text", instances=[{"b64": 5}]), "accepts strings"),
    "a number for a string": (mixed("text", instances=[7]), "accepts strings"),
    "lists of strings": (mixed("text", instances=[["a"], ["b"]]), "shape (2, 1)"),
    "ragged strings": (mixed("text", instances=[["a"], "b"]), "rows differ in shape"),
    "a number where any rank may be": (mixed("any", inputs=5), "rows"),
}


@pytest.mark.parametrize("kind", MIXED)
def test_bodies_for_several_signatures(served, kind):
    body, says = MIXED[kind]
    refused(served.post("/v1/models/mixed:predict", body), 400, says)


def test_text_among_many_numbers_takes_no_memory_of_its_own(served):
    """NumPy would make each number as long as the string: 100 GB here."""
    body = b'{"instances": [[%s"%s"]]}' % (b"1," * 200_000, b"a" * 300_000)
    refused(served.post(PREDICT, body), 400, "not strings")


def test_what_is_said_is_short(served):
    name = "n" * 200_000
    refused(served.post(PREDICT, {"inputs": {name: [1]}}), 400, "are missing")
    refused(served.post(PREDICT, rows({"inputs": [1] * 4, name: 1})), 400, "unknown inputs")
    refused(served.post(PREDICT, {**GOOD, name: 1}), 400, "unknown keys")
    refused(served.post(PREDICT, {**GOOD, "signature_name": name}), 400, "not 'nnn")


PATHS = {
    "unknown model": ("/v1/models/none:predict", 404, "'none' is not served"),
    "a long name": (f"/v1/models/{'n' * 20_000}:predict", 404, "is not served"),
    "version 0": ("/v1/models/first/versions/0:predict", 404, "version 0 of first"),
    "version below 0": ("/v1/models/first/versions/-1:predict", 400, "a whole number"),
    "no version": ("/v1/models/first/versions/x:predict", 400, "a whole number"),
    "a huge version": (f"/v1/models/first/versions/{10**25}:predict", 400, "a whole number"),
    "version of many digits": (
        f"/v1/models/first/versions/{'9' * 5000}:predict",
        400,
        "a whole number",
    ),
    "dots": ("/v1/models/../../etc/passwd:predict", 404, "does not exist"),
    "encoded dots": ("/v1/models/%2e%2e:predict", 404, "'..' is not served"),
    "encoded slashes": ("/v1/models/..%2f..%2fetc:predict", 404, "does not exist"),
    "a zero byte": ("/v1/models/%00:predict", 404, "is not served"),
    "no UTF-8": ("/v1/models/%ff:predict", 404, "is not served"),
    "unknown verb": ("/v1/models/first:train", 405, "first:train does not support POST"),
    "elsewhere": ("/", 404, "/v1/models/NAME"),
    "a slash at the end": ("/v1/models/first:predict/", 404, "does not exist"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_paths(served, kind):
    path, status, says = PATHS[kind]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    refused(_Raw(served.raw(head.encode() + b"{}")), status, says)


def test_methods(served):
    for method in ("GET", "PUT", "DELETE"):
        response = requests.request(method, served.url(PREDICT), timeout=SECONDS)
        refused(response, 405, "POST")
    refused(served.post("/v1/models/first", GOOD), 405, "does not support POST")
    refused(served.get("/v1/models/none"), 404, "'none'")
    refused(served.get("/v1/models/first/versions/99999999999999999999"), 400, "a whole number")
    refused(served.get("/v1/models/first/versions/7/metadata"), 404, "version 7")


HEADERS = {
    "length beyond the limit": (b"Content-Length: 99999999999", b"", 413, "1,048,576"),
    "large body": (b"Content-Length: %d" % len(LARGE), LARGE, 413, "1,048,576"),
    "large body in parts": (
        b"Transfer-Encoding: chunked",
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE),
        413,
        "1,048,576",
    ),
    "compressed": (b"Content-Encoding: gzip\r\nContent-Length: 2", b"{}", 415, "Content-Encoding"),
    "length that is no number": (b"Content-Length: x", b"", 400, "HTTP"),
    "length below 0": (b"Content-Length: -5", b"", 400, "HTTP"),
    "length beyond 64 bits": (b"Content-Length: " + b"9" * 30, b"", 400, "HTTP"),
    "two lengths": (b"Content-Length: 2\r\nContent-Length: 3", b"{}", 400, "HTTP"),
    "parts of no length": (b"Transfer-Encoding: chunked", b"xyz\r\n", 400, "HTTP"),
    "a large header": (b"X: " + b"x" * 200_000, b"", 431, "head"),
    "many headers": (b"X: x\r\n" * 40_000 + b"X: x", b"", 431, "head"),
    "a header without a colon": (b"nonsense", b"", 400, "HTTP"),
    "a length and parts": (
        *(b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n"),
        *(400, "HTTP"),
    ),
    "parts in another encoding": (b"Transfer-Encoding: xchunked", b"2\r\n{}", 400, "HTTP"),
    "parts twice": (b"Transfer-Encoding: chunked, chunked", b"2\r\n{}", 400, "HTTP"),
    "length with a sign": (b"Content-Length: +2", b"{}", 400, "HTTP"),
    "lengths in one header": (b"Content-Length: 2, 2", b"{}", 400, "HTTP"),
    "a folded header": (b"X: a\r\n Content-Length: 2", b"{}", 400, "HTTP"),
    "a space before the colon": (b"Content-Length : 2", b"{}", 400, "HTTP"),
    "lines that end in LF alone": (b"X: a\nContent-Length: 2", b"{}", 400, "HTTP"),
    "a CR within a header": (b"X: a\rContent-Length: 2", b"{}", 400, "HTTP"),
    "a part whose length is signed": (b"Transfer-Encoding: chunked", b"+2\r\n{}", 400, "HTTP"),
    "a part that is longer than said": (
        *(b"Transfer-Encoding: chunked", b"2\r\n{}}\r\n0\r\n\r\n", 400, "HTTP"),
    ),
}


def post_with(server, header, body):
    data = b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n%s" % (PREDICT.encode(), header, body)
    return _Raw(server.raw(data))


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(served, kind):
    header, body, status, says = HEADERS[kind]
    refused(post_with(served, header, body), status, says)


def test_bodies_that_stop(directories):
    """The server is one of its own, as the short limit could meet requests of others."""
    limits = ServerLimits(body_seconds=0.2, memory_bytes=0)
    with running({"first": directories["first"]}, limits=limits) as server:
        for header, body in (
            (b"Content-Length: 50", b"{"),
            (b"Content-Length: 50", b""),
            (b"Transfer-Encoding: chunked", b"5\r\n{"),
        ):
            refused(post_with(server, header, body), 408, "did not arrive within 0.2 s")


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
    "h2c, as Java asks": b"Connection: Upgrade, HTTP2-Settings, keep-alive\r\nUpgrade: h2c",
    "WebSocket": b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x",
    "something unknown": b"Upgrade: x/1\r\nConnection: upgrade",
}


@pytest.mark.parametrize("in_parts", [False, True], ids=["length", "parts"])
@pytest.mark.parametrize("kind", UPGRADES)
def test_requests_to_upgrade_are_answered_as_if_they_did_not(served, kind, in_parts):
    """The body is that of the request, also in a packet of its own, and never another request."""
    wanted = served.predict("first", GOOD)["predictions"]
    body = json.dumps(GOOD).encode()
    hidden = b"GET /v1/models/hidden HTTP/1.1\r\nHost: x\r\n\r\n"
    body = body[:-1] + b" " * len(hidden) + body[-1:]
    length = b"Content-Length: %d" % len(body)
    if in_parts:
        length, body = b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n%s\r\n\r\n"
    head = head % (PREDICT.encode(), UPGRADES[kind], length)
    with socket.create_connection(("127.0.0.1", served.port), 10) as client:
        for packets in ([head + body], [head, body], [head[:-3], head[-3:] + body[:9], body[9:]]):
            for packet in packets:
                client.sendall(packet)
                time.sleep(0.05)
            response = _Raw(received(client))
            assert response.status_code == 200, response.text
            np.testing.assert_allclose(response.json()["predictions"], wanted, atol=1e-6)
        # One that is refused: what was announced as its body is no request, either.
        client.sendall(head.replace(b"first:", b"none:"))
        time.sleep(0.05)
        client.sendall(body.replace(b" " * len(hidden), hidden))
        text = _all_of(client)
    assert "'none' is not served" in text
    assert "hidden" not in text


def test_many_requests_to_upgrade_in_one_packet(served):
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % UPGRADES["h2c"]
    close = head.replace(b"Upgrade,", b"close, Upgrade,")
    with socket.create_connection(("127.0.0.1", served.port), 10) as client:
        client.sendall(head * 1500 + close)
        assert _all_of(client).count("HTTP/1.1 200 OK") == 1501


def test_data_after_the_last_request_do_not_void_its_answer(served):
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % UPGRADES["h2c"]
    text = served.raw(head.replace(b"Upgrade,", b"close, Upgrade,") + b"GET /healthz").decode()
    assert text.startswith("HTTP/1.1 200 OK")
    assert text.count("HTTP/1.1") == 1


def test_no_tunnel(served):
    data = b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n"
    refused(_Raw(served.raw(data)), 501, "CONNECT is not supported")


def _all_of(client):
    """Returns what a server sends until it closes the connection, or is silent for a second."""
    data = client.recv(65536)
    client.settimeout(1)
    with contextlib.suppress(TimeoutError):
        while part := client.recv(65536):
            data += part
    return data.decode("latin-1")


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, b"nonsense\r\n\r\n", b"\x00" * 5000],
    ids=["TLS", "words", "zeros"],
)
def test_what_is_no_http(served, data):
    refused(_Raw(served.raw(data)), 400, "HTTP")


def test_a_head_without_an_end(served):
    """The head is rejected before it fills the memory."""
    for start in (b"GET /", b"GET / HTTP/1.1\r\nX: "):
        with socket.create_connection(("127.0.0.1", served.port), 10) as client:
            client.sendall(start)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    client.sendall(b"x" * 65536)
                pytest.fail("6.5 MB of a head were taken")


def test_clients_that_go_in_mid_request(served):
    whole = json.dumps(GOOD).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    data = head % (PREDICT.encode(), len(whole)) + whole
    for end in (20, len(data) - 5, len(data)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", served.port), 10) as client:
                client.sendall(data[:end])
    assert served.predict("first", GOOD)


class _Raw:
    """First response in raw bytes, with the attributes of a response of `requests`."""

    def __init__(self, data):
        head, _, body = data.partition(b"\r\n\r\n")
        self.text = data.decode("latin-1")
        lines = head.decode("latin-1").split("\r\n")
        self.status_code = int(lines[0].split()[1]) if head else None
        self.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        self._body = body

    def json(self):
        return json.loads(self._body[: int(self.headers["content-length"])])
