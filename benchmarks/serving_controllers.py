"""Compares the server's tuner with a small hill-climbing controller, in virtual time.

    python -m benchmarks.serving_controllers

Each controls one virtual server under closed loops (1, 8, and 64 clients), Poisson and bursty
arrivals, and loads that change. The table shows the score of the last 15 s relative to the best
fixed settings of a sweep (1.00 is best), and the seconds until 4 s of traffic score within 10 % of
these. Virtual time makes the results independent of the speed of the machine.
"""

import asyncio
import bisect
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from kdist.serving import BatchSettings, LatencyCurve, Objective, bursty, choose, poisson, simulate
from kdist.serving.policy.adaptation import Tuner
from kdist.serving.policy.load import LoadMonitor
from tests.serving.virtual_server import VirtualServer

SIZES = (1, 8, 16, 32, 64)
CURVES = {  # tuples, so that curves are hashable
    "flat": LatencyCurve(SIZES, tuple(0.008 + 0.0001 * size for size in SIZES)),
    "steep": LatencyCurve(SIZES, tuple(0.001 + 0.0004 * size for size in SIZES)),
}
P99_SECONDS = 0.06
OBJECTIVES = {
    "mean latency": Objective(),
    "throughput": Objective("throughput", P99_SECONDS),
    "device time": Objective("device_time", P99_SECONDS),
}
TIMEOUTS = (0.0, 0.001, 0.004, 0.008, 0.016, 0.024, 0.032)
_CHANGE_SECONDS, _RUN_SECONDS, _SCORED_SECONDS = 20.0, 40.0, 15.0
_SWEEP_WARM_UP_SECONDS, _WINDOW_SECONDS = 1.0, 4.0
_TOLERANCE = 1.1


class HillClimber:
    """Small controller that tries other settings on live traffic and keeps improvements.

    Every second it measures one window. It alternates between the current settings and a candidate
    (another timeout, or the next batch size up or down), and moves if the candidate is better. When
    no candidate is better, it pauses, twice as long each time; a changed load ends the pause. In a
    closed loop, a batch holds at most the number of clients.

    Args:
        curve: initial latency curve.
        objective: goal of the control.
        server: virtual server, which records the latency of each request.
    """

    _TIMEOUT_FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.8, 1.25)  # of the time of a full batch
    _MIN_GAIN, _LOAD_CHANGE, _MAX_PAUSE = 0.03, 1.3, 64

    def __init__(self, curve, objective, server):
        self.load = LoadMonitor(curve, server.clock)
        self._curve, self._objective, self._server = curve, objective, server
        self._current = (0, len(curve.sizes) - 1)  # places of the timeout and the size
        self._trial, self._candidates = None, []
        self._score, self._rate, self._pause, self._wait = float("inf"), 0.0, 1, 0
        self._totals, self._answered = self.load.totals(), 0
        self.settings = self._settings(*self._current)

    def step(self, apply: Callable[[BatchSettings], None]):
        """Measures the last window and applies the next settings."""
        score, rate = self._measure()
        if self._trial is None:
            if max(rate, self._rate) > self._LOAD_CHANGE * min(rate, self._rate):
                self._pause, self._wait, self._candidates = 1, 0, []
            self._score, self._rate = score, rate
            if self._wait > 0:
                self._wait -= 1
                return
            self._candidates = self._candidates or self._neighbors()
            self._trial = self._candidates.pop()
            apply(self._settings(*self._trial))
            return
        if score < self._score - self._MIN_GAIN * abs(self._score):
            self._current, self._candidates, self._pause = self._trial, [], 1
            self._rate = rate
        elif not self._candidates:
            self._wait = self._pause
            self._pause = min(2 * self._pause, self._MAX_PAUSE)
        self._trial = None
        self.settings = self._settings(*self._current)
        apply(self.settings)

    def _neighbors(self):
        timeout, size = self._current
        places = [
            (other, size) for other in range(len(self._TIMEOUT_FRACTIONS)) if other != timeout
        ]
        sizes = [(timeout, other) for other in (size - 1, size + 1)]
        return [*places, *(each for each in sizes if 0 <= each[1] < len(SIZES))]

    def _settings(self, timeout, size):
        rows = self._curve.sizes[size]
        if self.load.kind == "closed":
            rows = min(rows, self.load.clients)
        return BatchSettings(self._TIMEOUT_FRACTIONS[timeout] * self._curve.seconds(rows), rows)

    def _measure(self):
        totals = self.load.totals()
        window = totals.since(self._totals)
        latencies = [seconds for _, seconds in self._server.latencies[self._answered :]]
        self._totals, self._answered = totals, len(self._server.latencies)
        rate = window.answered / window.seconds
        return score(self._objective, latencies, window.busy, rate), rate


