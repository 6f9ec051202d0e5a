"""Soak test: long load while versions change, workers are killed, and clients misbehave.

    story = await soak(server, directory, requests, Plan(count=200_000))
    story.steady.errors, story.memory

What the steady clients see is what counts: each request that the server takes is answered rightly,
whatever happens background it.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time
import urllib.request

import psutil

from benchmarks.serving.connections import HttpConnection
from benchmarks.serving.examples import Requests
from benchmarks.serving.loads import Client
from benchmarks.serving.misbehaving import flood, leaving_clients, slow_clients
from benchmarks.serving.outcomes import RIGHT, Outcome, Tally
from benchmarks.serving.servers import Server

_SAMPLE_SECONDS = 1.0
# A rejected client retries after this time, sooner than Retry-After, to keep the load up.
_AGAIN_SECONDS = 0.05
_LINE_SECONDS = 10.0
# Time limit for a new version to be served.
_LOAD_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Length and events of a soak test.

    Attributes:
        count: correct responses to reach; more if some kind of event has not occurred yet.
        clients: number of steady clients.
        pause_seconds: seconds between events.
        flood_size: number of connections of a flood.
        seed: seed of the order of events.
        events: that are drawn from; each comes once before any comes twice.
    """

    count: int = 200_000
    clients: int = 48
    pause_seconds: float = 3.0
    flood_size: int = 1200
    seed: int = 0
    events: tuple[str, ...] = ("swap", "kill", "slow", "leave", "leave_late", "flood")


@dataclasses.dataclass
class Story:
    """Result of a soak test.

    Attributes:
        steady: outcome of the steady clients.
        others: responses to misbehaving clients, by kind of event.
        events: number of events of each kind.
        memory: pairs of (correct responses so far, bytes of all processes of the server).
    """

    steady: Outcome
    others: dict[str, collections.Counter]
    events: collections.Counter
    memory: list[tuple[int, int]]


async def soak(server: Server, directory: pathlib.Path, requests: Requests, plan: Plan) -> Story:
    """Runs a soak test.

    Args:
        server: server with worker processes.
        directory: versions of the served model; new versions are copies of the first.
        requests: requests for the model.
        plan: length and events.
    """
    path = f"/v1/models/{directory.name}:predict"
    connect = functools.partial(HttpConnection.open, "127.0.0.1", server.port, path)
    tally, events = Tally(), _Events(server, directory, connect, requests, plan)
    memory: list[tuple[int, int]] = []
    began = time.perf_counter()
    background = [
        asyncio.ensure_future(each) for each in (events.run(), _watch(server, tally, memory))
    ]
    indices = itertools.cycle(range(len(requests)))

    def ended():
        enough = tally.answers[RIGHT] >= plan.count and events.each_came
        return enough or any(task.done() for task in background)

    steady = [_steady(connect, requests, tally, ended, indices) for _ in range(plan.clients)]
    await asyncio.gather(*steady)
    for task in background:
        if task.done():
            task.result()  # raises what ended it
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    outcome = tally.outcome(time.perf_counter() - began)
    return Story(outcome, events.answers, events.number, memory)


async def _steady(connect, requests, tally, ended, indices):
    client = Client(connect, requests, tally, timeout_seconds=60.0)
    while not ended():
        if await client.ask(next(indices)) != RIGHT:
            await asyncio.sleep(_AGAIN_SECONDS)
    client.close()


async def _watch(server, tally, memory):
    shown = time.monotonic()
    while True:
        memory.append((tally.answers[RIGHT], server.memory()))
        if time.monotonic() - shown > _LINE_SECONDS:
            shown = time.monotonic()
            answers = dict(tally.answers)
            print(f"{answers}, {memory[-1][1] / 1e6:.0f} MB", file=sys.stderr, flush=True)
        await asyncio.sleep(_SAMPLE_SECONDS)


class _Events:
    def __init__(self, server, directory, connect, requests, plan):
        self._server, self._directory, self._plan = server, directory, plan
        self._connect, self._requests = connect, requests
        self._versions = itertools.count(2)
        self.number: collections.Counter[str] = collections.Counter()
        self.answers: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)

    @property
    def each_came(self) -> bool:
        """Returns whether events of each kind have occurred and ended."""
        return all(self.number[kind] for kind in self._plan.events)

    async def run(self):
        order = random.Random(self._plan.seed)
        while True:
            kinds = list(self._plan.events)
            order.shuffle(kinds)
            for kind in kinds:
                await asyncio.sleep(self._plan.pause_seconds)
                answers = await getattr(self, f"_{kind}")()
                self.number[kind] += 1
                self.answers[kind].update(answers or {})

    async def _swap(self):
        """Replaces the version by a copy, written atomically as `export` does."""
        number = next(self._versions)
        draft = self._directory / f".writing-{number}"
        old = max(int(each.name) for each in self._directory.iterdir() if each.name.isdecimal())
        shutil.copytree(self._directory / str(old), draft)
        os.rename(draft, self._directory / str(number))
        await asyncio.to_thread(self._wait_for, number)
        shutil.rmtree(self._directory / str(old))

    def _wait_for(self, version):
        url = f"http://127.0.0.1:{self._server.port}/v1/models/{self._directory.name}"
        end = time.monotonic() + _LOAD_SECONDS
        while time.monotonic() < end:
            with urllib.request.urlopen(url, timeout=30) as answer:
                states = json.load(answer)["model_version_status"]
            if {"version": str(version), "state": "AVAILABLE"}.items() <= states[-1].items():
                return
            time.sleep(0.2)
        raise RuntimeError(f"version {version} is not served after {_LOAD_SECONDS:g} s")

    async def _kill(self):
        """Kills a random worker process, once there is one: the last may be on its way."""
        while not (workers := self._server.workers()):
            await asyncio.sleep(_AGAIN_SECONDS)
        with contextlib.suppress(psutil.NoSuchProcess):
            random.choice(workers).send_signal(signal.SIGKILL)

    async def _slow(self):
        return await slow_clients(self._connect, self._requests, 20, self._plan.pause_seconds)

    async def _leave(self):
        return await leaving_clients(self._connect, self._requests, 20, self._plan.pause_seconds)

    async def _leave_late(self):
        return await leaving_clients(
            self._connect, self._requests, 20, self._plan.pause_seconds, share_sent=1.0
        )

    async def _flood(self):
        return (await flood(self._connect, self._requests, self._plan.flood_size)).answers
