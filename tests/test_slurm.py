import doctest

import pytest

from kdist import slurm
from kdist.cluster import Cluster

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
}


def test_examples():
    assert doctest.testmod(slurm).failed == 0


def test_every_task_is_a_worker_on_its_own_host():
    cluster = Cluster.resolve(STEP)
    assert cluster.name == "worker 2"
    hosts, ports = zip(*(address.split(":") for address in cluster.tasks["worker"]), strict=True)
    assert hosts == ("n9", "n9", "n10", "n10")
    assert ports[0] == ports[2]
    assert int(ports[1]) == int(ports[0]) + 1


def test_parameter_servers_come_after_the_chief():
    for rank, name in enumerate([("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]):
        tasks, *place = slurm.tasks_of_slurm(STEP | {"SLURM_PROCID": str(rank)}, num_ps=1)
        assert tuple(place) == name
    assert {role: len(addresses) for role, addresses in tasks.items()} == {
        "chief": 1,
        "ps": 1,
        "worker": 2,
    }


def test_ports_are_below_those_of_outgoing_connections():
    for job in ("1", "186", "187", "99999999"):
        tasks, *_ = slurm.tasks_of_slurm(STEP | {"SLURM_JOB_ID": job})
        assert all(20000 <= int(a.split(":")[1]) < 32768 for a in tasks["worker"])


def test_a_step_of_one_is_alone():
    assert slurm.tasks_of_slurm({}) is None
    assert slurm.tasks_of_slurm(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_STEP_NODELIST": "n[9"}, "no list of Slurm hosts"),
        ({"SLURM_STEP_NODELIST": "n9,,n10"}, "no list of Slurm hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "no numbers of Slurm tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "has 2 hosts, SLURM_STEP_TASKS_PER_NODE 1"),
    ],
)
def test_refuses(change, says):
    with pytest.raises(ValueError, match=says):
        slurm.tasks_of_slurm(STEP | change)


def test_a_missing_variable_and_too_few_tasks():
    with pytest.raises(ValueError, match="SLURM_PROCID is not set.*start by srun"):
        slurm.tasks_of_slurm({k: v for k, v in STEP.items() if k != "SLURM_PROCID"})
    with pytest.raises(ValueError, match="ask for at least 5"):
        slurm.tasks_of_slurm(STEP, num_ps=3)
