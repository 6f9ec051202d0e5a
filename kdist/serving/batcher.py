"""Requests gathered into batches, inside an event loop.

    batcher = Batcher(model_function, BatchSettings(0.002, max_batch=32), sizes=[1, 8, 32])
    outputs = await batcher({"images": images})      # one request's rows, in good company
    await batcher.close()

A batch is started when the device is free, and it is full or its oldest request has waited for the
timeout: as `kdist.serving.simulation` simulates it. Imports no TensorFlow.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kdist.serving.settings import BatchSettings

Arrays = Mapping[str, np.ndarray]


class Overloaded(RuntimeError):
    """So much waits that a request is not taken.

    Attributes:
        retry_after_seconds: by then, what waits now is served.
    """

    def __init__(self, message: str, retry_after_seconds: float):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclasses.dataclass
class _Request:
    arrays: Arrays
    rows: int
    answer: asyncio.Future
    since: float


class Batcher:
    """Has requests computed together.

    Args:
        compute: a function of named arrays (rows, …) that gives named arrays of as many rows. It
            is called in a thread of its own, one call at a time.
        settings: of batches.
        sizes: rows that `compute` is called with, ascending; fewer are filled up with copies of a
            row. None: any number.
        max_waiting: rows that may wait; with more, requests are refused. Defaults to 1,024.

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
    ):
        self.settings = settings
        self.waiting_rows = 0
        self._compute, self._sizes = compute, sizes
        self._max_waiting = max_waiting
        self._queue: collections.deque[_Request] = collections.deque()
        self._device = concurrent.futures.ThreadPoolExecutor(1, "kdist-serving")
        self._under_way: asyncio.Task | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._row_seconds = 0.0  # of the last batch
        self._closed = False

    async def __call__(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The outputs for one request's rows.

        Who stops waiting, by a timeout or otherwise, is left out of batches to come.

        Args:
            arrays: named, all with the same number of rows.

        Raises:
            ValueError: arrays of different numbers of rows, or without rows.
            Overloaded: too much waits, or the batcher is closed.
            Exception: what `compute` raises for these rows alone.
        """
        rows = _rows_of(arrays)
        self._check_room(rows)
        most = self.settings.max_batch
        if rows <= most:
            return await self._wait_for(arrays, rows)
        parts = [{n: a[i : i + most] for n, a in arrays.items()} for i in range(0, rows, most)]
        answers = await asyncio.gather(*(self._wait_for(p, _rows_of(p)) for p in parts))
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    async def close(self):
        """Takes no more requests, and returns when all that wait have been answered."""
        self._closed = True
        while self._queue or self._under_way:
            if self._under_way:
                await asyncio.wait([self._under_way])
            self._start_if_due()
        self._device.shutdown()

    def _check_room(self, rows):
        after = self.waiting_rows * self._row_seconds
        if self._closed:
            raise Overloaded("the server is ending", after)
        # What is larger than all the room is taken when nothing else waits.
        if self.waiting_rows and self.waiting_rows + rows > self._max_waiting:
            raise Overloaded(
                f"{self.waiting_rows} rows wait, of {self._max_waiting} that may: try again later",
                after,
            )

    async def _wait_for(self, arrays, rows):
        loop = asyncio.get_running_loop()
        request = _Request(arrays, rows, loop.create_future(), time.monotonic())
        self._queue.append(request)
        self.waiting_rows += rows
        self._start_if_due()
        return await request.answer

    def _start_if_due(self):
        """Starts a batch, or sees to it that this is asked again in time."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._under_way:  # its end asks again
            return
        while self._queue and self._queue[0].answer.done():
            self._left_out(self._queue.popleft())
        if not self._queue:
            return
        left = self._queue[0].since + self.settings.timeout_seconds - time.monotonic()
        loop = asyncio.get_running_loop()
        if left > 0 and self.waiting_rows < self.settings.max_batch and not self._closed:
            self._timer = loop.call_later(left, self._start_if_due)
            return
        self._under_way = loop.create_task(self._serve(self._next_batch()))

    def _next_batch(self):
        """The oldest requests whose rows a batch can hold; those that nobody waits for are out."""
        batch, rows = [], 0
        while self._queue:
            if not self._queue[0].answer.done():
                if batch and rows + self._queue[0].rows > self.settings.max_batch:
                    break
                batch.append(self._queue[0])
                rows += self._queue[0].rows
            self._left_out(self._queue.popleft())
        return batch

    def _left_out(self, request):
        self.waiting_rows -= request.rows

    async def _serve(self, batch):
        try:
            await self._answer(batch)
        finally:
            self._under_way = None
            self._start_if_due()

    async def _answer(self, batch):
        """Computes a batch; if that fails, each request by itself, so that it harms no other."""
        loop = asyncio.get_running_loop()
        try:
            began = time.monotonic()
            outputs = await loop.run_in_executor(self._device, self._outputs_of, batch)
            self._row_seconds = (time.monotonic() - began) / sum(each.rows for each in batch)
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    await self._answer([request])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        first = 0
        for request in batch:
            if not request.answer.done():
                last = first + request.rows
                request.answer.set_result({n: a[first:last] for n, a in outputs.items()})
            first += request.rows

    def _outputs_of(self, batch):
        """In the device's thread."""
        rows = sum(request.rows for request in batch)
        size = next((size for size in self._sizes or () if size >= rows), rows)
        outputs = self._compute(
            {
                name: _filled_up([request.arrays[name] for request in batch], size - rows)
                for name in batch[0].arrays
            }
        )
        for name, output in outputs.items():
            if np.ndim(output) < 1 or len(output) != size:
                raise ValueError(
                    f"the output {name!r} has the shape {np.shape(output)} for {size} rows: a "
                    "model that is served in batches gives a row for each row"
                )
        return outputs


def _rows_of(arrays):
    rows = {name: len(array) if np.ndim(array) else None for name, array in arrays.items()}
    numbers = set(rows.values())
    if len(numbers) != 1 or not all(numbers):
        said = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ValueError(f"rows of a request: {said or 'none'}; give as many of each, one at least")
    return numbers.pop()


def _filled_up(parts, more):
    """One array of all rows, and so many copies of the first: zeros may be no possible input."""
    if more:
        parts = [*parts, np.repeat(parts[0][:1], more, axis=0)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
