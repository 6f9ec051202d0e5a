"""Batching server and clients in virtual time, which notify a load monitor."""

import heapq
import itertools

import numpy as np


class VirtualServer:
    """Server with one device, for closed-loop clients or requests at given times.

    Attributes:
        now: seconds; `sleep` moves it.
        history: (when, settings) of all that were applied.
        latencies: (when answered, seconds) of requests.
    """

    def __init__(self, seconds_of):
        self.now, self.history, self.latencies = 0.0, [], []
        self.seconds_of, self.load, self.settings = seconds_of, None, None
        self._events, self._order = [], itertools.count()
        self._waiting, self._busy, self._clients = [], False, 0
        self._random = np.random.default_rng(0)

    def clock(self):
        return self.now

    def apply(self, settings):
        self.settings = settings
        self.history.append((self.now, settings))

    async def sleep(self, seconds):
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        self.now = end

    def at(self, when, happens):
        heapq.heappush(self._events, (when, next(self._order), happens))

    def requests(self, times):
        for when in times:
            self.at(self.now + when, self._arrive)

    def clients(self, number):
        """Sets the number of closed-loop clients."""
        for _ in range(number - self._clients):
            self.at(self.now, lambda: self._arrive(True))
        self._clients = number

    def _arrive(self, is_client=False):
        self.load.record_arrival()
        self._waiting.append((self.now, is_client))
        self.at(self.now + self.settings.timeout_seconds, self._start)
        self._start()

    def _start(self):
        if self._busy or not self._waiting:
            return
        age = self.now - self._waiting[0][0]
        full = len(self._waiting) >= self.settings.max_batch
        if age + 1e-9 < self.settings.timeout_seconds and not full:
            return
        batch = self._waiting[: self.settings.max_batch]
        del self._waiting[: len(batch)]
        self._busy = True
        seconds = self.seconds_of(len(batch))
        self.at(self.now + seconds, lambda: self._end(batch, seconds))

    def _end(self, batch, seconds):
        self._busy = False
        self.load.record_batch(len(batch), seconds)
        self.latencies += [(self.now, self.now - since) for since, _ in batch]
        for order, (_, is_client) in enumerate(batch):
            if is_client and self._clients_left() > 0:
                self.at(self.now + order * 2e-5 + self._random.uniform(0, 2e-4), self._arrive_again)
        self._start()

    def _clients_left(self):
        return self._clients

    def _arrive_again(self):
        self._arrive(True)
