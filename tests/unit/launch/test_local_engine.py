"""Shares of GPUs and threads among the tasks of a machine."""

import os
import sys

import pytest

from kdist.cluster import TF_CONFIG, Cluster
from kdist.cluster.handshake import TOKEN_VARIABLE
from kdist.data.worker_addresses import DATA_WORKERS
from kdist.hardware import CORES_VARIABLE, VISIBLE_DEVICES, find_gpus
from kdist.launch import local_engine
from kdist.launch.local_engine import local_job, share_gpus, share_threads


def job(**counts):
    ports = iter(range(1, 100))
    tasks = {role: [f"h:{next(ports)}" for _ in range(n)] for role, n in counts.items()}
    return Cluster(tasks, next(iter(tasks)), 0).all_tasks()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3", ["2", "3"]),
        ("GPU-1a, GPU-2b", ["GPU-1a", "GPU-2b"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_visible_gpus(visible, expected):
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_gpus_of_the_driver(monkeypatch):
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    assert find_gpus({}) == ["0", "1", "2"]

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert find_gpus({}) == []


def test_workers_share_gpus_evenly():
    assert share_gpus(job(worker=2), ["4", "5", "6", "7"]) == {"worker 0": "4,5", "worker 1": "6,7"}
    # All tasks of multi_worker have the same number; one GPU stays idle.
    assert share_gpus(job(worker=2), ["0", "1", "2"]) == {"worker 0": "0", "worker 1": "1"}


def test_a_chief_that_trains_gets_gpus_and_one_that_coordinates_none():
    trains = share_gpus(job(chief=1, worker=1, evaluator=1), ["0", "1"])
    assert trains == {"chief": "0", "worker 0": "1", "evaluator": ""}
    coordinates = share_gpus(job(chief=1, worker=2, ps=1), ["0", "1"])
    assert coordinates == {"chief": "", "worker 0": "0", "worker 1": "1", "ps 0": ""}


def test_more_workers_than_gpus_need_share_gpus():
    with pytest.raises(ValueError, match="3 tasks compute, and there are 2 GPUs.*--share_gpus"):
        share_gpus(job(worker=3), ["0", "1"])
    shared = share_gpus(job(worker=3), ["0", "1"], share_one=True)
    assert shared == {"worker 0": "0", "worker 1": "1", "worker 2": "0"}


def test_without_gpus_tasks_that_compute_keep_their_variable():
    assert share_gpus(job(worker=3), []) == {}
    assert share_gpus(job(chief=1, worker=1, ps=1), []) == {"chief": "", "ps 0": ""}


def threads(number):
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "KDIST_CORES")
    return dict.fromkeys(names, str(number))


@pytest.fixture
def nine_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))


@pytest.mark.usefixtures("nine_cores")
def test_tasks_that_compute_share_the_cores():
    assert share_threads(job(worker=2), {}) == threads(4)
    assert share_threads(job(chief=1, worker=2), {}) == threads(3)
    assert share_threads(job(chief=1, worker=2, ps=5), {}) == threads(4)
    assert share_threads(job(worker=2, evaluator=1), {}) == threads(3)
    assert share_threads(job(worker=20), {}) == threads(1)
    chief, _, server = job(chief=1, worker=1, ps=1)
    assert share_threads([chief], {}) == share_threads([server], {}) == threads(9)


@pytest.mark.usefixtures("nine_cores")
def test_variables_of_the_user_stay():
    assert share_threads(job(worker=3), {"OMP_NUM_THREADS": "7"}) == {
        name: "3" for name in threads(3) if name != "OMP_NUM_THREADS"
    }
    # kdist.devices must recognize this as the user's choice.
    left = share_threads(job(worker=3), {"TF_NUM_INTRAOP_THREADS": "7"})
    assert not {"TF_NUM_INTRAOP_THREADS", CORES_VARIABLE} & left.keys()


@pytest.mark.usefixtures("nine_cores")
def test_a_job_inside_a_task_divides_the_tasks_share():
    assert share_threads(job(worker=2), threads(4)) == threads(2)


def test_the_tasks_of_a_job_share_a_token_of_their_own(tmp_path, monkeypatch):
    environments = []
    monkeypatch.setattr(local_engine, "Task", lambda *args: environments.append(args[2]))
    monkeypatch.setattr(local_engine, "TaskGroup", lambda *args: None)
    for _ in range(2):
        with local_job(
            {"worker": 2}, [sys.executable], tmp_path, environment={TOKEN_VARIABLE: "x"}
        ):
            pass
    first, *tokens = [environment[TOKEN_VARIABLE] for environment in environments]
    assert len(first) == 32
    assert tokens[0] == first
    assert tokens[1] == tokens[2] != first


def test_data_workers_are_known_to_the_tasks_and_no_tasks_of_the_cluster(tmp_path):
    environment = {"PATH": os.environ["PATH"]}
    counts, command = {"worker": 1}, [sys.executable]
    with local_job(counts, command, tmp_path, environment=environment, data_workers=2) as group:
        task, *workers = group.tasks
        assert [worker.name for worker in workers] == ["data worker 0", "data worker 1"]
        assert group.chief is task
        addresses = task._environment[DATA_WORKERS].split(",")
        for worker, address in zip(workers, addresses, strict=True):
            port = address.removeprefix("127.0.0.1:")
            assert worker._command[-3:-1] == ["data_worker", f"--port={port}"]
            assert worker._environment[VISIBLE_DEVICES] == "-1"
            assert TF_CONFIG not in worker._environment
    assert len(set(addresses)) == 2