def score(objective, latencies, busy_seconds, rate):
    """Returns the score of a window; lower is better. A broken bound scores by its latency."""
    if not len(latencies):
        return float("inf")
    bound = objective.p99_seconds
    if bound is not None and (tail := np.percentile(latencies, 99)) > bound:
        return 1e6 * tail
    if objective.aim == "latency":
        return float(np.mean(latencies))
    return busy_seconds / len(latencies) if objective.aim == "device_time" else -rate


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A load, and possibly the load before a change.

    Attributes:
        name: title in the table.
        start: starts the scored load on a server, given the capacity in rows per second.
        before: starts the load of the first 20 s; None for a load that does not change.
        sweep_seconds: length of the sweep; bursts need the same arrivals as the run.
    """

    name: str
    start: Callable
    before: Callable | None = None
    sweep_seconds: float = 5.0


def _clients(number):
    return lambda server, capacity, seconds: server.clients(number)


def _open(process, fraction):
    def start(server, capacity, seconds):
        rate = fraction * capacity
        server.requests(process(rate, int(rate * seconds)))

    start.arrivals = lambda capacity: process(fraction * capacity, 5000, seed=7)
    return start


SCENARIOS = [
    Scenario("1 client", _clients(1)),
    Scenario("8 clients", _clients(8)),
    Scenario("64 clients", _clients(64)),
    Scenario("Poisson, 20 %", _open(poisson, 0.2)),
    Scenario("Poisson, 70 %", _open(poisson, 0.7)),
    Scenario("bursty, 10 %", _open(bursty, 0.1), sweep_seconds=_RUN_SECONDS),
    Scenario("8 clients, then 64", _clients(64), _clients(8)),
    Scenario("Poisson 7 %, then 70 %", _open(poisson, 0.7), _open(poisson, 0.07)),
]


def _window_score(server, scenario, objective, curve, since, until, settings):
    """Returns the score of all traffic answered between two times."""
    latencies = _between(server.latencies, since, until)
    busy = sum(_between(server.batches, since, until))
    rate = len(latencies) / (until - since)
    if objective.aim == "throughput" and hasattr(scenario.start, "arrivals"):
        return _highest_rate(scenario.start, objective, curve, settings)
    return score(objective, latencies, busy, rate)


def _between(records, since, until):
    """Returns the values of (time, value) records between two times."""
    first, last = (bisect.bisect_left(records, (when,)) for when in (since, until))
    return [value for _, value in records[first:last]]


@functools.cache
def _highest_rate(start, objective, curve, settings):
    """Returns the negative rate that settings serve within the bound, by simulation."""
    arrivals = start.arrivals(curve.capacity(curve.largest))
    rate = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
    low, high = 0.0, 2 * curve.capacity(settings.max_batch) / rate
    for _ in range(10):
        middle = (low + high) / 2
        outcome = simulate(curve, arrivals / middle, settings)
        is_met = not outcome.over_capacity and outcome.p99_seconds <= objective.p99_seconds
        low, high = (middle, high) if is_met else (low, middle)
    return -low * rate if low else float("inf")


class RecordingServer(VirtualServer):
    """Virtual server that records (end, seconds) of each batch."""

    def __init__(self, seconds_of):
        super().__init__(seconds_of)
        self.batches = []

    def _end(self, batch, seconds):
        self.batches.append((self.now, seconds))
        super()._end(batch, seconds)


def sweep(curve, scenario):
    """Returns {settings: server} of fixed settings under the load of a scenario."""
    servers = {}
    for timeout in TIMEOUTS:
        for rows in SIZES:
            settings = BatchSettings(timeout, rows)
            server = RecordingServer(curve.seconds)
            server.load = LoadMonitor(curve, server.clock)
            server.apply(settings)
            scenario.start(server, curve.capacity(curve.largest), scenario.sweep_seconds)
            asyncio.run(server.sleep(scenario.sweep_seconds))
            servers[settings] = server
    return servers


async def _choose_now(*arguments, **keywords):
    return choose(*arguments, **keywords)


def run(curve, scenario, objective, is_tuner):
    """Returns the server after a run, and the time of the scored load's start."""
    server = RecordingServer(curve.seconds)
    if is_tuner:
        controller = Tuner(
            curve,
            objective,
            on_message=lambda _: None,
            choose=_choose_now,
            clock=server.clock,
            sleep=server.sleep,
        )
    else:
        controller = HillClimber(curve, objective, server)
    server.load = controller.load
    server.apply(controller.settings)
    capacity = curve.capacity(curve.largest)

    async def control(seconds):
        end = server.now + seconds
        while server.now < end:
            await server.sleep(1.0)
            if is_tuner:
                await controller.step(server.apply)
            else:
                controller.step(server.apply)

    if scenario.before:
        scenario.before(server, capacity, _CHANGE_SECONDS)
        asyncio.run(control(_CHANGE_SECONDS))
    began = server.now
    scenario.start(server, capacity, _RUN_SECONDS + 5)
    asyncio.run(control(_RUN_SECONDS))
    return server, began, controller.settings


def compare(curve, scenario, objective, servers, is_tuner):
    """Returns (ratio to the best fixed score, seconds to adapt) as texts."""
    until = scenario.sweep_seconds
    since = max(_SWEEP_WARM_UP_SECONDS, until - _SCORED_SECONDS)
    best = min(
        _window_score(server, scenario, objective, curve, since, until, settings)
        for settings, server in servers.items()
    )
    server, began, last = run(curve, scenario, objective, is_tuner)

    def ratio(since, until):
        applied = [each for when, each in server.history if when <= until]
        settings = last if until >= server.now else applied[-1]
        value = _window_score(server, scenario, objective, curve, since, until, settings)
        if value > 1e3:
            return float("inf")
        return best / value if best < 0 else value / best

    starts = np.arange(began, server.now - _WINDOW_SECONDS)
    adapted = [s for s in starts if ratio(s, s + _WINDOW_SECONDS) <= _TOLERANCE]
    final = ratio(server.now - _SCORED_SECONDS, server.now)
    return (
        f"{final:.2f}" if np.isfinite(final) else "bound broken",
        f"{adapted[0] - began:.0f} s" if adapted else "never",
    )


def table():
    """Returns the comparison as Markdown."""
    lines = [
        "| curve | load | objective | tuner | adapts in | hill climber | adapts in |",
        "|--|--|--|--|--|--|--|",
    ]
    for curve_name, curve in CURVES.items():
        for scenario in SCENARIOS:
            servers = sweep(curve, scenario)
            for name, objective in OBJECTIVES.items():
                cells = [
                    cell
                    for is_tuner in (True, False)
                    for cell in compare(curve, scenario, objective, servers, is_tuner)
                ]
                lines.append(f"| {curve_name} | {scenario.name} | {name} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
