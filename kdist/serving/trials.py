"""Settings tried on the clients that are there, for moments, where these wait for their answers.

The latency of such clients is measured without timing each: by Little's law it is the requests
inside, on average over the time, divided by those answered a second (Little, "A proof for the
queuing formula L = λW", 1961).
"""

from collections.abc import Awaitable, Callable

from kdist.serving.load import Load, Totals
from kdist.serving.settings import BatchSettings, Objective

_SETTLE_SECONDS, _SPELL_SECONDS = 0.05, 0.25
_MOST_SPELLS = 8  # of one trial, so that it ends: 2 s
_ENOUGH_BATCHES = 8
_ROUNDS = 3
_BETTER = 0.95  # than now, in each round
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 320.0
# Timeouts, as shares of a batch of all clients. The longest outlasts a batch: who waits while
# others are computed goes on waiting until these are back, and from then on all are one batch.
_TIMEOUTS = (0.1, 0.4, 1.25)
_OTHER_CLIENTS = 0.25


class Trials:
    """Tries timeouts up to little more than the time of a batch: no request waits much longer.

    Args:
        load: of the batcher.
        objective: what counts. A bound on the 99th percentile is taken for one on the mean, as
            these clients are all answered after about the same time.
        sleep: as `asyncio.sleep`.
    """

    def __init__(self, load: Load, objective: Objective, sleep: Callable[[float], Awaitable[None]]):
        self._load, self._objective, self._sleep = load, objective, sleep

    async def best(
        self,
        now: BatchSettings,
        widest: BatchSettings,
        apply: Callable[[BatchSettings], None],
    ) -> BatchSettings:
        """The best of some; `now` if none is clearly better in each of three rounds.

        Args:
            now: settings.
            widest: those without a timeout.
            apply: is given what to try; may be left at any of them.
        """
        clients = self._load.clients
        try:
            scores = {each: await self._score(each, apply) for each in self._candidates(widest)}
            best = min(scores, key=lambda each: scores[each])
            for _ in range(_ROUNDS if best != now else 0):
                before, after = await self._score(now, apply), await self._score(best, apply)
                if after > before - (1 - _BETTER) * abs(before):
                    return now
                if self.are_others(clients):
                    return now
            return best
        finally:
            apply(now)

    def pause(self, before: float, is_same: bool) -> float:
        """Seconds to the next trials: twice as many as before, if these changed nothing."""
        return min(max(2 * before, _FIRST_PAUSE), _LONGEST_PAUSE) if is_same else _FIRST_PAUSE

    def are_others(self, clients: int) -> bool:
        """Whether the number of clients is clearly not what it was."""
        return abs(self._load.clients - clients) > _OTHER_CLIENTS * clients

    def _candidates(self, widest):
        """Batches that all clients fill start when the last has come."""
        full = min(widest.max_batch, max(self._load.clients, 1))
        seconds = self._load.curve().seconds(full)
        return [widest, *(BatchSettings(share * seconds, full) for share in _TIMEOUTS)]

    async def _score(self, settings, apply):
        """Less is better."""
        apply(settings)
        await self._sleep(_SETTLE_SECONDS)
        before = self._load.totals()
        for _ in range(_MOST_SPELLS):
            await self._sleep(_SPELL_SECONDS)
            spell = self._load.totals().since(before)
            if spell.batches >= _ENOUGH_BATCHES:
                break
        return self._score_of(spell)

    def _score_of(self, spell: Totals):
        if not spell.answered:
            return float("inf")
        latency = spell.waited / spell.answered
        bound = self._objective.p99_seconds
        if bound is not None and latency > bound:
            return float("inf")
        if self._objective.aim == "throughput":
            return -spell.answered / spell.seconds
        return spell.busy / spell.rows if self._objective.aim == "device_time" else latency
