"""Tuner on a virtual server and clients."""

import asyncio

import numpy as np
import pytest

from kdist.serving import BatchSettings, LatencyCurve, Objective, choose, poisson, simulate
from kdist.serving.policy.adaptation import Tuner
from kdist.serving.policy.load import LoadMonitor
from tests.serving.virtual_server import VirtualServer

SIZES = [1, 8, 16, 32, 64]
CURVE = LatencyCurve(SIZES, [0.008 + 0.0001 * size for size in SIZES])


async def choose_here(*arguments, **named):
    return choose(*arguments, **named)


class Scene:
    """Tuner that checks a virtual server once per second."""

    def __init__(self, objective=None, curve=CURVE, seconds_of=None, **named):
        self.server = VirtualServer(seconds_of or curve.seconds)
        self.messages = []
        self.tuner = Tuner(
            curve,
            objective,
            on_message=self.messages.append,
            choose=choose_here,
            clock=self.server.clock,
            sleep=self.server.sleep,
            **named,
        )
        self.server.load = self.tuner.load
        self.server.apply(self.tuner.settings)

    def run(self, seconds):
        async def looks():
            end = self.server.now + seconds
            while self.server.now < end:
                await self.server.sleep(1.0)
                await self.tuner.step(self.server.apply)

        asyncio.run(looks())
        return self.tuner.settings

    def mean_latency(self, since):
        return np.mean([seconds for when, seconds in self.server.latencies if when >= since])


@pytest.mark.parametrize("objective", [Objective(), Objective("device_time")])
def test_one_client_alone_never_waits(objective):
    scene = Scene(objective)
    scene.server.clients(1)
    assert scene.run(30).timeout_seconds == 0
    assert {settings.timeout_seconds for _, settings in scene.server.history} == {0.0}


def test_a_client_that_is_left_alone_waits_no_more():
    scene = Scene(Objective("device_time"))
    scene.server.requests(poisson(500, 5000))
    assert scene.run(9).timeout_seconds > 0
    scene.run(2)  # the last are served
    scene.server.clients(1)
    assert scene.run(6).timeout_seconds == 0


def test_an_open_load_is_served_as_the_simulator_says():
    scene = Scene(Objective("device_time", 0.05))
    scene.server.requests(poisson(500, 10_000))
    settings = scene.run(8)
    fresh = simulate(CURVE, poisson(500, 20_000, seed=3), settings)
    lazy = simulate(CURVE, poisson(500, 20_000, seed=3), BatchSettings(0.0, 64))
    assert fresh.p99_seconds < 0.055
    assert fresh.device_share < 0.5 * lazy.device_share
    assert scene.messages == []


def test_ten_times_the_load_has_its_settings_within_ten_seconds():
    """The curve has steps: small batches are fast, so a light load uses no large batches."""
    curve = LatencyCurve([1, 4, 64], [0.005, 0.009, 0.05])
    scene = Scene(Objective("throughput", 0.2), curve)
    scene.server.requests([*poisson(60, 1200), *(20 + poisson(600, 12_000))])
    scene.run(20)
    changed = len(scene.server.history)
    assert scene.run(10).max_batch == 64
    assert scene.server.history[changed - 1][0] <= 30
    assert scene.mean_latency(since=28) < 0.15


def test_settings_that_cannot_serve_ten_times_the_load_are_left():
    """Batches of up to four are best for a light load, and too slow for a heavy one."""
    curve = LatencyCurve([1, 2, 4, 8, 16, 32], [0.0078, 0.0124, 0.0147, 0.0165, 0.025, 0.0368])
    scene = Scene(Objective("device_time", 0.088), curve)
    scene.server.requests([*poisson(43, 520), *(12 + poisson(434, 12_000))])
    before = scene.run(12)
    assert curve.capacity(before.max_batch) < 434
    scene.run(10)
    now = simulate(curve, poisson(434, 10_000), scene.run(1))
    assert now.p99_seconds < 0.088
    recent = [seconds for when, seconds in scene.server.latencies if when > 22]
    assert np.percentile(recent, 99) < 0.088


def test_clients_that_wait_for_each_other_are_served_together():
    scene = Scene()
    scene.server.clients(64)
    before = scene.run(1.0)
    assert before == BatchSettings(0.0, 64)
    settings = scene.run(8)
    assert settings.timeout_seconds > 0
    assert settings.max_batch == 64
    # All in one batch of 14.4 ms; before, two halves took turns.
    assert scene.mean_latency(since=scene.server.now - 2) < 0.017
    assert scene.mean_latency(since=0) > 0.017


def test_a_timeout_that_gains_nothing_is_not_kept():
    """If two half batches take as long as one full batch, clients lose by waiting."""
    scene = Scene(curve=LatencyCurve(range(1, 65), [0.0002 * rows for rows in range(1, 65)]))
    scene.server.clients(16)
    assert scene.run(30).timeout_seconds == 0
    # Longer and longer pauses: what trying costs is bounded.
    tried = [when for when, settings in scene.server.history if settings.timeout_seconds > 0]
    assert len(tried) < 30


def test_over_capacity_is_said_once_and_the_most_is_served():
    scene = Scene(max_batches=[1, 8])
    scene.server.requests(poisson(2000, 30_000))
    assert scene.run(12) == BatchSettings(0.0, 8)
    assert len(scene.messages) == 1
    assert scene.messages[0].startswith("over capacity: ")
    assert scene.tuner.reason.startswith("over capacity: ")


def test_refused_requests_are_load():
    scene = Scene()
    tuner, server = scene.tuner, scene.server
    for when in poisson(9000, 18_000):
        server.at(when, tuner.load.record_rejection)
    server.clients(16)  # as many as may wait
    scene.run(2)
    assert [text.partition(":")[0] for text in scene.messages] == ["over capacity"]
    server.requests(poisson(100, 3000))
    scene.run(20)
    assert scene.messages[1:] == ["the load is served within the objective again"]


