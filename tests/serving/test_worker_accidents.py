"""Worker processes that receive signals, fail to start, or end while they load."""

import gc
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref

import keras
import numpy as np
import psutil
import pytest

from kdist.serving.engine import worker_pool as workers_module
from kdist.serving.engine import worker_process
from kdist.serving.engine.in_process import InProcess, LoadTimeout, VersionKey
from kdist.serving.engine.worker_pool import WorkerDied, WorkerPool
from kdist.serving.exporting.export import export

KEY, SIGNATURE = VersionKey("dense", 1), "serving_default"
SECONDS = 20  # that anything may take


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """Returns (directory of a version, its function of rows)."""
    directory = tmp_path_factory.mktemp("dense")
    model = keras.Sequential([keras.Input((3,), name="rows"), keras.layers.Dense(2)])
    export(model, directory, version=1)
    return directory / "1", lambda rows: model.predict(rows, verbose=0)


@pytest.fixture
def pair(version):
    """Yields a pool of two workers with the version."""
    workers = WorkerPool(2, batch_seconds=SECONDS)
    workers.load(KEY, os.fspath(version[0]), [1])
    yield workers
    workers.close()


def answer_is_right(workers, version):
    rows = np.ones((1, 3), np.float32)
    (outputs,) = workers.compute(KEY, SIGNATURE, {"inputs": rows}).values()
    np.testing.assert_allclose(outputs, version[1](rows), atol=1e-6)


def ended(pids):
    """Waits, and returns whether all processes have ended."""
    return wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def wait_until(condition, seconds=SECONDS):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


@pytest.mark.slow
def test_workers_outlive_a_signal_to_all_processes(pair, version):
    """Service managers send it while the server still answers accepted requests."""
    before = pair.pids
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    for _ in range(4):
        answer_is_right(pair, version)
    assert pair.pids == before


@pytest.mark.slow
def test_a_worker_that_cannot_be_started_once_is_started_later(pair, version, monkeypatch):
    real, failures = worker_process._context.Process, []

    def process(*args, **options):
        made = real(*args, **options)
        if not failures:
            failures.append(made)
            made.start = refuse
        return made

    def refuse():
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(worker_process._context, "Process", process)
    monkeypatch.setattr(workers_module, "_RESTART_SECONDS", 0.01)
    os.kill(pair.pids[0], signal.SIGKILL)
    for _ in range(2):
        answer_is_right(pair, version)
    assert wait_until(lambda: failures and len(pair.pids) == 2)


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_it_reads_a_large_batch_is_replaced(version):
    workers = WorkerPool(2, batch_seconds=1.0)
    workers.load(KEY, os.fspath(version[0]), [1])
    stopped = workers.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    rows = np.ones((10**6, 3), np.float32)  # more than a pipe holds
    asked = []

    def ask():
        for _ in range(2):
            asked.append(workers.compute(KEY, SIGNATURE, {"inputs": rows}))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert [len(next(iter(outputs.values()))) for outputs in asked] == [len(rows)] * 2
    assert wait_until(lambda: len(workers.pids) == 2 and stopped not in workers.pids)
    workers.close()


