"""Requests at given times to emulated servers: measurements, and the chosen settings."""

import asyncio

import numpy as np
import pytest

from kdist.serving import Choice, LatencyCurve, Objective, choose, poisson
from kdist.serving.policy.latency_curve import measure_curve
from kdist.serving.tune import confirm, measure_batcher, probe

CURVE = LatencyCurve([1, 8], [0.002, 0.003])


def test_all_are_sent_at_once_if_they_come_at_once():
    async def scenario():
        inside, most = 0, 0

        async def call():
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.05)
            inside -= 1

        return await probe(call, np.zeros(20)), most

    measured, most = asyncio.run(scenario())
    assert most == 20
    assert measured.failed == 0
    assert np.all(measured.latencies >= 0.049)
    assert measured.p50_seconds <= measured.p99_seconds
    assert measured.sent.min() == 0


def test_failures_and_what_never_ends_are_counted():
    async def scenario():
        number = iter(range(100))

        async def call():
            mine = next(number)
            if mine % 5 == 0:
                raise ConnectionError
            if mine == 1:
                await asyncio.sleep(60)

        return await probe(call, np.linspace(0, 0.02, 10), wait_seconds=0.2)

    measured = asyncio.run(scenario())
    assert measured.failed == 3
    assert not measured.meets(Objective())
    assert np.isnan(measured.latencies[[0, 1, 5]]).all()
    assert np.isfinite(measured.mean_seconds)


class Server:
    """Server whose latency depends on its settings."""

    def __init__(self, seconds_of):
        self.applied, self.seconds_of = [], seconds_of

    def apply(self, settings):
        self.applied.append(settings)

    async def call(self):
        await asyncio.sleep(self.seconds_of(self.applied[-1]))


def confirmed(server, objective):
    choice = choose(CURVE, poisson(300, 500), objective, timeouts_ms=[0, 2, 4], max_batches=[8])
    arrivals = np.linspace(0, 0.05, 20)
    best, found = asyncio.run(confirm(server.apply, server.call, choice, arrivals, objective))
    assert set(found) == set(server.applied)
    assert server.applied[-1] == best.settings
    return choice, best


def test_the_measured_best_is_taken_and_applied():
    server = Server(lambda settings: 0.001 if settings.timeout_seconds == 0.002 else 0.03)
    choice, best = confirmed(server, Objective())
    assert choice.best.settings.timeout_seconds == 0
    assert best.settings.timeout_seconds == 0.002


def test_a_choice_that_breaks_its_bound_is_not_kept():
    objective = Objective("device_time", 0.02)
    server = Server(lambda settings: 0.1 if settings.timeout_seconds == 0.004 else 0.001)
    choice, best = confirmed(server, objective)
    assert choice.best.settings.timeout_seconds == 0.004
    assert best.settings.timeout_seconds == 0.002


def test_what_cannot_be_probed():
    server = Server(lambda settings: 0.0)
    for wrong in (
        lambda: probe(server.call, np.array([])),
        lambda: confirm(server.apply, server.call, Choice(None, [], "no"), np.zeros(1), None),
    ):
        with pytest.raises(ValueError, match="no arrivals|nothing to confirm: no"):
            asyncio.run(wrong())


# The curve.


def test_a_curve_is_measured_after_the_first_calls():
    calls = []

    def compute(arrays):
        calls.append(len(arrays["x"]))
        assert arrays["x"].tolist() == [[7.0]] * calls[-1]
        return arrays

    curve = measure_curve(compute, {"x": np.array([[7.0], [8.0]])}, [1, 4], seconds=0.0)
    assert calls == [1, 4] * 5  # two each before, three timed
    assert list(curve.sizes) == [1, 4]
    assert curve.batch_seconds[0] <= curve.batch_seconds[1]


def test_a_served_curve_has_so_many_requests_together():
    class Batched:
        """Batcher that records the requests in flight and the batch sizes."""

        settings, inside, seen = None, 0, []

        async def __call__(self, arrays):
            assert arrays["x"].shape == (1, 1)
            self.inside += 1
            await asyncio.sleep(0)
            self.seen.append((self.inside, self.settings.max_batch))
            await asyncio.sleep(0)
            self.inside -= 1

    batched = Batched()
    curve = asyncio.run(measure_batcher(batched, {"x": np.zeros((2, 1))}, [1, 4], seconds=0.0))
    assert batched.seen == [(1, 1), *[(4, 4)] * 4] * 5
    assert batched.settings.timeout_seconds > 0.5
    assert list(curve.sizes) == [1, 4]


def test_no_sizes():
    with pytest.raises(ValueError, match="from 1 on"):
        measure_curve(lambda arrays: arrays, {"x": np.zeros((1, 1))}, [])
