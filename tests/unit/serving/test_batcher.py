"""Which requests share a batch, and that each receives the outputs of its own rows."""

import asyncio
import threading

import numpy as np
import pytest

from kdist.serving.core.settings import BatchSettings
from kdist.serving.engine.batcher import BadInput, Batcher, DevicePool, Overloaded
from kdist.serving.policy.latency_curve import LatencyCurve
from kdist.serving.policy.load import LoadMonitor

LONG = 60.0


class Device:
    """Device that doubles rows and records its calls; each call waits for permission."""

    def __init__(self, open=True):
        self.calls = []
        self.may_go_on = threading.Semaphore(10_000 if open else 0)

    def __call__(self, arrays):
        assert self.may_go_on.acquire(timeout=30)
        self.calls.append(arrays["x"][:, 0].tolist())
        if -1 in self.calls[-1]:
            raise ArithmeticError("a bad row")
        return {"y": arrays["x"] * 2}


def rows(*values):
    return {"x": np.array([[value] for value in values], "float32")}


def run(scenario):
    """Runs a coroutine function with a time limit."""
    return asyncio.run(asyncio.wait_for(scenario(), 30))


async def settle():
    """Returns when all tasks are waiting."""
    for _ in range(10):
        await asyncio.sleep(0)


def started(batcher, *requests):
    return [asyncio.ensure_future(batcher(request)) for request in requests]


async def started_one_first(batcher, first, *requests):
    """Starts requests: the first finds a free device, the others a busy one."""
    tasks = started(batcher, first)
    await settle()
    tasks += started(batcher, *requests)
    await settle()
    return tasks


def values(answers):
    return [answer["y"][:, 0].tolist() for answer in answers]


def test_requests_gather_while_the_device_is_busy():
    async def scenario():
        device = Device(open=False)
        batcher = Batcher(device, BatchSettings(0.0, 4))
        tasks = await started_one_first(batcher, *(rows(n) for n in range(7)))
        device.may_go_on.release(9)
        assert values(await asyncio.gather(*tasks)) == [[2 * n] for n in range(7)]
        # The first found a free device; four are a full batch.
        assert device.calls == [[0], [1, 2, 3, 4], [5, 6]]
        assert batcher.waiting_rows == 0

    run(scenario)


def test_a_full_batch_waits_for_nobody():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(LONG, 3))
        assert values(await asyncio.gather(*started(batcher, rows(1), rows(2, 3)))) == [[2], [4, 6]]
        assert device.calls == [[1, 2, 3]]

    run(scenario)


def test_the_oldest_waits_for_the_timeout():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(1.0, 8))
        tasks = started(batcher, rows(1), rows(2))
        await settle()
        assert device.calls == []
        tasks += started(batcher, rows(3))
        await asyncio.gather(*tasks)
        assert device.calls == [[1, 2, 3]]

    run(scenario)


def test_settings_may_change_meanwhile():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(LONG, 8))
        tasks = started(batcher, rows(1))
        await settle()
        batcher.settings = BatchSettings(0.0, 8)
        tasks += started(batcher, rows(2))
        await asyncio.gather(*tasks)
        assert device.calls == [[1, 2]]

    run(scenario)


def test_batches_have_the_sizes_that_there_are():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(LONG, 3), sizes=[1, 4])
        answers = await asyncio.gather(*started(batcher, rows(5, 6), rows(7)))
        assert values(answers) == [[10, 12], [14]]
        assert device.calls == [[5, 6, 7, 5]]  # a copy of a row that there is

    run(scenario)


def test_a_request_larger_than_a_batch_is_cut():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(0.0, 4))
        answer = await batcher(rows(*range(10)))
        assert values([answer]) == [[2 * n for n in range(10)]]
        assert [len(call) for call in device.calls] == [4, 4, 2]

    run(scenario)


def test_a_bad_request_harms_no_other():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(LONG, 3))
        tasks = started(batcher, rows(1), rows(-1), rows(3))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[1], ArithmeticError)
        assert values([answers[0], answers[2]]) == [[2], [6]]

    run(scenario)


class Model(Device):
    """Model that rejects the value -1."""

    def __call__(self, arrays):
        try:
            return super().__call__(arrays)
        except ArithmeticError as error:
            raise BadInput("a bad row") from error


def test_rows_that_a_model_refuses_are_found_by_halves():
    """Single requests would occupy the device as long as 33 batches."""

    async def scenario():
        model = Model()
        batcher = Batcher(model, BatchSettings(LONG, 32))
        tasks = started(batcher, *(rows(n if n != 20 else -1) for n in range(32)))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers.pop(20), BadInput)
        assert values(answers) == [[2 * n] for n in range(32) if n != 20]
        assert len(model.calls) == 1 + 2 * 5

    run(scenario)


