"""Settings tried on a real server: requests are sent at given times, their latency is measured.

    measured = await probe(call, poisson(rate=300, count=600))
    tried = await confirm(apply, call, choice, arrivals)     # the best of what was simulated

`call()` is one request: a coroutine that ends with the answer. Imports no TensorFlow.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from kdist.serving.settings import BatchSettings, Objective
from kdist.serving.tuning import Choice, Tried

Call = Callable[[], Awaitable[Any]]

_WARM_UP_SHARE = 0.1  # as the simulator leaves out


@dataclasses.dataclass(frozen=True)
class Measured:
    """What became of the requests.

    Attributes:
        sent: when each was sent, in seconds from the first, of shape (N,): later than asked for
            where the machine was busy. Simulate these to compare.
        latencies: seconds of each; not a number for those that failed or got no answer in time.
        mean_seconds: of those answered, but for the first tenth; as are the others.
        p50_seconds: half of them do not exceed it.
        p99_seconds: 99 of 100.
        failed: requests without an answer.
    """

    sent: np.ndarray
    latencies: np.ndarray
    mean_seconds: float
    p50_seconds: float
    p99_seconds: float
    failed: int

    def meets(self, objective: Objective) -> bool:
        """Whether all were answered within the objective's bound."""
        bound = objective.p99_seconds
        return not self.failed and (bound is None or self.p99_seconds <= bound)


async def probe(call: Call, arrivals: np.ndarray, wait_seconds: float = 10.0) -> Measured:
    """Sends requests at the given times, whether or not those before are answered.

    Args:
        call: makes one request.
        arrivals: seconds, ascending, of shape (N,).
        wait_seconds: for answers after the last was sent; what is not there by then is given up.

    Raises:
        ValueError: no arrivals.
    """
    if not len(arrivals):
        raise ValueError("there are no arrivals: give when requests are sent")
    sent, latencies = np.full(len(arrivals), np.nan), np.full(len(arrivals), np.nan)

    async def request(place):
        began = time.perf_counter()
        sent[place] = began
        await call()
        latencies[place] = time.perf_counter() - began

    first, tasks = time.perf_counter() - arrivals[0], []
    for place, when in enumerate(arrivals):
        left = first + when - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.ensure_future(request(place)))
    _, late = await asyncio.wait(tasks, timeout=wait_seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return _summary(sent - np.nanmin(sent), latencies)


def _summary(sent, latencies):
    counted = latencies[int(len(latencies) * _WARM_UP_SHARE) :]
    counted = counted[np.isfinite(counted)]
    failed = int(np.isnan(latencies).sum())
    if not len(counted):
        return Measured(sent, latencies, *[float("inf")] * 3, failed)
    p50, p99 = np.percentile(counted, [50, 99])
    return Measured(sent, latencies, float(counted.mean()), float(p50), float(p99), failed)


async def confirm(
    apply: Callable[[BatchSettings], None],
    call: Call,
    choice: Choice,
    arrivals: np.ndarray,
    objective: Objective,
    few: int = 3,
    turns: int = 2,
) -> tuple[Tried, dict[BatchSettings, Measured]]:
    """Measures the best of what was simulated, in turns, and gives the best measured.

    The chosen stays if no other is measured to be better by a twentieth. What cannot be measured
    from outside, the device's time or the highest rate, is left to the simulation: there, the best
    that was measured to keep the bound is taken.

    Args:
        apply: is given settings; the best at the end.
        call: as for `probe`.
        choice: with a best.
        arrivals: when requests are sent, in each turn: seconds, ascending.
        objective: that the choice is for.
        few: so many settings are measured, of different timeouts.
        turns: of each.

    Returns:
        The best, and the last measurement of each.

    Raises:
        ValueError: a choice without a best.
    """
    if choice.best is None:
        raise ValueError(f"nothing to confirm: {choice.reason}")
    tried = _different(choice, few)
    found: dict[BatchSettings, list[Measured]] = {each.settings: [] for each in tried}
    for _ in range(turns):
        for settings, measured in found.items():
            apply(settings)
            measured.append(await probe(call, arrivals))
    best = _best(tried, found, objective)
    apply(best.settings)
    return best, {settings: measured[-1] for settings, measured in found.items()}


def _different(choice, few):
    """The best and, by their score, the first of each other timeout."""
    first = {choice.best.settings.timeout_seconds: choice.best}
    for each in choice.tried:
        if np.isfinite(each.score):
            first.setdefault(each.settings.timeout_seconds, each)
    return list(first.values())[:few]


def _best(tried: Sequence[Tried], found, objective):
    meeting = [t for t in tried if all(m.meets(objective) for m in found[t.settings])]
    if not meeting or objective.aim != "latency":
        return (meeting or tried)[0]

    def mean(each):
        return min(m.mean_seconds for m in found[each.settings])

    best = min(meeting, key=mean)
    return meeting[0] if mean(best) > 0.95 * mean(meeting[0]) else best
