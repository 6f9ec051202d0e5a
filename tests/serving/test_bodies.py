"""Limit on the memory of all request bodies in flight."""

import json
import socket
import time

import grpc
import numpy as np
import pytest

from kdist.serving.core.errors import RequestError
from kdist.serving.core.requests import BodyMemory
from kdist.serving.core.settings import ServerLimits
from tests.serving.running import SECONDS, predict_request, received, running

PREDICT = "/v1/models/first:predict"
SMALL = json.dumps({"instances": [[1, 2, 3, 4]]}).encode()
LARGE = SMALL + b" " * 250_000


def test_what_is_held_is_given_back():
    bodies = BodyMemory(100)
    with bodies.request() as first:
        first(60)
        with bodies.request() as second:
            second(20)
            with pytest.raises(RequestError, match="in flight hold 60 bytes") as rejected:
                second(21)
        assert rejected.value.retry_after == 1
        assert bodies.held_bytes == 60
        first(40)
    assert bodies.held_bytes == 0


def test_a_limit_that_no_body_passes():
    with pytest.raises(ValueError, match="all_bodies_bytes=9: a body may have 10"):
        ServerLimits(body_bytes=10, all_bodies_bytes=9)


@pytest.fixture
def narrow(directories):
    limits = ServerLimits(body_bytes=300_000, all_bodies_bytes=400_000, body_seconds=SECONDS)
    with running({"first": directories["first"]}, limits=limits) as it:
        yield it


def test_who_comes_when_others_hold_all_may_come_again(narrow):
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    request = predict_request("first", inputs=np.zeros((16_000, 4), "float32"))
    with socket.create_connection(("127.0.0.1", narrow.port), SECONDS) as slow:
        slow.sendall(head % (PREDICT.encode(), len(LARGE)) + LARGE[:-1])
        until(lambda: narrow.models.body_memory.held_bytes == len(LARGE) - 1)
        refused = narrow.post(PREDICT, LARGE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "in flight hold 250," in refused.json()["error"]
        with narrow.stubs() as (stub, _), pytest.raises(grpc.RpcError) as error:
            stub.Predict(request, timeout=SECONDS)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("retry-after", "1") in error.value.trailing_metadata()
        wanted = narrow.post(PREDICT, SMALL).json()["predictions"]
        slow.sendall(LARGE[-1:])
        assert json.loads(received(slow).partition(b"\r\n\r\n")[2])["predictions"] == wanted
    until(lambda: narrow.models.body_memory.held_bytes == 0)
    assert narrow.post(PREDICT, LARGE).json()["predictions"] == wanted
    with narrow.stubs() as (stub, _), pytest.raises(grpc.RpcError) as error:
        stub.Predict(request, timeout=SECONDS)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # so many rows are too many


def until(holds):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
