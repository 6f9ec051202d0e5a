"""Tries batch settings on live traffic, for clients that wait for their response.

Their latency is measured without timing each request. By Little's law it is the mean number of
requests in flight, divided by the responses per second (Little, "A proof for the queuing formula
L = λW", 1961).
"""

from collections.abc import Awaitable, Callable

from kdist.serving.core.settings import BatchSettings, Objective
from kdist.serving.policy.load import LoadMonitor, LoadTotals

_SETTLE_SECONDS, _SAMPLE_SECONDS = 0.05, 0.25
_MAX_SAMPLES = 8  # per trial: 2 s
_MIN_BATCHES = 8
_ROUNDS = 3
_MIN_GAIN = 0.05  # over the current settings, in each round
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 10.0, 320.0
# Timeouts, relative to the time of a batch of all clients. The longest exceeds a batch: requests
# that queue up during a batch then wait for its clients to return, and all merge into one batch.
_TIMEOUT_FRACTIONS = (0.1, 0.4, 1.25)
_CLIENT_CHANGE = 0.25


class Trials:
    """Tries timeouts up to slightly more than the time of a batch.

    A bound on the 99th percentile is applied to the mean, as all of these clients have about the
    same latency.

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
                if after > before - _MIN_GAIN * abs(before):
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
