"""Bound on gRPC messages that are received at the same time."""

import asyncio

import pytest

from kdist.serving.core import requests
from kdist.serving.core.errors import RequestError
from kdist.serving.core.requests import MessageSlots
from kdist.serving.core.settings import ServerLimits


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(requests, "_QUICK_SECONDS", 0.01)


def slots(on_rejected=lambda reason: None, **limits):
    limits = {"body_bytes": 10, "all_bodies_bytes": 40, **limits}
    return MessageSlots(ServerLimits(**limits), on_rejected)


class Reads:
    """Messages that arrive when `end` is set; counts those that are awaited."""

    def __init__(self):
        self.end, self.now, self.most = asyncio.Event(), 0, 0

    async def __call__(self):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.end.wait()
            return b"slow"
        finally:
            self.now -= 1


async def quick_message():
    return b"quick"


def test_no_more_are_read_at_once_than_there_is_memory_for():
    async def main():
        reads, room = Reads(), slots()
        reads.end.set()
        answers = await asyncio.gather(*(room.receive(reads) for _ in range(50)))
        assert answers == [b"slow"] * 50
        reads.end.clear()
        tasks = [asyncio.create_task(room.receive(reads)) for _ in range(6)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {task.exception().kind for task in done} == {"overloaded"}
        assert reads.most == 4
        reads.end.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_silent_clients_keep_nobody_out():
    async def main():
        reads, rejected = Reads(), []
        room = slots(on_rejected=rejected.append)
        silent = [asyncio.create_task(room.receive(reads)) for _ in range(20)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(room.receive(quick_message), 20) == b"quick"
        # The first hold the slots of slow ones.
        errors = await asyncio.gather(*silent[2:], return_exceptions=True)
        assert {error.kind for error in errors} == {"overloaded"}
        assert await room.receive(quick_message) == b"quick"
        reads.end.set()
        assert await asyncio.gather(*silent[:2]) == [b"slow"] * 2
        assert rejected == ["messages"] * 18

    asyncio.run(main())


def test_slots_come_back_however_a_message_ends():
    async def fail():
        raise OSError("disconnected")

    async def main():
        room = slots(body_seconds=0.02)
        for _ in range(10):
            with pytest.raises(RequestError, match="did not arrive within 0.02 s"):
                await room.receive(Reads())
            with pytest.raises(OSError, match="disconnected"):
                await room.receive(fail)
            for seconds in (0, 0.012):
                task = asyncio.create_task(room.receive(Reads()))
                await asyncio.sleep(seconds)
                task.cancel()
                await asyncio.wait([task])
        assert (room._quick._value, room._free_slow, room._waiting) == (2, 2, 0)

    asyncio.run(main())


def test_requests_that_wait_to_be_read_are_limited():
    async def main():
        reads, room = Reads(), slots(connections=3)
        waiting = [asyncio.create_task(room.receive(reads)) for _ in range(5)]  # 2 are read
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="wait to be read"):
            await room.receive(quick_message)
        reads.end.set()
        await asyncio.wait(waiting)

    asyncio.run(main())
