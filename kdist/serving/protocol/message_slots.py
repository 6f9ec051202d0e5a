"""Bound on the gRPC messages that are received at the same time, of sizes not known before."""

import asyncio
from collections.abc import Awaitable, Callable

from kdist.serving.core.errors import RequestError
from kdist.serving.core.settings import ServerLimits

# A message that takes longer is large, or its client is slow or silent.
_QUICK_SECONDS = 0.25
_RETRY_SECONDS = 1.0


class MessageSlots:
    """Slots for messages, each of which may have up to `limits.body_bytes`.

    gRPC buffers little of a message until the server asks for it, and then all of it. The size is
    known only afterwards, so as many messages are received at once as would fit if they were as
    large as allowed. Half of the slots are for messages that have just begun. A message that is not
    complete soon moves to the other half, or is rejected if none is free there: clients that send
    nothing hold up slow clients, and no others. `on_rejected` is called with "messages".
    """

    def __init__(self, limits: ServerLimits, on_rejected: Callable[[str], None]):
        half = max(1, limits.all_bodies_bytes // limits.body_bytes // 2)
        self._quick, self._free_slow = asyncio.Semaphore(half), half
        self._waiting, self._limits, self._on_rejected = 0, limits, on_rejected

    async def receive(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the message that `read` receives; raises RequestError if it does not arrive."""
        if self._quick.locked():
            await self._wait_for_slot()
        else:
            await self._quick.acquire()
        is_slow, loop = False, asyncio.get_running_loop()

        def leave_quick_slot():
            nonlocal is_slow
            if self._free_slow:
                is_slow = True
                self._free_slow -= 1
                self._quick.release()
            remaining = max(0.0, self._limits.body_seconds - _QUICK_SECONDS) if is_slow else 0.0
            limit.reschedule(loop.time() + remaining)

        timer = loop.call_later(_QUICK_SECONDS, leave_quick_slot)
        try:
            async with asyncio.timeout(None) as limit:  # until `leave_quick_slot`
                return await read()
        except TimeoutError as error:
            raise self._failure(is_slow) from error
        finally:
            timer.cancel()
            if is_slow:
                self._free_slow += 1
            else:
                self._quick.release()

    async def _wait_for_slot(self):
        if self._waiting >= self._limits.connections:
            raise self._rejection("too many requests wait to be read; try again later")
        self._waiting += 1
        try:
            await self._quick.acquire()
        finally:
            self._waiting -= 1

    def _failure(self, is_slow):
        if is_slow:
            seconds = self._limits.body_seconds
            return RequestError("slow", f"the message did not arrive within {seconds:g} s")
        return self._rejection("other large or slow messages are being received; try again later")

    def _rejection(self, text):
        self._on_rejected("messages")
        return RequestError("overloaded", text, _RETRY_SECONDS)
