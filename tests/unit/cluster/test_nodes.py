"""Places that engines give to their nodes. The environments are those of the engines' documents."""

import json

import pytest

from kdist.cluster import Cluster
from kdist.cluster.nodes import read_place

# docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.128.0.47\n10.128.0.48\n10.128.0.49",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-25-21-18-31-563597_cats_1-0",
}
# dstack.ai/docs/concepts/tasks/#system-environment-variables, and dstack's
# runner/internal/executor/executor.go
DSTACK = {
    "DSTACK_RUN_NAME": "cats",
    "DSTACK_NODES_IPS": "10.128.0.47\n10.128.0.48\n10.128.0.49",
    "DSTACK_MASTER_NODE_IP": "10.128.0.47",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "3",
    "DSTACK_GPUS_PER_NODE": "1",
    "DSTACK_GPUS_NUM": "3",
}
# github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}
# kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication: a pod's name is that of the job
# with its index, in the domain of the headless service.
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "cats-1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KDIST_HOSTS": "cats-0.cats,cats-1.cats,cats-2.cats",
}
# slurm.schedmd.com/srun.html, output environment variables
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[9-11]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "3",
}
ENGINES = {
    "SkyPilot": (SKYPILOT, ["10.128.0.47:2222", "10.128.0.48:2222", "10.128.0.49:2222"]),
    "dstack": (DSTACK, ["10.128.0.47:2222", "10.128.0.48:2222", "10.128.0.49:2222"]),
    "SageMaker": (SAGEMAKER, ["algo-1:2222", "algo-2:2222", "algo-3:2222"]),
    "Kubernetes": (KUBERNETES, ["cats-0.cats:2222", "cats-1.cats:2222", "cats-2.cats:2222"]),
    "Slurm": (SLURM, ["n9:24928", "n10:24928", "n11:24928"]),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_nodes_are_workers_in_the_order_of_the_engine(engine):
    environment, addresses = ENGINES[engine]
    assert Cluster.resolve(environment) == Cluster({"worker": addresses}, "worker", 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_roles_are_assigned_in_the_order_of_nodes(engine):
    environment, (first, second, third) = ENGINES[engine]
    tasks = {"chief": [first], "worker": [second], "ps": [third]}
    assert read_place({**environment, "KDIST_PS": "1"}) == (tasks, "worker", 0)
    tasks = {"chief": [first], "worker": [second, third]}
    assert read_place({**environment, "KDIST_CHIEF": "1", "KDIST_PS": ""}) == (tasks, "worker", 0)


def test_every_node_gets_another_place():
    nodes = [{**DSTACK, "DSTACK_NODE_RANK": str(rank), "KDIST_PS": "1"} for rank in range(3)]
    assert [Cluster.resolve(node).name for node in nodes] == ["chief", "worker 0", "ps 0"]


# Engines that set TF_CONFIG, with fields that TensorFlow does not know.
TF_CONFIGS = {
    # TFJob: github.com/kubeflow/training-operator, pkg/controller.v1/tensorflow/tensorflow.go
    "worker 1": {
        "cluster": {
            "ps": ["cats-ps-0.default.svc:2222"],
            "worker": ["cats-worker-0.default.svc:2222", "cats-worker-1.default.svc:2222"],
        },
        "task": {"type": "worker", "index": 1},
        "environment": "cloud",
    },
    # Vertex AI: cloud.google.com/vertex-ai/docs/training/distributed-training, and
    # cloud.google.com/ai-platform/training/docs/distributed-training-details
    "chief": {
        "cluster": {
            "chief": ["cmle-training-workerpool0-ab12-0:2222"],
            "worker": ["cmle-training-workerpool1-ab12-0:2222"],
        },
        "environment": "cloud",
        "task": {"type": "chief", "index": 0, "cloud": "ab12"},
        "job": '{"worker_pool_specs": []}',
    },
    # Ray: docs.ray.io/en/latest/train/distributed-tensorflow-keras.html
    "worker 0": {
        "cluster": {"worker": ["10.0.0.1:40001", "10.0.0.2:40002"]},
        "task": {"type": "worker", "index": 0},
    },
}


@pytest.mark.parametrize("name", TF_CONFIGS)
def test_tf_config_has_roles_of_its_own_and_comes_first(name):
    config = TF_CONFIGS[name]
    environment = {"TF_CONFIG": json.dumps(config), "KDIST_PS": "1", **SLURM, **KUBERNETES}
    cluster = Cluster.resolve(environment)
    assert cluster.name == name
    assert {role: list(hosts) for role, hosts in cluster.tasks.items()} == config["cluster"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # TFJob with enableDynamicWorker
        (
            {
                "sparseCluster": {"worker": {"1": "cats-worker-1.default.svc:2222"}, "ps": []},
                "task": {"type": "worker", "index": 1},
            },
            "enableDynamicWorker: false",
        ),
        ({"task": {"type": "worker", "index": 1}}, "the cluster is missing"),
        (
            {**TF_CONFIGS["worker 1"], "task": {"type": "evaluator", "index": 0}},
            "TFJob and Vertex AI leave the evaluator out.*remove it",
        ),
    ],
)
def test_a_tf_config_that_lacks_tasks(config, message):
    with pytest.raises(ValueError, match=message):
        Cluster.resolve({"TF_CONFIG": json.dumps(config)})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"KDIST_CHIEF": "1"},
        {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
        {"DSTACK_NODES_IPS": "", "DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "1"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"},
    ],
)
def test_one_node_is_no_job(environment):
    assert read_place(environment) is None