def test_a_slower_device_is_noticed():
    """A batch takes four times as long as on the idle machine where the curve was measured."""
    scene = Scene(seconds_of=lambda rows: 4 * CURVE.seconds(rows))
    scene.server.requests(poisson(300, 6000))
    scene.run(15)
    slower = np.divide(scene.tuner.load.curve().batch_seconds, CURVE.batch_seconds)
    assert np.all((slower > 2.5) & (slower < 4.1))


def test_batches_that_vary_are_noticed():
    """Every fourth batch takes four times as long, which the initial curve does not show."""
    now = [0.0]
    load = LoadMonitor(CURVE, lambda: now[0])
    for batch in range(400):
        load.record_arrival()
        load.record_batch(1, CURVE.seconds(1) * (4 if batch % 4 == 0 else 1))
    shares = np.array(load.curve().spread)
    assert shares.mean() == pytest.approx(1)
    assert np.mean(shares > 2) == pytest.approx(0.25, abs=0.02)
    assert np.percentile(shares, 90) / np.median(shares) == pytest.approx(4, rel=0.15)


def test_run_applies_at_once_and_ends_when_it_is_cancelled():
    async def scenario():
        applied = []
        task = asyncio.create_task(Tuner(CURVE).run(applied.append))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return applied

    assert asyncio.run(scenario()) == [BatchSettings(0.0, 64)]


@pytest.mark.parametrize("kind", [RuntimeError, OSError])  # it failed, or could not be started
def test_a_choice_that_fails_ends_nothing(kind):
    """The failure is reported, and serving continues."""
    scene = Scene()

    async def fails(*_, **__):
        raise kind("choosing settings failed: no memory")

    async def looks():
        task = asyncio.ensure_future(scene.tuner.run(scene.server.apply))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    scene.tuner._choose = fails
    scene.server.requests(poisson(300, 3000))
    scene.tuner._sleep = lambda seconds: _yielding(scene.server, seconds)
    asyncio.run(looks())
    assert scene.messages[0] == "choosing settings failed: no memory"


async def _yielding(server, seconds):
    await server.sleep(seconds)
    await asyncio.sleep(0)


# Counts.


def kinds(settings, comes):
    """Returns the kinds of load that the monitor reports after each second but the first."""
    server = VirtualServer(CURVE.seconds)
    server.load, server.settings = LoadMonitor(CURVE, server.clock), settings
    comes(server)

    async def looks():
        for _ in range(12):
            await server.sleep(1.0)
            yield server.load.kind

    async def found():
        return [kind async for kind in looks()][1:]

    return set(asyncio.run(found()))


@pytest.mark.parametrize("rate", [60, 200, 500, 800, 2000])
@pytest.mark.parametrize(
    ("milliseconds", "rows"), [(0, 64), (64, 16), (64, 64), (16, 8), (4, 32), (64, 32)]
)
def test_requests_that_come_when_they_like_are_known(milliseconds, rows, rate):
    """Holds for any settings: if batches are full, only the remaining queue varies."""
    settings = BatchSettings(milliseconds * 1e-3, rows)
    comes = [*poisson(rate, rate * 12, seed=1)]
    assert kinds(settings, lambda server: server.requests(comes)) == {"open"}


@pytest.mark.parametrize("clients", [2, 3, 8, 32, 100])
@pytest.mark.parametrize(("milliseconds", "rows"), [(0, 64), (0, 8), (4, 64), (16, 32)])
def test_clients_that_wait_for_their_answers_are_known(milliseconds, rows, clients):
    settings = BatchSettings(milliseconds * 1e-3, rows)
    assert kinds(settings, lambda server: server.clients(clients)) == {"closed"}


def test_clients_of_which_some_are_late_for_a_few_batches():
    now = [0.0]
    load = LoadMonitor(CURVE, lambda: now[0])
    for batch in range(100):
        come = 1 if batch % 20 == 19 else 32
        for _ in range(come):
            load.record_arrival()
        now[0] += 0.01
        load.record_batch(come, 0.01)
    assert load.kind == "closed"


def test_littles_law():
    now = [0.0]
    load = LoadMonitor(CURVE, lambda: now[0])
    before = load.totals()
    for _ in range(4):  # two requests, each inside for half a second
        load.record_arrival()
        load.record_arrival(rows=3)
        now[0] += 0.5
        load.record_batch(4, 0.3, requests=2)
    spell = load.totals().since(before)
    assert spell.waited / spell.answered == pytest.approx(0.5)
    assert (spell.rows, spell.batches) == (16, 4)
    assert spell.busy == pytest.approx(1.2)
    assert len(load.recent(0.6)) == 4  # of the last pair, at 1.5 s
    load.record_arrival()
    load.record_departure()
    load.record_departure()
    assert load.in_flight == 0


@pytest.mark.parametrize("clients", [0, 1, 24])
def test_a_bound_that_clients_in_a_closed_loop_cannot_have_is_reported_once(clients):
    scene = Scene(Objective("latency", p99_seconds=0.005))
    scene.server.clients(clients)
    scene.run(60)
    (message,) = scene.messages
    assert "no setting keeps 99 of 100 requests within 5 ms" in message


def test_a_bound_that_is_met_is_not_reported_and_one_that_is_met_again_is():
    scene = Scene(Objective("latency", p99_seconds=0.012))
    scene.server.clients(1)
    scene.run(30)
    assert not scene.messages
    scene.server.clients(64)
    scene.run(60)
    assert len(scene.messages) == 1
    scene.server._clients = 0
    scene.run(60)
    assert scene.messages[1:] == ["the load is served within the objective again"]