@pytest.mark.slow
def test_a_worker_that_is_stopped_does_not_hold_up_the_end_of_a_version(version):
    workers = WorkerPool(2, batch_seconds=1.0)
    workers.load(KEY, os.fspath(version[0]), [1])
    os.kill(workers.pids[0], signal.SIGSTOP)
    thread = threading.Thread(target=workers.unload, args=[KEY], daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    workers.load(KEY, os.fspath(version[0]), [1])
    for _ in range(2):
        answer_is_right(workers, version)
    workers.close()


def test_a_worker_that_cannot_start_is_logged_with_its_reason(version, caplog, capfd):
    workers = WorkerPool(1, devices=["CPU:none"])
    with pytest.raises(WorkerDied):
        workers.load(KEY, os.fspath(version[0]), [1])
    workers.close()
    assert re.search(r"exit code 1.*\n    ValueError: .*CPU:none", caplog.text, re.DOTALL)
    assert "CPU:none" in capfd.readouterr().err  # as before, not in the log only


def test_a_signal_that_ends_a_worker_is_logged(pair, version, caplog):
    os.kill(pair.pids[0], signal.SIGKILL)
    for _ in range(2):
        answer_is_right(pair, version)
    assert re.search(r"died; .*: SIGKILL; ", caplog.text)


@pytest.mark.slow
def test_a_worker_that_hangs_while_it_loads_is_replaced(pair, version, monkeypatch):
    def call(worker, seconds, *command):
        if command[:2] == ("load", VersionKey("dense", 2)):
            os.kill(worker.pid, signal.SIGSTOP)
            seconds = 0.1
        return real(worker, seconds, *command)

    before, real = pair.pids, worker_process.Worker.call
    monkeypatch.setattr(worker_process.Worker, "call", call)
    with pytest.raises(LoadTimeout, match="--load_seconds"):
        pair.load(VersionKey("dense", 2), os.fspath(version[0]), [1])
    assert len(set(pair.pids) - set(before)) == 1
    for _ in range(2):
        answer_is_right(pair, version)


@pytest.mark.slow
def test_a_version_that_kills_workers_is_said_to(pair, version, monkeypatch):
    def load(worker, key, path, sizes):
        if key == KEY:
            return real(worker, key, path, sizes)
        os.kill(worker.pid, signal.SIGKILL)
        return worker.call(None, "load", key, path, sizes)

    real = worker_process.Worker.load
    monkeypatch.setattr(worker_process.Worker, "load", load)
    with pytest.raises(WorkerDied, match="workers died while they loaded dense/2"):
        pair.load(VersionKey("dense", 2), os.fspath(version[0]), [1])
    answer_is_right(pair, version)


def test_an_end_while_a_version_loads_leaves_no_process(version, monkeypatch):
    workers, loading, errors = WorkerPool(1), threading.Event(), []
    before, real = workers.pids, worker_process.Worker.call

    def ask(worker, seconds, *command):
        os.kill(worker.pid, signal.SIGSTOP)  # so that it is loading when the end comes
        loading.set()
        return real(worker, seconds, *command)

    def run():
        try:
            workers.load(KEY, os.fspath(version[0]), [1])
        except WorkerDied as error:
            errors.append(str(error))

    monkeypatch.setattr(worker_process.Worker, "call", ask)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert loading.wait(SECONDS)
    workers.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert errors == ["the server is ending"]
    assert ended(before)
    assert workers.pids == []


def test_what_is_unloaded_is_freed(version):
    """Its graphs hold the weights in reference cycles."""
    computing = InProcess()
    computing.load(KEY, os.fspath(version[0]), [1])
    (function,) = computing._loaded[KEY]._functions.values()
    graph = weakref.ref(function.graph)
    del function
    gc.disable()
    try:
        computing.unload(KEY)
        assert graph() is None
    finally:
        gc.enable()


def test_loading_leaves_no_garbage(version):
    """Garbage would hold a second copy of the weights, and a server rarely collects it."""
    computing = InProcess()
    gc.collect()
    gc.disable()
    try:
        computing.load(KEY, os.fspath(version[0]), [1])
        garbage = gc.collect()
    finally:
        gc.enable()
    assert garbage < 100


def test_an_idle_worker_returns_freed_memory_once(monkeypatch):
    here, there = multiprocessing.Pipe()
    trims = []

    def trim():
        trims.append(1)
        there.send(("later",))

    monkeypatch.setattr(worker_process, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(worker_process, "return_free_memory", trim)
    there.send(("now",))
    assert worker_process._receive(here) == ("now",)
    assert not trims
    assert worker_process._receive(here) == ("later",)
    assert trims == [1]
