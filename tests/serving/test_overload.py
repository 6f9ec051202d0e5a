"""Servers with little memory or few connections, and what rejected requests leave behind."""

import asyncio
import contextlib
import gc
import socket
import time

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import predict_pb2

from kdist.serving.core.requests import MessageSlots
from kdist.serving.core.settings import ServerLimits
from kdist.serving.engine import models as models_module
from kdist.serving.engine.models import Models
from kdist.serving.protocol import rpc
from tests.serving.running import SECONDS, predict_request, running

ROW = {"instances": [[1, 2, 3, 4]]}
PREDICT = "/v1/models/first:predict"


def rejections(served):
    """Returns {reason: count} of the metrics."""
    lines = served.get("/metrics").text.splitlines()
    start = 'kdist_serving_rejections_total{reason="'
    pairs = [line.removeprefix(start).split('"} ') for line in lines if line.startswith(start)]
    return {reason: float(count) for reason, count in pairs}


def test_messages_of_grpc_are_received_as_far_as_there_is_memory(directories, monkeypatch):
    now, most, real = 0, 0, MessageSlots.receive

    def receive(slots, read):
        async def counted():
            nonlocal now, most
            now += 1
            most = max(most, now)
            try:
                return await read()
            finally:
                now -= 1

        return real(slots, counted)

    monkeypatch.setattr(MessageSlots, "receive", receive)
    limits = ServerLimits(body_bytes=1_000_000, all_bodies_bytes=4_000_000)
    request = predict_request("mixed", "any", x=np.zeros((1, 200_000), "float32"))
    with (
        running({"mixed": directories["mixed"]}, limits=limits) as served,
        contextlib.ExitStack() as stack,
    ):
        stubs = [stack.enter_context(served.stubs())[0] for _ in range(4)]
        calls = [stubs[n % 4].Predict.future(request, timeout=SECONDS) for n in range(40)]
        codes = {call.exception().code().name if call.exception() else "OK" for call in calls}
        assert codes <= {"OK", "RESOURCE_EXHAUSTED"}
        assert "OK" in codes
        assert 1 <= most <= 4
        assert stubs[0].Predict(request, timeout=SECONDS)
        assert served.models.body_memory.held_bytes < 1 << 20


def test_above_the_ceiling_of_memory_requests_are_rejected_and_counted(directories):
    limits = ServerLimits(memory_bytes=1)
    with running({"first": directories["first"]}, limits=limits) as served:
        response = served.post(PREDICT, ROW)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "--memory_mb" in response.json()["error"]
        with (
            served.stubs() as (stub, _),
            pytest.raises(grpc.RpcError, match="--memory_mb") as error,
        ):
            stub.Predict(predict_request("first", inputs=np.zeros((1, 4), "f")), timeout=SECONDS)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rejections(served) == {"memory": 2}
        assert served.get("/healthz").status_code == 200


def test_silent_connections_keep_nobody_out_of_grpc(directories):
    limits = ServerLimits(connections=8, silent_seconds=0.5)
    request = predict_request("first", inputs=np.zeros((1, 4), "float32"))
    with (
        running({"first": directories["first"]}, limits=limits) as served,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.grpc_port), SECONDS))
        with served.stubs() as (stub, _):
            assert stub.Predict(request, timeout=SECONDS, wait_for_ready=True)


def test_connections_of_grpc_are_limited(directories):
    limits = ServerLimits(connections=2)
    with (
        running({"first": directories["first"]}, limits=limits) as served,
        contextlib.ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.grpc_port), SECONDS))
            for _ in range(3)
        ]
        # The server sends its settings to those that it has accepted.
        first = [client.recv(9) for client in clients[:2]]
        assert all(first)
        with contextlib.suppress(ConnectionError):
            assert clients[2].recv(9) == b""


def test_large_responses_of_grpc_count_until_they_are_sent(served, monkeypatch):
    monkeypatch.setattr(rpc, "_LARGE_BYTES", 1)
    bodies, held = served.models.body_memory, []
    request = predict_request("mixed", "any", x=np.zeros((1, 200_000), "float32"))
    serialize = predict_pb2.PredictResponse.SerializeToString

    def noted(message):  # after the handler has ended, before gRPC sends
        held.append(bodies.held_bytes)
        return serialize(message)

    monkeypatch.setattr(rpc, "_serialize", noted)
    with served.stubs() as (stub, _):
        stub.Predict(request, timeout=SECONDS)
    assert held[0] >= 2 * 800_000
    until = time.monotonic() + SECONDS
    while bodies.held_bytes and time.monotonic() < until:
        time.sleep(0.01)
    assert bodies.held_bytes == 0


def test_memory_is_returned_after_a_burst_but_not_during_one(monkeypatch):
    used, trims = [100 << 20], []
    monkeypatch.setattr(models_module, "used_bytes", lambda pids: used[0])
    monkeypatch.setattr(models_module, "return_free_memory", lambda: trims.append(used[0]))
    models = Models({})

    def look(size):
        used[0] = size << 20
        asyncio.run(models._return_memory_of_burst())

    look(100)
    look(200)
    assert not trims
    with models.body_memory.request() as reserve:
        reserve(2 << 20)
        look(300)
        assert not trims
    look(300)
    assert trims == [300 << 20]
    look(300)  # it is in use
    assert len(trims) == 1


def test_what_is_rejected_before_it_is_read_is_counted(directories):
    limits = ServerLimits(head_bytes=1000, silent_seconds=0.2, connections=50)
    with running({"first": directories["first"]}, limits=limits) as served:
        served.raw(b"nonsense\r\n\r\n")
        served.raw(b"GET / HTTP/1.1\r\nX: " + b"x" * 2000)
        served.raw(b"GET / HT")
        assert rejections(served) == {"invalid": 1, "head": 1, "silent": 1}


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_rejected_requests_leave_no_garbage(served, protocol):
    """A server rarely collects garbage, which would hold the bodies of thousands of requests."""
    x = np.zeros((1, 200_000), "float32")
    request = predict_request("mixed", "any", x=x)

    def ask():
        if protocol == "rest":
            response = served.post("/v1/models/mixed:predict", b" " * x.nbytes)
            assert response.status_code == 429, response.text
            return
        with served.stubs() as (stub, _), pytest.raises(grpc.RpcError, match="in flight hold"):
            stub.Predict(request, timeout=SECONDS)

    with served.models.body_memory.request() as reserve:
        reserve((1 << 30) - 100)
        ask()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):  # gRPC still holds the last one
                ask()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            held = {id(each): each for one in gc.garbage for each in gc.get_referents(one)}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert sum(len(each) for each in held.values() if isinstance(each, bytes)) < x.nbytes / 10
