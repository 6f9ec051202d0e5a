"""Clusters."""

import json

import pytest

from kdist.cluster import Cluster

TWO = {"worker": ["a:1", "b:2"]}


def test_tf_config_round_trip():
    text = json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 1}})
    cluster = Cluster.from_tf_config(text)
    assert (cluster.name, cluster.address, cluster.num_workers) == ("worker 1", "b:2", 2)
    assert json.loads(cluster.to_tf_config()) == json.loads(text)
    environment = {}
    cluster.publish(environment)
    assert Cluster.resolve(environment) == cluster


def test_a_single_process_is_the_chief():
    cluster = Cluster.resolve({})
    assert cluster.is_alone
    assert cluster.is_chief
    assert cluster.all_tasks() == cluster.others() == []


def test_the_planned_number_of_workers():
    environment = {}
    Cluster(TWO, "worker", 1, planned_workers=3).publish(environment)
    cluster = Cluster.resolve(environment)
    assert (cluster.num_workers, cluster.planned_workers) == (2, 3)
    with pytest.raises(ValueError, match="1 are planned"):
        Cluster.resolve({**environment, "KDIST_PLANNED_WORKERS": "1"})
    Cluster(TWO).publish(environment)  # of a job that a task of the other one starts
    assert Cluster.resolve(environment).planned_workers is None


def test_chief_and_workers():
    with_chief = {"chief": ["c:1"], **TWO}
    assert Cluster(TWO, "worker", 0).is_chief
    assert not Cluster(TWO, "worker", 1).is_chief
    assert Cluster(with_chief, "chief", 0).is_chief
    assert not Cluster(with_chief, "worker", 0).is_chief
    assert Cluster(with_chief, "chief", 0).num_workers == 3
    assert [task.name for task in Cluster(with_chief, "worker", 1).others()] == [
        "chief",
        "worker 0",
    ]


@pytest.mark.parametrize(
    ("tasks", "role", "index", "message"),
    [
        ({"wroker": ["a:1"]}, "wroker", 0, "unknown role: wroker; the roles are chief, worker, ps"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "2 tasks have the role chief.*make the others"),
        ({"worker": ["a:1", "a:1"]}, "worker", 0, "two tasks have the address a:1"),
        ({"worker": ["a"]}, "worker", 0, "invalid address 'a'; write it as host:port"),
        ({"worker": ["a:0"]}, "worker", 0, "invalid address 'a:0'"),
        ({"worker": ["a:99999"]}, "worker", 0, "invalid address 'a:99999'"),
        (TWO, "worker", 2, "is worker 2, and the cluster has worker 0 to 1"),
        (TWO, "ps", 0, "is ps 0, and the cluster has no ps; it has worker"),
    ],
)
def test_rejects(tasks, role, index, message):
    with pytest.raises(ValueError, match=message):
        Cluster(tasks, role, index)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '"a"', "5", "null", "[" * 100_000),
        *('{"cluster": []}', '{"cluster": null}', '{"cluster": "a:1"}'),
        *('{"cluster": {"worker": "a:1"}}', '{"cluster": {"worker": 5}}'),
        *(f'{{"cluster": {{}}, "task": {task}}}' for task in ("5", "null", '{"type": ["worker"]}')),
        *(
            f'{{"cluster": {{}}, "task": {{"index": {index}}}}}'
            for index in ('"x"', "-1", "1.5", "1e999", "true", "null", "[0]")
        ),
    ],
)
def test_a_malformed_tf_config(text):
    with pytest.raises(ValueError, match="TF_CONFIG is not .*unset it"):
        Cluster.from_tf_config(text)


@pytest.mark.parametrize(
    ("strategy", "tasks", "message"),
    [
        ("multi_worker", {"chief": ["a:1"]}, "needs tasks of the role worker; .* 1 chief"),
        ("multi_worker", {**TWO, "ps": ["c:1"]}, "does not use tasks of the role ps"),
        ("parameter_server", TWO, "role chief and ps; the cluster has 2 workers.*KDIST_PS=1"),
    ],
)
def test_missing_and_unused_roles(strategy, tasks, message):
    with pytest.raises(ValueError, match=message):
        Cluster(tasks, next(iter(tasks))).check_roles_for(strategy)


def test_sufficient_roles():
    Cluster(TWO).check_roles_for("multi_worker")
    tasks = {"chief": ["c:1"], "ps": ["p:1"], "evaluator": ["e:1"], **TWO}
    Cluster(tasks).check_roles_for("parameter_server")
