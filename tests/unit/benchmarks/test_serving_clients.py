"""Clients against small servers that answer rightly, lie, refuse, say nothing, or hang up."""

import asyncio
import contextlib
import functools
import json

import numpy as np
import pytest

pytest.importorskip("httptools")

from benchmarks.serving.connections import HttpConnection
from benchmarks.serving.dialects import DIALECTS
from benchmarks.serving.examples import Examples, Requests
from benchmarks.serving.loads import Limits, closed_loop, open_loop
from benchmarks.serving.misbehaving import flood, leaving_clients, slow_clients
from benchmarks.serving.outcomes import Outcome, Tally

EXAMPLES = Examples(np.arange(16, dtype=np.uint8)[:, None], np.eye(16))


@pytest.fixture
def requests():
    return Requests(EXAMPLES, DIALECTS["rest"])


def right(instances):
    return 200, {"predictions": [EXAMPLES.predictions[row[0]].tolist() for row in instances]}


class Stub:
    """Answers each whole request with what a function of its instances gives: status and body."""

    def __init__(self, answer):
        self._answer = answer
        self.answered = 0

    async def serve(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].split()[0])
                instances = json.loads(await reader.readexactly(length))["instances"]
                answer = self._answer(instances)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if answer is None:
                    break
                body = json.dumps(answer[1]).encode()
                writer.write(
                    f"HTTP/1.1 {answer[0]} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                self.answered += 1
        writer.close()


def against(stub, load):
    """What a load gives, a coroutine function of a function that connects to the stub."""

    async def run():
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            connect = functools.partial(HttpConnection.open, "127.0.0.1", port, "/predict")
            return await asyncio.wait_for(load(connect), 30)
        finally:
            server.close()

    return asyncio.run(run())


def closed(requests, count, clients=4, **limits):
    return lambda connect: closed_loop(
        connect, requests, clients, Limits(seconds=20, count=count, **limits)
    )


def test_right_answers_are_counted(requests):
    stub = Stub(right)
    outcome = against(stub, closed(requests, 100))
    assert outcome.answers == {"right": 100} == {"right": stub.answered}
    assert outcome.errors == {}
    assert len(outcome.latencies) == 100
    assert outcome.per_second == pytest.approx(100 / outcome.seconds)


def test_answers_of_other_examples_are_wrong(requests):
    """A server that mixes requests up in each third answer."""
    stub = Stub(lambda rows: right([[(rows[0][0] + (stub.answered % 3 == 0)) % 16]]))
    outcome = against(stub, closed(requests, 90))
    assert outcome.answers == {"right": 60, "wrong": 30}
    assert len(outcome.latencies) == 60


@pytest.mark.parametrize(
    "body",
    [{"predictions": []}, {"predictions": [[1.0]]}, {"outputs": [[1.0]]}, [], "none"],
    ids=["no row", "other shape", "other key", "a list", "a text"],
)
def test_what_is_no_answer_is_wrong(requests, body):
    outcome = against(Stub(lambda rows: (200, body)), closed(requests, 4))
    assert outcome.answers == {"wrong": 4}


def test_predictions_that_are_not_numbers_are_wrong(requests):
    nothing = {"predictions": [[float("nan")] * 16]}
    outcome = against(Stub(lambda rows: (200, nothing)), closed(requests, 4))
    assert outcome.answers == {"wrong": 4}


def test_refusals_are_counted_by_status(requests):
    answers = iter([(429, {}), (503, {}), (429, {})])
    stub = Stub(lambda rows: next(answers, None) or right(rows))
    outcome = against(stub, closed(requests, 10, clients=1))
    assert outcome.answers == {"429": 2, "503": 1, "right": 7}
    assert len(outcome.latencies) == 7


def test_a_connection_that_ends_is_opened_again(requests):
    answers = iter([None])
    stub = Stub(lambda rows: next(answers, right(rows)))
    outcome = against(stub, closed(requests, 10, clients=1))
    assert outcome.answers == {"disconnected": 1, "right": 9}


def test_a_connection_that_the_server_keeps_no_longer_is_not_asked_again(requests):
    class Once(Stub):
        async def serve(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            body = json.dumps(right([[0]])[1]).encode()
            head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            while await reader.read(1000):  # a second request has no answer
                pass
            writer.close()

    first = Requests(Examples(EXAMPLES.inputs[:1], EXAMPLES.predictions[:1]), DIALECTS["rest"])
    assert against(Once(right), closed(first, 8, timeout_seconds=2)).answers == {"right": 8}


def test_nobody_listens(requests):
    async def load(connect):
        nowhere = functools.partial(HttpConnection.open, "127.0.0.1", 1, "/")
        return await closed_loop(nowhere, requests, 2, Limits(seconds=5, count=6))

    assert against(Stub(right), load).answers == {"disconnected": 6}


def test_silence_ends_in_time(requests):
    async def silent(rows):
        await asyncio.sleep(20)

    outcome = against(Stub(silent), closed(requests, 4, timeout_seconds=0.1))
    assert outcome.answers == {"timeout": 4}


def test_an_open_loop_does_not_wait_for_answers(requests):
    """All are sent while the server holds back its first answer until the last has come."""
    waiting = []
    everyone = asyncio.Event()

    async def together(rows):
        waiting.append(rows)
        if len(waiting) == 20:
            everyone.set()
        await everyone.wait()
        return right(rows)

    def load(connect):
        return open_loop(connect, requests, 500, Limits(seconds=20, count=20))

    assert against(Stub(together), load).answers == {"right": 20}


def test_an_open_loop_says_what_it_could_not_send(requests):
    async def late(rows):
        await asyncio.sleep(1)
        return right(rows)

    def load(connect):
        limits = Limits(seconds=20, count=20)
        return open_loop(connect, requests, 2000, limits, most_connections=5)

    assert against(Stub(late), load).answers == {"right": 5, "unsent": 15}


def test_the_warm_up_is_left_out(requests):
    stub = Stub(right)
    outcome = against(stub, closed(requests, 20, warm_up_seconds=0.2))
    # Those that were under way at its end are counted as well.
    assert 20 <= outcome.answers["right"] <= 24
    assert stub.answered > 24
    assert len(outcome.latencies) == outcome.answers["right"]


def test_slow_clients_are_answered(requests):
    def load(connect):
        return slow_clients(connect, requests, 3, 0.3, parts=5, pause_seconds=0.01)

    answers = against(Stub(right), load)
    assert answers["right"] >= 3
    assert set(answers) == {"right"}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_clients_that_leave(requests, share):
    stub = Stub(right)

    def load(connect):
        return leaving_clients(connect, requests, 3, 0.2, share_sent=share)

    answers = against(stub, load)
    assert answers["left"] >= 3
    assert set(answers) == {"left"}
    assert bool(stub.answered) == (share == 1)


def test_a_flood_counts_all(requests):
    stub = Stub(lambda rows: right(rows) if stub.answered < 10 else (429, {}))
    outcome = against(stub, lambda connect: flood(connect, requests, 50))
    assert outcome.answers == {"right": 10, "429": 40}


def test_percentiles_are_latencies_that_were_seen():
    outcome = Outcome(2.0, np.arange(1, 101) / 1000, {"right": 100})
    assert [outcome.percentile_ms(p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert outcome.mean_ms == pytest.approx(50.5)
    summary = outcome.summary()
    assert (summary["p50_ms"], summary["p99_ms"], summary["per_second"]) == (50, 99, 50)


def test_nothing_answered_has_no_latency():
    outcome = Tally().outcome(1.0)
    assert np.isnan(outcome.mean_ms)
    assert np.isnan(outcome.percentile_ms(99))
    assert outcome.per_second == 0


def test_examples_that_are_answered_alike_are_refused():
    with pytest.raises(ValueError, match="a wrong one would not be seen"):
        Examples(np.zeros((2, 1)), np.array([[0.5, 0.5], [0.5, 0.50001]]))


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_dialects_ask_with_the_example(name):
    asked = json.loads(DIALECTS[name].body(np.array([[1, 2], [3, 4]])))
    if name == "v2":
        (tensor,) = asked["inputs"]
        assert (tensor["shape"], tensor["data"]) == ([2, 2], [1, 2, 3, 4])
    else:
        assert asked == {"instances": [[1, 2], [3, 4]]}
