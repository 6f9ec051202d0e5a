import json

import pytest

from kdist.cluster import Cluster

TWO = {"worker": ["a:1", "b:2"]}


def test_tf_config_and_back():
    text = json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 1}})
    cluster = Cluster.from_tf_config(text)
    assert (cluster.name, cluster.address, cluster.num_workers) == ("worker 1", "b:2", 2)
    assert json.loads(cluster.to_tf_config()) == json.loads(text)
    environment = {}
    cluster.publish(environment)
    assert Cluster.resolve(environment) == cluster


def test_without_anything_a_process_is_alone_and_chief():
    cluster = Cluster.resolve({})
    assert cluster.is_alone
    assert cluster.is_chief
    assert cluster.all_tasks() == cluster.others() == []


def test_who_decides():
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
    ("tasks", "role", "index", "says"),
    [
        ({"wroker": ["a:1"]}, "wroker", 0, "no such role: wroker; there are chief, worker, ps"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "2 tasks have the role chief.*make the others"),
        ({"worker": ["a:1", "a:1"]}, "worker", 0, "two tasks have the address a:1"),
        ({"worker": ["a"]}, "worker", 0, "'a' is no address; write it as host:port"),
        ({"worker": ["a:0"]}, "worker", 0, "'a:0' is no address"),
        ({"worker": ["a:99999"]}, "worker", 0, "'a:99999' is no address"),
        (TWO, "worker", 2, "is worker 2, and the cluster has worker 0 to 1"),
        (TWO, "ps", 0, "is ps 0, and the cluster has no ps; it has worker"),
    ],
)
def test_refuses(tasks, role, index, says):
    with pytest.raises(ValueError, match=says):
        Cluster(tasks, role, index)


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": {}, "task": {"index": "x"}}', '"a"'])
def test_a_tf_config_that_is_none(text):
    with pytest.raises(ValueError, match="TF_CONFIG is not .*unset it to train alone"):
        Cluster.from_tf_config(text)


@pytest.mark.parametrize(
    ("strategy", "tasks", "says"),
    [
        ("multi_worker", {"chief": ["a:1"]}, "needs tasks of the role worker; .* 1 chief"),
        ("multi_worker", {**TWO, "ps": ["c:1"]}, "no use for tasks of the role ps"),
        ("parameter_server", TWO, "role chief and ps; the cluster has 2 worker.*TF_CONFIG"),
    ],
)
def test_roles_that_a_strategy_needs(strategy, tasks, says):
    with pytest.raises(ValueError, match=says):
        Cluster(tasks, next(iter(tasks))).check_roles_for(strategy)


def test_roles_that_will_do():
    Cluster(TWO).check_roles_for("multi_worker")
    tasks = {"chief": ["c:1"], "ps": ["p:1"], "evaluator": ["e:1"], **TWO}
    Cluster(tasks).check_roles_for("parameter_server")
