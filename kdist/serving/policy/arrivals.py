"""Arrival times of requests, random or recorded. All times are in seconds, ascending."""

import os
import pathlib

import numpy as np

# Rate within a burst / rate between bursts.
_BURST_FACTOR = 10.0


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