def test_an_empty_tf_config_is_a_process_that_is_alone():
    assert Cluster.resolve({**SLURM, "KDIST_PS": "1", "TF_CONFIG": "{}"}).is_alone


def test_one_engine_on_another_is_one_job():
    addresses = ENGINES["SkyPilot"][1]
    assert read_place({**SLURM, **SKYPILOT}) == ({"worker": addresses}, "worker", 1)


def test_addresses_of_pods_may_have_ports():
    environment = {"JOB_COMPLETION_INDEX": "1", "KDIST_HOSTS": "localhost:4001, localhost:4002"}
    assert Cluster.resolve(environment).address == "localhost:4002"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        # Half set
        ({"SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_IPS is not set.*`run` of the SkyPilot task"),
        ({"SKYPILOT_NODE_IPS": "a\nb"}, "SKYPILOT_NODE_RANK is not set"),
        ({**DSTACK, "DSTACK_NODES_IPS": ""}, "DSTACK_NODES_IPS is not set.*set TF_CONFIG"),
        ({"SM_HOSTS": '["algo-1","algo-2"]'}, "SM_CURRENT_HOST is not set.*training toolkit"),
        ({"JOB_COMPLETION_INDEX": "1"}, "KDIST_HOSTS is not set.*cats-0.cats.*independently"),
        ({"KDIST_HOSTS": "a,b"}, "JOB_COMPLETION_INDEX is not set"),
        ({"KDIST_PS": "1"}, "no engine.*srun, kdist launch --ps=1.*unset KDIST_PS"),
        # Contradictory
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "4"}, "NUM_NODES=4, but SKYPILOT_NODE_IPS has 3"),
        ({**DSTACK, "DSTACK_NODE_RANK": "3"}, "DSTACK_NODE_RANK=3, but DSTACK_NODES_IPS has 3"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-4"}, "contains SM_CURRENT_HOST=algo-4"),
        ({**SKYPILOT, **KUBERNETES, "JOB_COMPLETION_INDEX": "2"}, "Kubernetes node 2.*unset"),
        ({**SLURM, "KDIST_PS": "2"}, "1 chief and 2 parameter servers.*leave no worker.*3 nodes"),
        ({**SLURM, "KDIST_PS": "1", "KDIST_CHIEF": "0"}, "need a chief; unset KDIST_CHIEF"),
        # Malformed
        ({**SLURM, "KDIST_PS": "one"}, "KDIST_PS=one is not a number; set it to"),
        ({**SLURM, "KDIST_CHIEF": "2"}, "at most one chief"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK=x is not a number"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"}, "is not a list in JSON"),
        ({**SAGEMAKER, "SM_HOSTS": '["algo-2", 5]'}, "5, which is no host name"),
        ({**KUBERNETES, "KDIST_HOSTS": "a;b"}, "'a;b', which is no host name|has 1 hosts"),
    ],
)
def test_rejects(environment, message):
    with pytest.raises(ValueError, match=message):
        read_place(environment)
