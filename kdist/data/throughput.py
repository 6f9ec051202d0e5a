"""Throughput of an input pipeline by itself, without a model."""

import dataclasses
import time
from collections.abc import Iterable

import tensorflow as tf

# First fraction of the batches, in which buffers fill and tf.data tunes its threads.
_WARM_UP_FRACTION = 0.3


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Measured throughput of a pipeline; returned by `measure`.

    Attributes:
        examples_per_second: examples per second after the warm-up batches.
        batches: number of batches of the measurement, without warm-up.
        first_batch_seconds: seconds until the first batch, including opening files.
        batch_bytes: size of one batch, in bytes.

    Example:

        found = kdist.data.measure(train)
        print(f"{found.examples_per_second:,.0f} examples/s")
    """

    examples_per_second: float
    batches: int
    first_batch_seconds: float
    batch_bytes: int


def measure(dataset: Iterable, seconds: float = 5.0) -> Throughput:
    """Measures how fast a pipeline produces batches.

    No training on the pipeline can be faster than this.

    Args:
        dataset: a `kdist.data.Pipeline`, or a batched `tf.data.Dataset`. A finite dataset is read
            once at most.
        seconds: duration of the measurement. Defaults to 5.

    Returns:
        A `Throughput`.

    Raises:
        ValueError: the dataset has fewer than two batches.

    Example:

        train, test = kdist.data.load("digits", batch=kdist.Batch(64))
        kdist.data.measure(train, seconds=2).examples_per_second
    """
    began = time.perf_counter()
    batches = iter(dataset)
    first = next(batches, None)
    first_batch_seconds = time.perf_counter() - began
    times, rows = [time.perf_counter()], [0]
    for batch in batches:
        times.append(time.perf_counter())
        rows.append(int(tf.nest.flatten(batch)[0].shape[0]))
        if times[-1] - times[0] >= seconds:
            break
    if first is None or len(times) < 2:
        raise ValueError("measuring a pipeline needs two batches or more; use a smaller batch size")
    begin = min(int(len(times) * _WARM_UP_FRACTION), len(times) - 2)
    duration = times[-1] - times[begin]
    parts = tf.nest.flatten(first, expand_composites=True)
    return Throughput(
        sum(rows[begin + 1 :]) / max(duration, 1e-9),
        len(times) - 1 - begin,
        first_batch_seconds,
        sum(part.numpy().nbytes for part in parts),
    )
