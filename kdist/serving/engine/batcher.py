"""Dynamic batcher: gathers concurrent requests into batches, inside an event loop.

    batcher = Batcher(model_function, BatchSettings(0.002, max_batch=32), sizes=[1, 8, 32])
    outputs = await batcher({"images": images})      # the rows of one request
    await batcher.close()

A batch starts when a device is free and the batch is full or its oldest request has waited for the
timeout. `kdist.serving.policy.simulation` simulates the same rule. Several models may share a
`DevicePool`. Imports no TensorFlow.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from kdist.serving.core.errors import BadInput, Overloaded
from kdist.serving.core.requests import Arrays, count_rows, pad_rows
from kdist.serving.core.settings import BatchSettings
from kdist.serving.policy.load import LoadMonitor

# Polling interval, while closing, for devices that another model uses.
_POLL_SECONDS = 0.005


class DevicePool:
    """Devices that several batchers share, in the order in which they asked for one.

    `count` batches are computed at the same time.
    """

    def __init__(self, count: int = 1):
        self.free = count
        self.threads = concurrent.futures.ThreadPoolExecutor(count, "kdist-serving")
        self._callbacks: dict[Callable[[], None], None] = {}  # an ordered set

    def call_when_free(self, function: Callable[[], None]) -> None:
        """Calls a function once, when a batch has ended."""
        self._callbacks.setdefault(function)

    def release(self) -> None:
        """Marks a device as free, and calls the functions that wait for one."""
        self.free += 1
        while self.free and self._callbacks:
            function = next(iter(self._callbacks))
            del self._callbacks[function]
            function()

    def close(self) -> None:
        """Ends the threads. No batch can be computed afterwards."""
        self.threads.shutdown()


@dataclasses.dataclass
class _Request:
    arrays: Arrays
    rows: int
    requests: int  # 1, or 0 for a part of a large request that does not end it
    answer: asyncio.Future
    since: float
    shape: tuple  # without the rows; a batch holds requests of equal shapes


class Batcher:
    """Dynamic batcher for one signature of a model version.

    Args:
        compute: function of named arrays `(rows, …)` that returns named arrays with the same
            number of rows. Called in a thread.
        settings: batch settings; the attribute may be changed at any time.
        sizes: sizes that `compute` is called with, ascending; smaller batches are padded with
            copies of a row. Defaults to any size.
        max_waiting: rows in the queue (`waiting_rows`) before requests are rejected.
        devices: pool that other batchers use as well. Defaults to an own pool of one device.
        on_batch: called with (rows, padded rows, seconds) after each batch.
        load: monitor that is notified of requests and batches.
    """

    def __init__(
        self,
        compute: Callable[[Arrays], Arrays],
        settings: BatchSettings,
        sizes: Sequence[int] | None = None,
        max_waiting: int = 1024,
        devices: DevicePool | None = None,
        on_batch: Callable[[int, int, float], None] | None = None,
        load: LoadMonitor | None = None,
    ):
        self.settings = settings
        self.waiting_rows = 0
        self._compute, self._sizes = compute, sizes
        self._max_waiting = max_waiting
        self._queue: collections.deque[_Request] = collections.deque()
        self._devices, self._own_devices = devices or DevicePool(), devices is None
        self._on_batch, self._load = on_batch, load
        self._is_scheduled = False
        self._in_flight: set[asyncio.Task] = set()
        self._blocked_since: float | None = None  # by batches of other models
        self._timer: asyncio.TimerHandle | None = None
        self._row_seconds = 0.0  # time per row in the last batch
        self._closed = False

    async def __call__(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Returns the outputs for the rows of one request.

        A request that is cancelled, by a timeout or otherwise, is left out of later batches. Raises
        ValueError if arrays differ in their number of rows or have more than the queue holds,
        Overloaded if the queue is full or the batcher is closed, and any error that `compute`
        raises for these rows alone.
        """
        rows = count_rows(arrays)
        self.check_room(rows)
        size = self.settings.max_batch
        if rows <= size:
            return await self._enqueue(arrays, rows)
        parts = [{n: a[i : i + size] for n, a in arrays.items()} for i in range(0, rows, size)]
        # The last part ends the request, which counts once.
        counted = [0] * (len(parts) - 1) + [1]
        answers = await asyncio.gather(
            *(self._enqueue(p, count_rows(p), n) for p, n in zip(parts, counted, strict=True))
        )
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    async def close(self):
        """Rejects new requests, and returns when all queued requests have been answered."""
        self._closed = True
        self._start_if_due()
        while self._queue or self._in_flight:
            if self._in_flight:
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            else:  # another model uses the devices
                await asyncio.sleep(_POLL_SECONDS)
        if self._own_devices:
            self._devices.close()

    def check_room(self, rows: int = 1) -> None:
        """Raises the error of a call if the queue has no room for the rows."""
        retry_after = self.waiting_rows * self._row_seconds
        if self._closed:
            raise Overloaded("the server is ending", retry_after, ending=True)
        if rows > self._max_waiting:
            raise ValueError(
                f"a request of {rows:,} rows: {self._max_waiting:,} may wait at a time; send fewer "
                "rows per request"
            )
        if self.waiting_rows + rows > self._max_waiting:
            if self._load:
                self._load.record_rejection(rows)
            raise Overloaded(
                f"the queue is full ({self.waiting_rows} of {self._max_waiting} rows); retry later",
                retry_after,
            )

    async def _enqueue(self, arrays, rows, requests=1):
        loop = asyncio.get_running_loop()
        shape = tuple(array.shape[1:] for array in arrays.values())
        answer, now = loop.create_future(), time.monotonic()
        request = _Request(arrays, rows, requests, answer, now, shape)
        self._queue.append(request)
        self.waiting_rows += rows
        if self._load:
            self._load.record_arrival(rows, requests)
        if not self._is_scheduled:
            # Scheduled after callbacks that are already pending, so that a batch includes them.
            self._is_scheduled = True
            loop.call_soon(self._start_scheduled)
        return await answer

    def _start_scheduled(self):
        self._is_scheduled = False
        self._start_if_due()

    def _start_if_due(self):
        """Starts a batch if the conditions hold, or schedules the next check."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._queue and self._queue[0].answer.done():
            self._record_removal(self._queue.popleft())
        if not self._queue:
            return
        now = time.monotonic()
        if not self._devices.free:
            if not self._in_flight and self._blocked_since is None:
                self._blocked_since = now
            self._devices.call_when_free(self._start_if_due)
            return
        waited = 0.0 if self._blocked_since is None else now - self._blocked_since
        self._blocked_since = None
        remaining = self._queue[0].since + self.settings.timeout_seconds - now
        loop = asyncio.get_running_loop()
        if remaining > 0 and self.waiting_rows < self.settings.max_batch and not self._closed:
            self._timer = loop.call_later(remaining, self._start_if_due)
            return
        self._devices.free -= 1
        task = loop.create_task(self._serve(self._take_batch(), waited))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        if self._queue:
            self._start_if_due()

    def _take_batch(self):
        """Removes the oldest requests that fit into a batch; drops cancelled ones."""
        batch, rows, other_shapes = [], 0, []
        while self._queue:
            request = self._queue[0]
            if not request.answer.done():
                if batch and rows + request.rows > self.settings.max_batch:
                    break
                if batch and request.shape != batch[0].shape:
                    other_shapes.append(self._queue.popleft())
                    continue
                batch.append(request)
                rows += request.rows
            self._record_removal(self._queue.popleft())
        self._queue.extendleft(reversed(other_shapes))
        return batch

    def _record_removal(self, request):
        self.waiting_rows -= request.rows
        if self._load and request.answer.done():
            self._load.record_departure(request.requests)

    async def _serve(self, batch, waited):
        try:
            await self._answer(batch, waited)
        finally:
            # Queues up behind other models that wait for a device.
            if self._queue:
                self._blocked_since = time.monotonic()
                self._devices.call_when_free(self._start_if_due)
            self._devices.release()

    async def _answer(self, batch, waited=0.0):
        """Computes a batch. If that fails, computes parts, so that no request harms another.

        The parts are halves if the model rejects rows, which isolates them fastest. After other
        errors the parts are single requests, as each failure may take long.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        try:
            result = await loop.run_in_executor(self._devices.threads, self._compute_batch, batch)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            pending = [request for request in batch if not request.answer.done()]
            for request in batch:
                if request.answer.done():
                    self._fail(request, error)
            size = max(1, len(pending) // 2) if isinstance(error, BadInput) else 1
            for first in range(0, len(pending), size):
                await self._answer(pending[first : first + size])
            return
        self._complete(batch, *result, time.monotonic() - began, waited)

    def _complete(self, batch, outputs, size, seconds, held_seconds, waited):
        rows = sum(each.rows for each in batch)
        self._row_seconds = held_seconds / rows
        first = 0
        for request in batch:
            if not request.answer.done():
                last = first + request.rows
                request.answer.set_result({n: a[first:last] for n, a in outputs.items()})
            first += request.rows
        if self._load:
            # Includes the thread hand-off, which takes as long as a small model.
            requests = sum(each.requests for each in batch)
            self._load.record_batch(rows, held_seconds, requests, waited)
        if self._on_batch:
            self._on_batch(rows, size, seconds)

    def _fail(self, request, error):
        if self._load:
            self._load.record_departure(request.requests)
        if not request.answer.done():
            request.answer.set_exception(error)

    def _compute_batch(self, batch):
        """Returns (outputs, padded rows, seconds). Runs in a thread of the pool."""
        rows = sum(request.rows for request in batch)
        size = next((size for size in self._sizes or () if size >= rows), rows)
        inputs = {
            name: pad_rows([request.arrays[name] for request in batch], size - rows)
            for name in batch[0].arrays
        }
        began = time.monotonic()
        outputs = self._compute(inputs)
        seconds = time.monotonic() - began
        for name, output in outputs.items():
            if np.ndim(output) < 1 or len(output) != size:
                raise ValueError(
                    f"the output {name!r} has the shape {np.shape(output)} for {size} rows: a "
                    "model served in batches must return one row per input row"
                )
        return outputs, size, seconds
