"""The latency curve of a model, measured before it serves.

    curve = measure_curve(model_function, {"images": one_row}, sizes=[1, 8, 32])
    curve = await measure_served(batcher, {"images": one_row}, sizes=[1, 8, 32])

The second is what a request sees: it has the event loop's part of a batch in it, which for models
of a millisecond is most of the time. Imports no TensorFlow.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from kdist.serving.batcher import Arrays, Batcher
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.settings import BatchSettings

# More repetitions of a size tell no more; fewer are taken where a batch takes long.
_MOST_TIMES = 200
_LONG_SECONDS = 1.0  # for the rows of a batch to come together


def measure_curve(
    compute: Callable[[Arrays], Arrays],
    example: Arrays,
    sizes: Sequence[int],
    seconds: float = 4.0,
) -> LatencyCurve:
    """Times batches of each size; each size is called twice before, as it may be compiled.

    The sizes take turns, so that a slow phase of the machine hits all of them.

    Args:
        compute: a function of named arrays (rows, …).
        example: named arrays of at least one row; batches are made of copies of the first.
        sizes: rows of batches, ascending.
        seconds: for all sizes together, after the first calls; each is timed three times at least.

    Raises:
        ValueError: sizes that do not ascend from 1 on.
    """
    batches = {size: _copies(example, size) for size in sizes}
    for batch in [*batches.values(), *batches.values()]:
        compute(batch)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    end = time.perf_counter() + seconds
    while _goes_on(times, end):
        for size, batch in batches.items():
            began = time.perf_counter()
            compute(batch)
            times[size].append(time.perf_counter() - began)
    return LatencyCurve.of_times(times)


async def measure_served(
    batcher: Batcher, example: Arrays, sizes: Sequence[int], seconds: float = 4.0
) -> LatencyCurve:
    """Times batches of so many concurrent requests of one row each, until the last is answered.

    Args:
        batcher: without other load. Its settings are others afterwards.
        example: as for `measure_curve`, as are the others.
        sizes: of batches.
        seconds: for all sizes together.

    Raises:
        ValueError: sizes that do not ascend from 1 on.
    """
    row = _copies(example, 1)

    async def together(size):
        batcher.settings = BatchSettings(_LONG_SECONDS, size)  # it starts when it is full
        began = time.perf_counter()
        await asyncio.gather(*(batcher(row) for _ in range(size)))
        return time.perf_counter() - began

    for size in [*sizes, *sizes]:
        await together(size)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    end = time.perf_counter() + seconds
    while _goes_on(times, end):
        for size in sizes:
            times[size].append(await together(size))
    return LatencyCurve.of_times(times)


def _goes_on(times, end):
    done = min(map(len, times.values()), default=_MOST_TIMES)
    return done < 3 or (done < _MOST_TIMES and time.perf_counter() < end)


def _copies(example, size):
    return {name: np.repeat(array[:1], size, axis=0) for name, array in example.items()}
