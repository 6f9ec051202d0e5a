"""Nodes of a Slurm job step."""

import doctest

import pytest

from kdist.cluster import Cluster, slurm

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
}


def test_examples():
    assert doctest.testmod(slurm).failed == 0


def test_every_task_is_a_worker_with_its_own_address():
    cluster = Cluster.resolve(STEP)
    assert cluster.name == "worker 2"
    hosts, ports = zip(*(address.split(":") for address in cluster.tasks["worker"]), strict=True)
    assert hosts == ("n9", "n9", "n10", "n10")
    assert ports[0] == ports[2]
    assert int(ports[1]) == int(ports[0]) + 1


def test_ports_are_below_those_of_outgoing_connections():
    for job in ("1", "186", "187", "99999999"):
        addresses, _ = slurm.read_slurm_nodes(STEP | {"SLURM_JOB_ID": job})
        assert all(20000 <= int(a.split(":")[1]) < 32768 for a in addresses)


def test_a_step_of_one_task_is_not_a_job():
    assert slurm.read_slurm_nodes({}) is None
    assert slurm.read_slurm_nodes(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_NODELIST": "n[9"}, "not a list of Slurm hosts"),
        ({"SLURM_STEP_NODELIST": "n9,,n10"}, "not a list of Slurm hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "not a list of Slurm task counts"),
        (
            {"SLURM_STEP_NUM_TASKS": "two"},
            "SLURM_STEP_NUM_TASKS=two is not a number; start with srun",
        ),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1 is not a number"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID= is not a number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "has 2 hosts, SLURM_STEP_TASKS_PER_NODE 1"),
    ],
)
def test_rejects(change, message):
    with pytest.raises(ValueError, match=message):
        slurm.read_slurm_nodes(STEP | change)


def test_a_program_without_srun_in_a_job_of_several_nodes():
    with pytest.raises(ValueError, match="2 nodes.*start it with srun.*TF_CONFIG={}"):
        slurm.read_slurm_nodes({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2"})
    assert slurm.read_slurm_nodes({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1"}) is None


def test_a_missing_variable_is_named():
    with pytest.raises(ValueError, match="SLURM_PROCID is not set.*start with srun"):
        slurm.read_slurm_nodes({k: v for k, v in STEP.items() if k != "SLURM_PROCID"})
