"""Worker processes may die: only requests that kill them are lost."""

import asyncio
import os
import shutil
import signal
import threading
import time
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from kdist.serving.core.settings import BatchSettings
from kdist.serving.engine.batcher import BadInput, Batcher, DevicePool
from kdist.serving.engine.in_process import VersionKey
from kdist.serving.engine.worker_pool import WorkerDied, WorkerPool
from tests.serving.running import SECONDS, running, save_times

KEY = VersionKey("m", 1)


class Slow(tf.Module):
    """Model y = x that takes x² steps, which is forever for 1e5, and rejects negative rows."""

    @tf.function(input_signature=[tf.TensorSpec((None, 1), name="x")])
    def default(self, x):
        steps = tf.cast(tf.reduce_max(x) ** 2, tf.int64)
        with tf.control_dependencies([tf.debugging.assert_non_negative(x, "below zero")]):
            ended = tf.while_loop(
                lambda i, _: i < steps, lambda i, y: (i + 1, y), (tf.constant(0, tf.int64), x)
            )
        return {"y": ended[1]}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    path = tmp_path_factory.mktemp("slow") / "1"
    module = Slow()
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.default})
    return path


@pytest.fixture(scope="module")
def workers(slow):
    it = WorkerPool(2, batch_seconds=5.0)
    it.load(KEY, str(slow), [1, 2])
    yield it
    it.close()
    assert it.pids == []


def rows(*values):
    return {"x": np.array([[value] for value in values], "float32")}


def compute(workers, *values, key=KEY):
    return workers.compute(key, "serving_default", rows(*values))["y"][:, 0].tolist()


def kill(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def all_there(workers):
    """Waits until all workers are running and idle."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        compute(workers, 1)  # who has died while it was idle is found by a batch
        if len(workers.pids) == workers.slots and workers._idle.qsize() == workers.slots:
            return
        time.sleep(0.02)
    pytest.fail("a worker does not come back")


def test_they_compute_and_refuse(workers):
    assert compute(workers, 1, 2) == [1, 2]
    with pytest.raises(BadInput, match="below zero"):
        compute(workers, -1)
    assert compute(workers, 3) == [3]


@pytest.mark.slow
def test_workers_that_were_killed_while_idle_lose_no_request(workers):
    """All workers die while idle, which does not count against a batch."""
    for _ in range(2):
        all_there(workers)
        pids = workers.pids
        kill(pids)
        assert compute(workers, 1) == [1]
        all_there(workers)
        assert not set(pids) & set(workers.pids)


def test_a_worker_that_is_killed_in_a_batch_loses_no_request(workers):
    all_there(workers)
    with futures.ThreadPoolExecutor(2) as pool:
        answer = pool.submit(compute, workers, 300)
        time.sleep(0.02)
        kill(workers.pids[:1])
        assert answer.result(SECONDS) == [300]
    all_there(workers)


@pytest.mark.slow
def test_a_batch_that_takes_too_long_is_given_up_and_its_neighbours_are_answered(slow):
    workers = WorkerPool(2, batch_seconds=1.0)
    workers.load(KEY, str(slow), [1])

    async def scenario():
        devices = DevicePool(workers.slots)
        batcher = Batcher(
            lambda arrays: workers.compute(KEY, "serving_default", arrays),
            BatchSettings(0.05, 4),
            devices=devices,
        )
        answers = await asyncio.gather(
            *(batcher(rows(x)) for x in (1, 1e6, 2, 3)), return_exceptions=True
        )
        await batcher.close()
        devices.close()
        return answers

    try:
        answers = asyncio.run(asyncio.wait_for(scenario(), SECONDS))
        assert isinstance(answers.pop(1), WorkerDied)
        assert [answer["y"].item() for answer in answers] == [1, 2, 3]
        assert compute(workers, 4) == [4]
    finally:
        workers.close()


@pytest.mark.slow
def test_versions_come_and_go_while_batches_and_deaths_go_on(workers, slow, tmp_path):
    save_times(tmp_path / "2", 2)
    second, done, wrong = VersionKey("m", 2), threading.Event(), []

    def ask():
        while not done.is_set():
            try:
                assert compute(workers, 5) == [5]
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(3):
        workers.load(second, str(tmp_path / "2"), [1])
        assert compute(workers, 4, key=second) == [8]
        kill(workers.pids[:1])
        workers.unload(second)
    done.set()
    thread.join(SECONDS)
    assert not wrong
    with pytest.raises(RuntimeError, match="no worker has m/2"):
        compute(workers, 1, key=second)


def test_a_version_that_does_not_load_is_forgotten(workers, tmp_path):
    with pytest.raises(RuntimeError, match="is not a SavedModel"):
        workers.load(VersionKey("m", 9), str(tmp_path), [1])
    assert compute(workers, 1) == [1]


@pytest.mark.exhaustive
def test_closing_ends_what_starts_anew(slow, tmp_path):
    """No process is left behind, even while workers restart."""
    for way in ("revive", "load"):
        workers = WorkerPool(2)
        workers.load(KEY, str(slow), [1])
        if way == "revive":
            kill(workers.pids)
            with futures.ThreadPoolExecutor(1) as pool:
                answer = pool.submit(compute, workers, 1)
                time.sleep(0.05)
                workers.close()
                answer.exception(SECONDS)
        else:
            with futures.ThreadPoolExecutor(1) as pool:
                loading = pool.submit(workers.load, VersionKey("m", 2), str(slow), [1, 2, 4, 8])
                time.sleep(0.05)
                workers.close()
                loading.exception(SECONDS)
        deadline = time.monotonic() + 10
        while workers.pids and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not workers.pids, way
        time.sleep(0.5)
        assert not workers.pids, way


@pytest.mark.slow
def test_a_server_whose_workers_are_killed_answers_every_request(tmp_path):
    save_times(tmp_path / "m" / "1", 3)
    done, wrong, count = threading.Event(), [], []
    with running(
        {"m": tmp_path / "m"}, BatchSettings(0.0, 2), compute_engine=WorkerPool(2), sizes=[1, 2]
    ) as it:

        def ask():
            while not done.is_set():
                response = it.post("/v1/models/m:predict", {"instances": [[2]]})
                count.append(response.status_code)
                if response.json() != {"predictions": [[6.0]]}:
                    wrong.append(response.text)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            time.sleep(0.3)
            kill(it.models.compute_engine.pids[:1])
        done.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not wrong
    assert len(count) > 20


@pytest.mark.exhaustive
def test_files_that_have_gone_are_no_matter_to_the_workers_that_have_them(slow, tmp_path):
    path = tmp_path / "1"
    shutil.copytree(slow, path)
    workers = WorkerPool(2)
    try:
        workers.load(KEY, str(path), [1])
        shutil.rmtree(path)
        kill(workers.pids[:1])
        assert [compute(workers, n) for n in (1, 2, 3)] == [[1], [2], [3]]
    finally:
        workers.close()
