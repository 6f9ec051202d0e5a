"""A batching server in simulated time: what latency requests have, by the settings of batches.

    outcome = simulate(curve, poisson(rate=400, count=20_000), BatchSettings(0.002, max_batch=32))
    outcome.mean_seconds, outcome.p99_seconds

One queue, in order of arrival. A batch is started when a device is free and either
`max_batch` requests wait or the oldest has waited for the timeout; so while all
are busy, requests gather whatever the timeout is. Imports no TensorFlow.
"""

import dataclasses
import heapq

import numpy as np

from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.settings import BatchSettings

# Of the requests: the queue is empty at first, which it is not later.
_WARM_UP_SHARE = 0.1
# Of its capacity. Nearer to it, a queue is so long that a few seconds of arrivals decide.
_FULL_SHARE = 0.98


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the requests, but for the first tenth.

    Attributes:
        mean_seconds: from arrival to answer.
        p50_seconds: half of the requests do not exceed it.
        p99_seconds: 99 of 100.
        batch_rows: mean rows of a batch.
        device_share: share of the time in which a device computes.
        over_capacity: more requests come than such batches can serve: the queue grows for good,
            and the times above say only how long it was simulated.
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
    """Serves requests of one row each.

    Args:
        curve: what a batch takes the device; each takes a share of the spread, drawn at random.
        arrivals: seconds, ascending, of shape (N,).
        settings: of batches; `max_batch` within the curve.
        overhead_seconds: of each request, besides: reading, writing. Defaults to none.
        devices: that compute a batch each.

    Raises:
        ValueError: no arrivals, or a `max_batch` that the curve does not have.
    """
    if len(arrivals) < 2:
        raise ValueError(f"{len(arrivals)} arrivals: give two or more")
    if settings.max_batch > curve.largest:
        raise ValueError(
            f"max_batch={settings.max_batch}: the curve was measured up to {curve.largest}; "
            "measure larger batches, or take smaller ones"
        )
    taking = _times(curve, len(arrivals))
    firsts, ends, computing = _batches(taking, np.asarray(arrivals, float), settings, devices)
    rows = np.diff(firsts)
    latency = np.repeat(ends, rows) - arrivals + overhead_seconds
    counted = latency[int(len(latency) * _WARM_UP_SHARE) :]
    p50, p99 = np.percentile(counted, [50, 99])
    span = (max(ends) - arrivals[0]) * devices
    rate = (len(arrivals) - 1) / max(arrivals[-1] - arrivals[0], 1e-12)
    return Outcome(
        float(counted.mean()),
        float(p50),
        float(p99),
        float(rows.mean()),
        float(computing / span),
        bool(rate > _FULL_SHARE * devices * _served_when_full(curve, settings.max_batch)),
    )


def _served_when_full(curve, max_batch):
    """Rows a second: what waits fills batches, even where smaller ones would serve more."""
    return max_batch / curve.seconds(max_batch)


def _times(curve, count):
    """Gives what a batch takes, by its rows: at most so many, the same for all settings."""
    means = curve.table()
    if len(curve.spread) == 1:
        return means.__getitem__
    shares = iter(np.random.default_rng(0).choice(curve.spread, count))
    return lambda rows: means[rows] * next(shares)


def _batches(taking, arrivals, settings, devices):
    """(number of the first request of each batch and of all, when each batch ends, seconds of
    all batches)."""
    count, most = len(arrivals), settings.max_batch
    firsts, ends = [0], []
    free, first = [arrivals[0]] * devices, 0  # a heap: when each is free
    computing = 0.0
    while first < count:
        # When a free device would start: with the last request of a full batch, or at the timeout.
        due = arrivals[first] + settings.timeout_seconds
        if first + most <= count:
            due = min(due, arrivals[first + most - 1])
        start = max(free[0], due)
        waiting = int(np.searchsorted(arrivals[first : first + most], start, side="right"))
        first += max(waiting, 1)
        seconds = taking(first - firsts[-1])
        computing += seconds
        end = start + seconds
        heapq.heapreplace(free, end)
        firsts.append(first)
        ends.append(end)
    return np.asarray(firsts), np.asarray(ends), computing
