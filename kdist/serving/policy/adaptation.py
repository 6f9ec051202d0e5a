"""Adapts batch settings to the load while serving.

    tuner = Tuner(curve, Objective("latency"))
    task = asyncio.create_task(tuner.run(apply))    # apply(settings) sets batcher.settings
    # The batcher calls tuner.load.record_arrival(), tuner.load.record_batch(rows, seconds), …
    task.cancel()

In an open loop, the recent arrivals are simulated. In a closed loop arrivals depend on latency, so
a recorded trace cannot be replayed; settings are tried on the live traffic instead. A single client
has no other requests to wait for. Imports no TensorFlow.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from kdist.serving.core.settings import BatchSettings, Objective
from kdist.serving.policy.latency_curve import LatencyCurve
from kdist.serving.policy.load import LoadMonitor, LoadTotals
from kdist.serving.policy.selection import Choice, choose_in_subprocess
from kdist.serving.policy.simulation import poisson

_logger = logging.getLogger(__name__)

_STEP_SECONDS = 1.0
_WINDOW_SECONDS, _RECENT_SECONDS = 10.0, 3.0
_MAX_ARRIVALS = 2000
_MIN_TRACE_ARRIVALS = 300  # with fewer, Poisson arrivals at the same rate are simulated
_MIN_ARRIVALS = 8  # with fewer, nothing is chosen
# Changes that cause a new choice: ratio of rates, if significant, and ratio of batch times.
_RATE_CHANGE, _BATCH_TIME_CHANGE, _SIGNIFICANCE = 1.25, 1.25, 4.0
_MAX_CHOICE_AGE_SECONDS = 60.0
_MIN_GAIN = 0.03  # relative gain of the score that justifies new settings

_SETTLE_SECONDS, _SAMPLE_SECONDS = 0.05, 0.25
_MAX_SAMPLES = 8  # per trial: 2 s
_MIN_BATCHES = 8
_ROUNDS = 3
_MIN_TRIAL_GAIN = 0.05  # over the current settings, in each round
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 10.0, 320.0
# Timeouts, relative to the time of a batch of all clients. The longest exceeds a batch: requests
# that queue up during a batch then wait for its clients to return, and all merge into one batch.
_TIMEOUT_FRACTIONS = (0.1, 0.4, 1.25)
_CLIENT_CHANGE = 0.25


class Tuner:
    """Chooses settings whenever the load has changed.

    Args:
        curve: latency curve that was measured before the first request.
        objective: goal of the choice. Defaults to the lowest mean latency.
        max_batches: batch sizes to choose from. Defaults to the sizes of the curve.
        on_message: called with a message when the objective cannot be met, and when it is met
            again. Defaults to logging a warning.
        choose: same as `choose_in_subprocess`.
        clock, sleep: replaced by tests.

    Attributes:
        load: monitor that the batcher must notify.
        settings: current settings. Initially no timeout and the largest batches.
        reason: why the objective cannot be met, such as "over capacity"; empty if it is met.
    """

    def __init__(
        self,
        curve: LatencyCurve,
        objective: Objective | None = None,
        max_batches: Sequence[int] | None = None,
        on_message: Callable[[str], None] = _logger.warning,
        *,
        choose: Callable[..., Awaitable[Choice]] = choose_in_subprocess,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.load, self.reason = LoadMonitor(curve, clock), ""
        self.max_batches = sorted(curve.sizes if max_batches is None else max_batches)
        self.settings = self._default_settings()
        self._objective = objective or Objective()
        self._on_message, self._choose, self._clock, self._sleep = on_message, choose, clock, sleep
        self._trials = Trials(self.load, self._objective, sleep)
        # Rate, mean batch time, and time of the last choice.
        self._chosen_for: tuple[float, float, float] | None = None
        self._kind, self._next_trial, self._pause, self._clients = "new", 0.0, 0.0, 0

    async def run(self, apply: Callable[[BatchSettings], None]):
        """Calls `step` about once per second until it is cancelled.

        Calls `apply` with the initial settings and with every change.
        """
        apply(self.settings)
        while True:
            await self._sleep(_STEP_SECONDS)
            try:
                await self.step(apply)
            except (OSError, RuntimeError) as error:  # serving continues with the current settings
                self._report(str(error))

    async def step(self, apply: Callable[[BatchSettings], None]):
        """Checks the load once, and applies better settings if there are any."""
        kind = "open" if self._is_rejecting() else self.load.kind
        if kind != self._kind:  # wait for a second check before reacting
            self._kind, self._chosen_for = kind, None
            if kind != "alone":
                return
        if kind == "alone" or len(self.load.recent(_WINDOW_SECONDS)) < _MIN_ARRIVALS:
            self._report(self._reason_alone())
            self._change(self._default_settings(), apply)
        elif kind == "closed":
            await self._choose_by_trials(apply)
        elif kind == "open" and (self._is_rejecting() or self._has_changed()):
            await self._choose_by_simulation(apply)

    def _reason_alone(self):
        """Returns why a client alone, which never waits, is not served within the bound."""
        bound, seconds = self._objective.p99_seconds, self.load.curve().seconds(1)
        if bound is None or seconds <= bound:
            return ""
        return (
            f"no setting keeps 99 of 100 requests within {bound * 1e3:g} ms; a request alone takes "
            f"{seconds * 1e3:.1f} ms: raise the bound, or use a faster device or model"
        )

    def _is_rejecting(self):
        return self._clock() - self.load.rejected_at < 2 * _STEP_SECONDS

    def _has_changed(self):
        if self._chosen_for is None:
            return True
        rate, seconds, when = self._chosen_for
        new = self.load.rate(_RECENT_SECONDS)
        noise = _SIGNIFICANCE * (max(rate, new) / _RECENT_SECONDS) ** 0.5
        is_new_rate = _ratio(new, rate) > _RATE_CHANGE and abs(new - rate) > noise
        is_new_speed = _ratio(self._batch_seconds(), seconds) > _BATCH_TIME_CHANGE
        return is_new_rate or is_new_speed or self._clock() - when > _MAX_CHOICE_AGE_SECONDS

    async def _choose_by_simulation(self, apply):
        arrivals = self._arrivals()
        if len(arrivals) < _MIN_ARRIVALS:
            return
        curve = self.load.curve()
        self._chosen_for = self.load.rate(_RECENT_SECONDS), self._batch_seconds(), self._clock()
        choice = await self._choose(curve, arrivals, self._objective, max_batches=self.max_batches)
        self._report(choice.reason)
        if choice.best is None:
            self._change(self._fallback(choice), apply)
        elif self._is_improvement(choice):
            self._change(choice.best.settings, apply)

    def _arrivals(self):
        """Returns the arrivals of the last 10 s, or of the last 3 s if the rate has changed."""
        new, rate = self.load.rate(_RECENT_SECONDS), self.load.rate(_WINDOW_SECONDS)
        is_new = _ratio(new, rate) > _RATE_CHANGE
        arrivals = self.load.recent(_RECENT_SECONDS if is_new else _WINDOW_SECONDS)[-_MAX_ARRIVALS:]
        if _MIN_ARRIVALS <= len(arrivals) < _MIN_TRACE_ARRIVALS:
            return poisson(max(new, 1e-3), _MAX_ARRIVALS)
        return arrivals

    def _is_improvement(self, choice):
        current = [each.score for each in choice.tried if each.settings == self.settings]
        if not current or np.isinf(current[0]):  # they break a bound, or are over capacity
            return True
        return choice.best.score < current[0] - _MIN_GAIN * abs(current[0])

    def _fallback(self, choice):
        served = [each for each in choice.tried if not each.outcome.over_capacity]
        if not served:
            return self._default_settings()
        return min(served, key=lambda each: each.outcome.p99_seconds).settings

    async def _choose_by_trials(self, apply):
        if self._trials.has_client_count_changed(self._clients):
            self._clients, self._pause, self._next_trial = self.load.clients, 0.0, self._clock()
            self._change(self._default_settings(), apply)
        if self._clock() < self._next_trial:
            return
        best = await self._trials.best(self.settings, self._default_settings(), apply)
        self._report(self._trials.reason)
        self._pause = self._trials.pause(self._pause, best == self.settings)
        self._next_trial = self._clock() + self._pause
        self.settings = best
        apply(best)

    def _default_settings(self):
        """Returns settings without a timeout and with the batch size of the highest throughput."""
        return BatchSettings(0.0, max(self.max_batches, key=self.load.curve().capacity))

    def _batch_seconds(self):
        return float(np.mean(self.load.curve().batch_seconds))

    def _change(self, settings, apply):
        if settings != self.settings:
            self.settings = settings
            apply(settings)

    def _report(self, reason):
        """Reports a reason once per kind, as its numbers change with every check."""
        kind, before = reason.partition(":")[0].split(" within")[0], self.reason
        self.reason = reason
        if kind != before.partition(":")[0].split(" within")[0]:
            self._on_message(reason or "the load is served within the objective again")


def _ratio(one, other):
    low, high = sorted((one, other))
    return high / low if low > 0 else float("inf")


class Trials:
    """Tries timeouts up to slightly more than the time of a batch.

    They are tried on live traffic, for clients that wait for their response. Their latency is
    measured without timing each request. By Little's law it is the mean number of requests in
    flight, divided by the responses per second (Little, "A proof for the queuing formula L = λW",
    1961). A bound on the 99th percentile is applied to the mean, as all of these clients have about
    the same latency.

    Attributes:
        reason: why none of the last candidates was within the bound; empty if one was.
    """

    def __init__(
        self, load: LoadMonitor, objective: Objective, sleep: Callable[[float], Awaitable[None]]
    ):
        self._load, self._objective, self._sleep = load, objective, sleep
        self.reason = ""
        self._latencies: list[float] = []  # of all candidates

    async def best(
        self,
        current: BatchSettings,
        default: BatchSettings,
        apply: Callable[[BatchSettings], None],
    ) -> BatchSettings:
        """Returns the best candidate; `current` unless it is better in each of three rounds.

        Calls `apply` with the settings to try, and finally with the current ones.
        """
        clients = self._load.clients
        self._latencies = []
        try:
            scores = {each: await self._score(each, apply) for each in self._candidates(default)}
            self.reason = self._bound_reason()
            best = min(scores, key=lambda each: scores[each])
            for _ in range(_ROUNDS if best != current else 0):
                before, after = await self._score(current, apply), await self._score(best, apply)
                if after > before - _MIN_TRIAL_GAIN * abs(before):
                    return current
                if self.has_client_count_changed(clients):
                    return current
            return best
        finally:
            apply(current)

    def pause(self, before: float, is_unchanged: bool) -> float:
        """Returns the seconds until the next trials; doubled if the settings did not change."""
        longer = min(max(2 * before, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        return longer if is_unchanged else _MIN_PAUSE_SECONDS

    def has_client_count_changed(self, clients: int) -> bool:
        """Returns whether the number of clients differs by more than a quarter."""
        return abs(self._load.clients - clients) > _CLIENT_CHANGE * clients

    def _bound_reason(self):
        bound, least = self._objective.p99_seconds, min(self._latencies, default=0.0)
        if bound is None or least <= bound:
            return ""
        return (
            f"no setting keeps 99 of 100 requests within {bound * 1e3:g} ms; the mean latency of "
            f"{self._load.clients} clients is at least {least * 1e3:.1f} ms: raise the bound, or "
            "add a process or a device"
        )

    def _candidates(self, default):
        """Returns the default, and timeouts for batches that hold all clients."""
        full = min(default.max_batch, max(self._load.clients, 1))
        seconds = self._load.curve().seconds(full)
        return [default, *(BatchSettings(part * seconds, full) for part in _TIMEOUT_FRACTIONS)]

    async def _score(self, settings, apply):
        """Returns the measured score of settings; lower is better."""
        apply(settings)
        await self._sleep(_SETTLE_SECONDS)
        before = self._load.totals()
        for _ in range(_MAX_SAMPLES):
            await self._sleep(_SAMPLE_SECONDS)
            sample = self._load.totals().since(before)
            if sample.batches >= _MIN_BATCHES:
                break
        return self._score_of(sample)

    def _score_of(self, sample: LoadTotals):
        if not sample.answered:
            return float("inf")
        latency = sample.waited / sample.answered
        self._latencies.append(latency)
        bound = self._objective.p99_seconds
        if bound is not None and latency > bound:
            return float("inf")
        if self._objective.aim == "throughput":
            return -sample.answered / sample.seconds
        return sample.busy / sample.rows if self._objective.aim == "device_time" else latency
