"""Requests gathered into batches, inside an event loop.

    batcher = Batcher(model_function, BatchSettings(0.002, max_batch=32), sizes=[1, 8, 32])
    outputs = await batcher({"images": images})      # one request's rows, in good company
    await batcher.close()

A batch is started when a device is free, and it is full or its oldest request has waited for the
timeout: as `kdist.serving.simulation` simulates it. Several models may share `Devices`. Imports no
TensorFlow.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.load import Load
from kdist.serving.rows import filled_up, rows_of
from kdist.serving.settings import BatchSettings
from kdist.serving.shared_devices import Devices

Arrays = Mapping[str, np.ndarray]

# Between looks whether another model has left the devices, at the end.
_LOOK_SECONDS = 0.005


class BadInput(ValueError):
    """Rows that a model cannot compute, as its own operations say."""


class Overloaded(RuntimeError):
    """So much waits that a request is not taken.

    Attributes:
        retry_after_seconds: by then, what waits now is served.
        ending: whether the server ends, so that no later request is taken either.
    """

    def __init__(self, message: str, retry_after_seconds: float, ending: bool = False):
        super().__init__(message)
        self.retry_after_seconds, self.ending = retry_after_seconds, ending


@dataclasses.dataclass
class _Request:
    arrays: Arrays
    rows: int
    answer: asyncio.Future
    since: float
    shape: tuple  # but for the rows: only equal ones can be joined


class Batcher:
    """Has requests computed together.

    Args:
        compute: a function of named arrays (rows, …) that gives named arrays of as many rows. It
            is called in a thread.
        settings: of batches.
        sizes: rows that `compute` is called with, ascending; fewer are filled up with copies of a
            row. None: any number.
        max_waiting: rows that may wait; with more, requests are refused. Defaults to 1,024.
        devices: that other batchers use as well; by default one of its own.
        on_batch: called with (rows, rows with those that fill up, seconds) after each batch.
        load: is told what comes and goes.

    Attributes:
        settings: may be changed at any time.
        waiting_rows: of requests that are in no batch yet.
    """

    def __init__(
        self,
        compute: Callable[[Arrays], Arrays],
        settings: BatchSettings,
        sizes: Sequence[int] | None = None,
        max_waiting: int = 1024,
        devices: Devices | None = None,
        on_batch: Callable[[int, int, float], None] | None = None,
        load: Load | None = None,
    ):
        self.settings = settings
        self.waiting_rows = 0
        self._compute, self._sizes = compute, sizes
        self._max_waiting = max_waiting
        self._queue: collections.deque[_Request] = collections.deque()
        self._devices, self._own_devices = devices or Devices(), devices is None
        self._on_batch, self._load = on_batch, load
        self._is_soon = False
        self._under_way: set[asyncio.Task] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._row_seconds = 0.0  # of the last batch
        self._closed = False

    async def __call__(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The outputs for one request's rows.

        Who stops waiting, by a timeout or otherwise, is left out of batches to come.

        Args:
            arrays: named, all with the same number of rows.

        Raises:
            ValueError: arrays of different numbers of rows, without rows, or with more than may
                wait.
            Overloaded: too much waits, or the batcher is closed.
            Exception: what `compute` raises for these rows alone.
        """
        rows = rows_of(arrays)
        self.check_room(rows)
        most = self.settings.max_batch
        if rows <= most:
            return await self._wait_for(arrays, rows)
        parts = [{n: a[i : i + most] for n, a in arrays.items()} for i in range(0, rows, most)]
        answers = await asyncio.gather(*(self._wait_for(p, rows_of(p)) for p in parts))
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    async def close(self):
        """Takes no more requests, and returns when all that wait have been answered."""
        self._closed = True
        self._start_if_due()
        while self._queue or self._under_way:
            if self._under_way:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            else:  # another model has the devices
                await asyncio.sleep(_LOOK_SECONDS)
        if self._own_devices:
            self._devices.close()

    def check_room(self, rows: int = 1) -> None:
        """Raises as a call does if so many rows are not taken now, or never."""
        after = self.waiting_rows * self._row_seconds
        if self._closed:
            raise Overloaded("the server is ending", after, ending=True)
        if rows > self._max_waiting:
            raise ValueError(
                f"a request of {rows:,} rows: {self._max_waiting:,} may wait at a time; send fewer "
                "in a request"
            )
        if self.waiting_rows + rows > self._max_waiting:
            if self._load:
                self._load.refused(rows)
            raise Overloaded(
                f"{self.waiting_rows} rows wait, of {self._max_waiting} that may: try again later",
                after,
            )

    async def _wait_for(self, arrays, rows):
        loop = asyncio.get_running_loop()
        shape = tuple(array.shape[1:] for array in arrays.values())
        request = _Request(arrays, rows, loop.create_future(), time.monotonic(), shape)
        self._queue.append(request)
        self.waiting_rows += rows
        if self._load:
            self._load.arrived(rows)
        if not self._is_soon:
            # After all requests that are there already: a batch has them as well.
            self._is_soon = True
            loop.call_soon(self._start_soon)
        return await request.answer

    def _start_soon(self):
        self._is_soon = False
        self._start_if_due()

    def _start_if_due(self):
        """Starts a batch, or sees to it that this is asked again in time."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._queue and self._queue[0].answer.done():
            self._left_out(self._queue.popleft())
        if not self._queue:
            return
        if not self._devices.free:
            self._devices.call_when_free(self._start_if_due)
            return
        left = self._queue[0].since + self.settings.timeout_seconds - time.monotonic()
        loop = asyncio.get_running_loop()
        if left > 0 and self.waiting_rows < self.settings.max_batch and not self._closed:
            self._timer = loop.call_later(left, self._start_if_due)
            return
        self._devices.free -= 1
        task = loop.create_task(self._serve(self._next_batch()))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if self._queue:
            self._start_if_due()

    def _next_batch(self):
        """The oldest requests that a batch can hold; those that nobody waits for are out."""
        batch, rows, other = [], 0, []
        while self._queue:
            request = self._queue[0]
            if not request.answer.done():
                if batch and rows + request.rows > self.settings.max_batch:
                    break
                if batch and request.shape != batch[0].shape:
                    other.append(self._queue.popleft())
                    continue
                batch.append(request)
                rows += request.rows
            self._left_out(self._queue.popleft())
        self._queue.extendleft(reversed(other))
        return batch

    def _left_out(self, request):
        self.waiting_rows -= request.rows
        if self._load and request.answer.done():
            self._load.left()

    async def _serve(self, batch):
        try:
            await self._answer(batch)
        finally:
            # To the end of the line, behind other models.
            if self._queue:
                self._devices.call_when_free(self._start_if_due)
            self._devices.release()

    async def _answer(self, batch):
        """Computes a batch; if that fails, parts of it, so that a request harms no other.

        Halves where the model refuses rows, as that ends soonest for all others; each by itself
        where more is wrong, as each failure may take long.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        try:
            result = await loop.run_in_executor(self._devices.threads, self._computed, batch)
        except Exception as error:
            if len(batch) == 1:
                self._failed(batch[0], error)
                return
            wanted = [request for request in batch if not request.answer.done()]
            for request in batch:
                if request.answer.done():
                    self._failed(request, error)
            most = max(1, len(wanted) // 2) if isinstance(error, BadInput) else 1
            for first in range(0, len(wanted), most):
                await self._answer(wanted[first : first + most])
            return
        self._done(batch, *result, time.monotonic() - began)

    def _done(self, batch, outputs, size, seconds, held_seconds):
        rows = sum(each.rows for each in batch)
        self._row_seconds = held_seconds / rows
        first = 0
        for request in batch:
            if not request.answer.done():
                last = first + request.rows
                request.answer.set_result({n: a[first:last] for n, a in outputs.items()})
            first += request.rows
        if self._load:
            # With the ways to the thread and back, which a small model takes as long for.
            self._load.batch_done(rows, held_seconds, len(batch))
        if self._on_batch:
            self._on_batch(rows, size, seconds)

    def _failed(self, request, error):
        if self._load:
            self._load.left()
        if not request.answer.done():
            request.answer.set_exception(error)

    def _computed(self, batch):
        """(outputs, rows that were computed, seconds), in a thread of the devices."""
        rows = sum(request.rows for request in batch)
        size = next((size for size in self._sizes or () if size >= rows), rows)
        inputs = {
            name: filled_up([request.arrays[name] for request in batch], size - rows)
            for name in batch[0].arrays
        }
        began = time.monotonic()
        outputs = self._compute(inputs)
        seconds = time.monotonic() - began
        for name, output in outputs.items():
            if np.ndim(output) < 1 or len(output) != size:
                raise ValueError(
                    f"the output {name!r} has the shape {np.shape(output)} for {size} rows: a "
                    "model that is served in batches gives a row for each row"
                )
        return outputs, size, seconds
