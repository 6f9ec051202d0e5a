"""Clients that load a server, in a closed or an open loop.

    connect = functools.partial(HttpConnection.open, "127.0.0.1", 8501, path)
    outcome = await closed_loop(connect, requests, clients=32, limits=Limits(seconds=5))
    outcome = await open_loop(connect, requests, rate=200, limits=Limits(seconds=5, count=500))

Requests are of the examples in turn, so that no two that wait at a time are of the same one.
"""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

import numpy as np

from benchmarks.serving.examples import Requests
from benchmarks.serving.outcomes import RIGHT, WRONG, Outcome, Tally

Connect = Callable[[], Awaitable]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits that end a load.

    Attributes:
        seconds: seconds of sending, without the warm-up.
        count: largest number of requests, without the warm-up; None for no limit.
        warm_up_seconds: seconds at the start that are not counted. Defaults to 0.
        timeout_seconds: after which an answer is no longer waited for. Defaults to 30.
    """

    seconds: float
    count: int | None = None
    warm_up_seconds: float = 0.0
    timeout_seconds: float = 30.0


class Client:
    """Client that counts responses, and reopens its connection when it has closed."""

    def __init__(self, connect: Connect, requests: Requests, tally: Tally, timeout_seconds: float):
        self._connect, self._requests, self._tally = connect, requests, tally
        self._timeout = timeout_seconds
        self._connection = None

    async def ask(self, index: int, since: float | None = None) -> str:
        """Requests a prediction, and returns the kind of response that `Outcome.answers` counts.

        Args:
            index: of the example.
            since: due time of the request (`time.perf_counter`). Defaults to now.
        """
        since = time.perf_counter() if since is None else since
        try:
            kind = await asyncio.wait_for(self._answer(index), self._timeout)
        except TimeoutError:
            self.close()
            kind = "timeout"
        except OSError:
            self.close()
            kind = "disconnected"
        self._tally.add(kind, time.perf_counter() - since)
        return kind

    def close(self):
        """Closes the connection."""
        if self._connection:
            self._connection.close()
        self._connection = None

    async def _answer(self, index):
        if not self._connection or not self._connection.is_open:
            self.close()
            self._connection = await self._connect()
        status, body = await self._connection(self._requests.bodies[index])
        if status != "200":
            return status
        return RIGHT if self._requests.is_right(index, body) else WRONG


async def closed_loop(
    connect: Connect, requests: Requests, clients: int, limits: Limits
) -> Outcome:
    """Runs clients that each send a request as soon as the last is answered."""
    tally = Tally()
    indices = itertools.cycle(range(len(requests)))
    clock = _Clock(limits, tally)

    async def run():
        client = Client(connect, requests, tally, limits.timeout_seconds)
        while clock.goes_on():
            # Who is turned away must not ask again at once, for ever.
            if await client.ask(next(indices)) != RIGHT:
                await asyncio.sleep(0.001)
        client.close()

    await asyncio.gather(*(run() for _ in range(clients)))
    return clock.outcome()


async def open_loop(
    connect: Connect,
    requests: Requests,
    rate: float,
    limits: Limits,
    *,
    most_connections: int = 512,
    seed: int = 0,
) -> Outcome:
    """Sends requests as a Poisson process, whether or not earlier ones were answered.

    Args:
        connect: opens a connection.
        requests: what is sent.
        rate: mean number of requests per second.
        limits: when it ends.
        most_connections: that are open at a time; requests that find none are "unsent".
        seed: of the times between requests.
    """
    tally = Tally()
    clock = _Clock(limits, tally)
    idle, busy = [], set()

    async def ask(index, due):
        client = idle.pop() if idle else Client(connect, requests, tally, limits.timeout_seconds)
        await client.ask(index, due)
        idle.append(client)

    for index, due in zip(
        itertools.cycle(range(len(requests))), _poisson(rate, seed), strict=False
    ):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if not clock.goes_on():
            break
        if len(busy) >= most_connections:
            tally.add("unsent")
            continue
        task = asyncio.ensure_future(ask(index, due))
        busy.add(task)
        task.add_done_callback(busy.discard)
    await asyncio.gather(*busy)
    for client in idle:
        client.close()
    return clock.outcome()


def _poisson(rate: float, seed: int) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    due = time.perf_counter()
    while True:
        due += generator.exponential(1 / rate)
        yield due


class _Clock:
    """Clock that ends the warm-up, and then the load."""

    def __init__(self, limits, tally):
        self._limits, self._tally = limits, tally
        self._sent, self._warm = 0, False
        self._restart()

    def goes_on(self):
        """Counts a request, and returns whether it may be sent."""
        passed = time.perf_counter() - self._began
        if not self._warm and passed >= self._limits.warm_up_seconds:
            self._warm, passed = True, 0.0
            self._restart()
        if not self._warm:
            return True
        self._sent += 1
        count = self._limits.count
        return passed < self._limits.seconds and (count is None or self._sent <= count)

    def outcome(self):
        seconds = time.perf_counter() - self._began
        return self._tally.outcome(seconds, (time.process_time() - self._cpu_began) / seconds)

    def _restart(self):
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._tally.clear()
