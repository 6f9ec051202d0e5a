"""When requests come: made up, or as they were recorded. All times are in seconds, ascending."""

import os
import pathlib

import numpy as np

# Of bursty arrivals: rate within a burst / rate between bursts.
_BURST_FACTOR = 10.0


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    """Times of `count` requests that come independently of each other.

    Args:
        rate: requests a second, on average.
        count: how many.
        seed: of random numbers.

    Returns:
        Shape (count,).

    Raises:
        ValueError: a rate or a count that is not above zero.
    """
    _check(rate, count)
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def bursty(
    rate: float, count: int, seed: int = 0, burst_seconds: float = 0.5, busy_share: float = 0.1
) -> np.ndarray:
    """Times of requests that come in bursts: ten times as often for some of the time.

    A Poisson process whose rate is switched by a Markov chain of two states (MMPP; Fischer and
    Meier-Hellstern, "The Markov-modulated Poisson process cookbook", 1993).

    Args:
        rate: requests a second, on average over bursts and the time between them.
        count: how many.
        seed: of random numbers.
        burst_seconds: mean duration of a burst.
        busy_share: share of the time that bursts take.

    Returns:
        Shape (count,).

    Raises:
        ValueError: a rate, a count or a duration that is not above zero, or a share that is not
            between 0 and 1.
    """
    _check(rate, count)
    if burst_seconds <= 0 or not 0 < busy_share < 1:
        raise ValueError(
            f"burst_seconds={burst_seconds}, busy_share={busy_share}: a duration above zero, and a "
            "share between 0 and 1"
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
    """Times of requests from a text file, one number a line, in any order; the first is at zero.

    Raises:
        ValueError: a line that is no number, or fewer than two.
        OSError: the file cannot be read.
    """
    times = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            times.append(float(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {line!r} is no number of seconds; write one a line"
            ) from error
    if len(times) < 2 or not np.all(np.isfinite(times)):
        raise ValueError(f"{path} holds {len(times)} finite times of requests; two are the least")
    return np.sort(times) - min(times)


def _check(rate, count):
    if not rate > 0 or count < 1:
        raise ValueError(f"rate={rate}, count={count}: both have to be above zero")