def test_who_has_gone_is_left_out_when_a_batch_is_computed_anew():
    async def scenario():
        model = Model(open=False)
        batcher = Batcher(model, BatchSettings(LONG, 4))
        tasks = started(batcher, *(rows(n) for n in (1, 2, -1, 4)))
        await settle()
        tasks[0].cancel()
        tasks[1].cancel()
        await settle()
        model.may_go_on.release(9)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[2], BadInput)
        assert values(answers[3:]) == [[8]]
        assert model.calls == [[1, 2, -1, 4], [-1], [4]]

    run(scenario)


def test_who_stops_waiting_is_not_computed():
    async def scenario():
        device = Device(open=False)
        batcher = Batcher(device, BatchSettings(0.0, 4))
        tasks = await started_one_first(batcher, *(rows(n) for n in range(4)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tasks[2], 0.01)
        device.may_go_on.release(9)
        await asyncio.gather(tasks[0], tasks[1], tasks[3])
        assert device.calls == [[0], [1, 3]]
        assert batcher.waiting_rows == 0

    run(scenario)


def test_more_than_may_wait_is_refused_at_once():
    async def scenario():
        device = Device(open=False)
        batcher = Batcher(device, BatchSettings(0.0, 4), max_waiting=3)
        tasks = await started_one_first(batcher, rows(0), rows(1), rows(2, 3))
        with pytest.raises(Overloaded, match=r"\(3 of 3 rows\)") as refused:
            await batcher(rows(4))
        assert refused.value.retry_after_seconds >= 0
        device.may_go_on.release(9)
        assert values(await asyncio.gather(*tasks)) == [[0], [2], [4, 6]]
        assert values([await batcher(rows(5))]) == [[10]]

    run(scenario)


def test_closing_answers_what_waits():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(LONG, 8))
        tasks = started(batcher, rows(1), rows(2))
        await settle()
        await batcher.close()
        assert values(await asyncio.gather(*tasks)) == [[2], [4]]
        with pytest.raises(Overloaded, match="ending"):
            await batcher(rows(3))

    run(scenario)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "rows of a request: none"),
        ({"x": np.zeros((0, 1))}, "x: 0"),
        ({"x": np.zeros((2, 1)), "z": np.zeros((3, 1))}, "x: 2, z: 3"),
        ({"x": np.float32(1)}, "x: None"),
    ],
)
def test_rows_that_do_not_suit(arrays, says):
    async def scenario():
        with pytest.raises(ValueError, match=says):
            await Batcher(Device(), BatchSettings())(arrays)

    run(scenario)


def test_a_model_without_a_row_for_each_row():
    async def scenario():
        batcher = Batcher(lambda arrays: {"y": arrays["x"].sum(0)}, BatchSettings())
        with pytest.raises(ValueError, match=r"'y' has the shape \(1,\) for 2 rows"):
            await batcher(rows(1, 2))

    run(scenario)


def test_under_load_everybody_has_his_own_answer():
    async def scenario():
        generator = np.random.default_rng(0)
        device = Device()
        batcher = Batcher(device, BatchSettings(0.001, 16), sizes=[1, 4, 16], max_waiting=10**6)

        async def client(number):
            for turn in range(20):
                mine = number * 1000 + turn * 10 + np.arange(generator.integers(1, 6))
                await asyncio.sleep(float(generator.uniform(0, 0.002)))
                assert values([await batcher(rows(*mine))]) == [(2.0 * mine).tolist()]

        await asyncio.gather(*(client(number) for number in range(1, 33)))
        assert max(map(len, device.calls)) == 16
        assert {len(call) for call in device.calls} <= {1, 4, 16}
        await batcher.close()

    run(scenario)


def test_batchers_share_devices_and_take_turns():
    async def scenario():
        device, devices = Device(open=False), DevicePool(1)
        one, two = (Batcher(device, BatchSettings(0.0, 2), devices=devices) for _ in range(2))
        tasks = await started_one_first(one, *(rows(n) for n in (1, 2, 3, 4)))
        tasks += started(two, *(rows(n) for n in (11, 12, 13)))
        await settle()
        assert devices.free == 0
        device.may_go_on.release(9)
        await asyncio.gather(*tasks)
        assert devices.free == 1
        # The first came alone; the others gathered, and those of `one` waited first.
        assert device.calls == [[1], [2, 3], [11, 12], [4], [13]]

    run(scenario)


def test_as_many_batches_are_under_way_as_there_are_devices():
    async def scenario():
        device, devices = Device(open=False), DevicePool(2)
        batcher = Batcher(device, BatchSettings(0.0, 2), devices=devices)
        tasks = started(batcher, *(rows(n) for n in range(6)))
        await settle()
        assert devices.free == 0
        assert batcher.waiting_rows == 2
        device.may_go_on.release(9)
        assert values(await asyncio.gather(*tasks)) == [[2 * n] for n in range(6)]
        assert devices.free == 2

    run(scenario)


