"""Simulates a batching server: latency of requests by batch settings.

    outcome = simulate(curve, poisson(rate=400, count=20_000), BatchSettings(0.002, max_batch=32))
    outcome.mean_seconds, outcome.p99_seconds

There is one queue in order of arrival. A batch starts when a device is free and either `max_batch`
requests are queued or the oldest has waited for the timeout. While all devices are busy, requests
queue up whatever the timeout is. Arrival times, random or recorded, are in seconds, ascending.
Imports no TensorFlow.
"""

import dataclasses
import heapq
import os
import pathlib

import numpy as np

from kdist.serving.core.settings import BatchSettings
from kdist.serving.policy.latency_curve import LatencyCurve

# Fraction of the requests to ignore, as the queue is empty at the start.
_WARM_UP_FRACTION = 0.1
# Fraction of the capacity that counts as full. Closer to it, the queue depends on a few seconds.
_MAX_UTILIZATION = 0.98

# Rate within a burst / rate between bursts.
_BURST_FACTOR = 10.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a simulation, without the first tenth of the requests.

    Example:

        outcome = kdist.serving.simulate(curve, arrivals, kdist.serving.BatchSettings(0.002, 32))
        print(f"p99 {outcome.p99_seconds * 1e3:.1f} ms, device {outcome.device_share:.0%} busy")

    Attributes:
        mean_seconds: mean latency, from arrival to response.
        p50_seconds: median latency.
        p99_seconds: 99th percentile of the latency.
        batch_rows: mean rows of a batch.
        device_share: fraction of the time that a device computes.
        over_capacity: whether requests arrive faster than such batches can serve. The queue then
            grows without bound, and the latencies depend on the simulated time.
    """

    mean_seconds: float
    p50_seconds: float
    p99_seconds: float
    batch_rows: float
    device_share: float
    over_capacity: bool


def simulate(
    curve: LatencyCurve,
    arrivals: np.ndarray,
    settings: BatchSettings,
    overhead_seconds: float = 0.0,
    devices: int = 1,
) -> Outcome:
    """Simulates requests of one row each.

    Args:
        curve: latency curve of the device. Each batch time is drawn from its spread.
        arrivals: arrival times in seconds, ascending, of shape `(N,)`.
        settings: batch settings; `max_batch` must be within the curve.
        overhead_seconds: additional seconds per request, for reading and writing. Defaults to 0.
        devices: number of devices; each computes one batch at a time. Defaults to 1.

    Returns:
        An `Outcome` with latencies and device utilization.

    Raises:
        ValueError: there are fewer than two arrivals, or `max_batch` exceeds the curve.

    Example:

        >>> curve = LatencyCurve([1, 8], [0.004, 0.006])
        >>> outcome = simulate(curve, [0.0, 0.001, 0.002, 0.1], BatchSettings(0.0, 8))
        >>> round(outcome.p50_seconds, 4)
        0.006
    """
    if len(arrivals) < 2:
        raise ValueError(f"{len(arrivals)} arrivals: give two or more")
    if settings.max_batch > curve.largest:
        raise ValueError(
            f"max_batch={settings.max_batch}: the curve was measured up to {curve.largest}; "
            "measure larger batches, or use smaller ones"
        )
    batch_seconds = _batch_times(curve, len(arrivals))
    firsts, ends, computing = _run_batches(
        batch_seconds, np.asarray(arrivals, float), settings, devices
    )
    rows = np.diff(firsts)
    latency = np.repeat(ends, rows) - arrivals + overhead_seconds
    counted = latency[int(len(latency) * _WARM_UP_FRACTION) :]
    p50, p99 = np.percentile(counted, [50, 99])
    span = (max(ends) - arrivals[0]) * devices
    rate = (len(arrivals) - 1) / max(arrivals[-1] - arrivals[0], 1e-12)
    # By full batches: a long queue fills them, even if smaller ones are faster.
    capacity = devices * (settings.max_batch / curve.seconds(settings.max_batch))
    return Outcome(
        float(counted.mean()),
        float(p50),
        float(p99),
        float(rows.mean()),
        float(computing / span),
        bool(rate > _MAX_UTILIZATION * capacity),
    )


def _batch_times(curve, count):
    """Returns a function of rows that draws up to `count` batch times, equal for all settings."""
    means = curve.table()
    if len(curve.spread) == 1:
        return means.__getitem__
    ratios = iter(np.random.default_rng(0).choice(curve.spread, count))
    return lambda rows: means[rows] * next(ratios)


def _run_batches(batch_seconds, arrivals, settings, devices):
    """Returns (indices of each batch's first request and of the end, end times, total seconds)."""
    count, size = len(arrivals), settings.max_batch
    firsts, ends = [0], []
    free, first = [arrivals[0]] * devices, 0  # a heap of the times when devices are free
    computing = 0.0
    while first < count:
        # A free device starts with the last request of a full batch, or at the timeout.
        due = arrivals[first] + settings.timeout_seconds
        if first + size <= count:
            due = min(due, arrivals[first + size - 1])
        start = max(free[0], due)
        waiting = int(np.searchsorted(arrivals[first : first + size], start, side="right"))
        first += max(waiting, 1)
        seconds = batch_seconds(first - firsts[-1])
        computing += seconds
        end = start + seconds
        heapq.heapreplace(free, end)
        firsts.append(first)
        ends.append(end)
    return np.asarray(firsts), np.asarray(ends), computing


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    """Returns arrival times of a Poisson process: requests that are independent of each other.

    Args:
        rate: mean number of requests per second.
        count: number of requests.
        seed: seed of the random numbers. Defaults to 0.

    Returns:
        Times in seconds, ascending, of shape `(count,)`.

    Raises:
        ValueError: the rate or the count is not positive.

    Example:

        >>> poisson(rate=100, count=5).shape
        (5,)
    """
    _check(rate, count)
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def bursty(
    rate: float, count: int, seed: int = 0, burst_seconds: float = 0.5, busy_share: float = 0.1
) -> np.ndarray:
    """Returns arrival times of requests in bursts, during which the rate is ten times as high.

    The times follow a Poisson process whose rate is switched by a Markov chain of two states (MMPP;
    Fischer and Meier-Hellstern, "The Markov-modulated Poisson process cookbook", 1993).

    Args:
        rate: mean number of requests per second, over bursts and the time between them.
        count: number of requests.
        seed: seed of the random numbers. Defaults to 0.
        burst_seconds: mean duration of a burst in seconds. Defaults to 0.5.
        busy_share: fraction of the time within bursts. Defaults to 0.1.

    Returns:
        Times in seconds, ascending, of shape `(count,)`.

    Raises:
        ValueError: the rate, the count, or the duration is not positive, or the fraction is not
            between 0 and 1.

    Example:

        >>> bursty(rate=100, count=5, burst_seconds=0.2).shape
        (5,)
    """
    _check(rate, count)
    if burst_seconds <= 0 or not 0 < busy_share < 1:
        raise ValueError(
            f"burst_seconds={burst_seconds}, busy_share={busy_share}: give a duration above zero, "
            "and a fraction between 0 and 1"
        )
    generator = np.random.default_rng(seed)
    quiet_rate = rate / (1 + busy_share * (_BURST_FACTOR - 1))
    rates = {True: quiet_rate * _BURST_FACTOR, False: quiet_rate}
    means = {True: burst_seconds, False: burst_seconds * (1 - busy_share) / busy_share}
    times: list[np.ndarray] = []
    now, found, busy = 0.0, 0, bool(generator.random() < busy_share)
    while found < count:
        seconds = generator.exponential(means[busy])
        number = generator.poisson(rates[busy] * seconds)
        times.append(now + np.sort(generator.uniform(0, seconds, number)))
        now, found, busy = now + seconds, found + number, not busy
    return np.concatenate(times)[:count]


def read_trace(path: str | os.PathLike) -> np.ndarray:
    """Reads recorded arrival times from a text file.

    Args:
        path: file with one number of seconds per line, in any order. Empty lines and lines that
            start with `#` are skipped.

    Returns:
        Times in seconds since the first request, ascending, of shape `(N,)`.

    Raises:
        ValueError: a line is not a number, or there are fewer than two times.
        OSError: the file cannot be read.

    Example:

        arrivals = kdist.serving.read_trace("requests.txt")
        kdist.serving.simulate(curve, arrivals, kdist.serving.BatchSettings(0.002, 32))
    """
    times = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            times.append(float(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a number of seconds; write one per line"
            ) from error
    if len(times) < 2 or not np.all(np.isfinite(times)):
        raise ValueError(
            f"{path} holds {len(times)} finite times of requests; at least 2 are needed"
        )
    return np.sort(times) - min(times)


def _check(rate, count):
    if not rate > 0 or count < 1:
        raise ValueError(f"rate={rate}, count={count}: both must be above zero")
