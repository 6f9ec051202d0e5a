"""Measurements of the devices of two tasks, in processes of their own."""

import pytest

from kdist.testing import python_tasks
from tests.unit.telemetry.test_collector import COLLECTING, _check


@pytest.mark.slow
def test_devices_of_two_workers_arrive_at_the_first(fake_nvml, monkeypatch):
    for name, value in fake_nvml(0.9, 0.4).items():
        monkeypatch.setenv(name, value)
    wanted = ["process/worker-0", "process/worker-1", "gpu/0", "gpu/1"]
    told, _ = python_tasks(COLLECTING, {"worker": 2}, ["multi_worker", *wanted])
    _check(told["records"], wanted)
    of = {record["device"]: record for record in told["records"]}
    assert (of["gpu/0"]["utilization"], of["gpu/1"]["utilization"]) == (0.9, 0.4)
    assert 0 < told["overhead"] < 0.2


@pytest.mark.exhaustive
def test_devices_of_parameter_servers_and_evaluators_arrive_as_well():
    tasks = {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}
    names = ["chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"]
    wanted = [f"process/{name}" for name in names]
    told, *_ = python_tasks(COLLECTING, tasks, ["parameter_server", *wanted])
    _check(told["records"], wanted)