def test_rows_of_different_shapes_are_in_different_batches():
    async def scenario():
        device = Device(open=False)
        batcher = Batcher(device, BatchSettings(0.0, 8))
        wide = {"x": np.full([1, 2], 5, "float32")}
        tasks = started(batcher, rows(1), rows(2), wide, rows(3), wide)
        await settle()
        device.may_go_on.release(9)
        answers = await asyncio.gather(*tasks)
        assert [answer["y"].shape[1] for answer in answers] == [1, 1, 2, 1, 2]
        assert device.calls == [[1, 2, 3], [5, 5]]

    run(scenario)


def test_batches_are_told_of():
    async def scenario():
        told = []
        batcher = Batcher(
            Device(), BatchSettings(0.0, 4), sizes=[4], on_batch=lambda *each: told.append(each)
        )
        await batcher(rows(1, 2, 3))
        ((real, computed, seconds),) = told
        assert (real, computed) == (3, 4)
        assert seconds > 0

    run(scenario)


def test_a_closed_batcher_says_that_it_is():
    async def scenario():
        batcher = Batcher(Device(), BatchSettings())
        await batcher.close()
        with pytest.raises(Overloaded) as caught:
            await batcher(rows(1))
        assert caught.value.ending

    run(scenario)


def test_what_is_there_already_is_in_the_first_batch():
    async def scenario():
        device = Device()
        batcher = Batcher(device, BatchSettings(0.0, 8))
        await asyncio.gather(*started(batcher, *(rows(n) for n in range(5))))
        assert device.calls == [[0, 1, 2, 3, 4]]

    run(scenario)


def test_a_request_larger_than_all_the_room_is_refused_for_good():
    async def scenario():
        batcher = Batcher(Device(), BatchSettings(0.0, 4), max_waiting=6)
        with pytest.raises(ValueError, match="a request of 7 rows: 6 may wait"):
            await batcher(rows(*range(7)))
        assert len((await batcher(rows(*range(6))))["y"]) == 6

    run(scenario)


class Told:
    """Load that records how long batches took and waited."""

    def __init__(self):
        self.seconds, self.waited = [], []

    def record_arrival(self, rows, requests):
        pass

    def record_batch(self, rows, seconds, requests, waited):
        self.seconds.append(seconds)
        self.waited.append(waited)


def test_the_load_is_told_how_long_the_device_was_held():
    """The time includes the thread hand-off, which the simulator needs."""
    told, computed = Told(), []

    async def scenario():
        batcher = Batcher(
            lambda arrays: arrays,
            BatchSettings(0.0, 4),
            on_batch=lambda rows, size, seconds: computed.append(seconds),
            load=told,
        )
        for _ in range(5):
            await batcher({"x": np.zeros((1, 2))})
        await batcher.close()

    asyncio.run(scenario())
    assert len(told.seconds) == len(computed) == 5
    assert all(held > seconds for held, seconds in zip(told.seconds, computed, strict=True))


def test_a_request_larger_than_a_batch_counts_once():
    async def scenario():
        load = LoadMonitor(LatencyCurve([1, 2], [0.01, 0.01]))
        batcher = Batcher(Device(), BatchSettings(0.0, 2), load=load)
        for _ in range(16):
            await batcher(rows(1, 2, 3, 4, 5))
        assert load.totals().answered == 16
        assert load.totals().rows == 80
        assert load.kind == "alone"
        with pytest.raises(ArithmeticError):
            await batcher(rows(1, 2, 3, 4, -1))
        assert load.in_flight == 0

    run(scenario)


def test_the_load_is_told_how_long_a_batch_waited_for_other_models():
    async def scenario():
        devices, held = DevicePool(1), 0.2
        slow, mine, alone = Device(open=False), Told(), Told()
        other = Batcher(slow, BatchSettings(0.0, 1), devices=devices, load=alone)
        batcher = Batcher(Device(), BatchSettings(0.0, 1), devices=devices, load=mine)
        (waiting,) = await started_one_first(other, rows(1))
        tasks = started(batcher, rows(2), rows(3))
        await asyncio.sleep(held)
        slow.may_go_on.release()
        await asyncio.gather(waiting, *tasks)
        assert mine.waited[0] > 0.9 * held
        # Its own batch before it is no other model, and a free device is no wait.
        assert mine.waited[1] < 0.5 * held
        assert alone.waited == [0.0]
        devices.close()

    run(scenario)


def test_a_device_that_other_models_use_is_slower():
    curve = LatencyCurve([1], [0.001])
    alone, shared = LoadMonitor(curve), LoadMonitor(curve)
    for _ in range(100):
        alone.record_batch(1, 0.001)
        shared.record_batch(1, 0.001, waited=0.001)
    assert alone.curve().seconds(1) == pytest.approx(0.001)
    assert shared.curve().seconds(1) > 0.0018
    assert shared.totals().busy == pytest.approx(alone.totals().busy)
