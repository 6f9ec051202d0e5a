"""Misbehaving clients: slow clients, clients that disconnect, and floods.

Each runs for some seconds and counts its responses. `benchmarks.serving.loads` measures what other
clients see at the same time.
"""

import asyncio
import collections
import time
from collections.abc import Callable

from benchmarks.serving.connections import HttpConnection
from benchmarks.serving.examples import Requests
from benchmarks.serving.loads import Client, Connect
from benchmarks.serving.outcomes import RIGHT, WRONG, Outcome, Tally

# Answers, by kind, as `Outcome.answers`; "left" for requests whose answer was not waited for.
Answers = collections.Counter


async def slow_clients(
    connect: Connect,
    requests: Requests,
    clients: int,
    seconds: float,
    *,
    parts: int = 10,
    pause_seconds: float = 0.1,
    timeout_seconds: float = 30.0,
) -> Answers:
    """Runs clients that send each request in parts, with pauses between them.

    A server may reject them (408) or close the connection. Any response must be correct.
    """

    async def ask(connection, index):
        message = connection.message(requests.bodies[index])
        size = -(-len(message) // parts)
        for first in range(0, len(message), size):
            connection.send(message[first : first + size])
            await asyncio.sleep(pause_seconds)
        status, body = await asyncio.wait_for(connection.answer(), timeout_seconds)
        if status != "200":
            return status
        return RIGHT if requests.is_right(index, body) else WRONG

    return await _repeat(connect, len(requests), clients, seconds, ask)


async def leaving_clients(
    connect: Connect,
    requests: Requests,
    clients: int,
    seconds: float,
    *,
    share_sent: float = 0.5,
    pause_seconds: float = 0.02,
) -> Answers:
    """Runs clients that disconnect after a fraction of a request; 1 sends all of it.

    After a whole request, the server may notice the disconnect or compute in vain.
    """

    async def ask(connection, index):
        message = connection.message(requests.bodies[index])
        connection.send(message[: max(1, int(len(message) * share_sent))])
        await asyncio.sleep(pause_seconds)
        return "left"

    return await _repeat(connect, len(requests), clients, seconds, ask)


async def flood(
    connect: Connect, requests: Requests, number: int, timeout_seconds: float = 30.0
) -> Outcome:
    """Sends concurrent requests, each on its own connection; 429 is a valid response."""
    tally = Tally()
    clients = [Client(connect, requests, tally, timeout_seconds) for _ in range(number)]
    began = time.perf_counter()
    await asyncio.gather(
        *(client.ask(index % len(requests)) for index, client in enumerate(clients))
    )
    for client in clients:
        client.close()
    return tally.outcome(time.perf_counter() - began)


async def _repeat(connect, examples, clients, seconds, ask: Callable) -> Answers:
    """Sends requests until the time is over, each on a new connection."""
    answers: Answers = collections.Counter()
    end = time.perf_counter() + seconds

    async def run(first):
        index = first
        while time.perf_counter() < end:
            answers[await _once(connect, ask, index % examples)] += 1
            index += clients

    await asyncio.gather(*(run(first) for first in range(clients)))
    return answers


async def _once(connect, ask, index):
    connection: HttpConnection | None = None
    try:
        connection = await connect()
        return await ask(connection, index)
    except TimeoutError:
        return "timeout"
    except OSError:
        await asyncio.sleep(0.001)
        return "disconnected"
    finally:
        if connection:
            connection.close()
