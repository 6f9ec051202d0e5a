"""Specs of strategies, resolved without TensorFlow."""

import pytest

from kdist.cluster import Cluster
from kdist.layout import Layout
from kdist.strategy_spec import resolve

PIPELINES = Layout(data=2, pipeline=2)
SERVED = Cluster(
    {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}, "chief"
)


def workers(number, host="localhost"):
    return Cluster({"worker": [f"{host}:{port}" for port in range(1, number + 1)]})


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)


def test_a_strategy_of_one_process():
    spec = resolve("mirrored", ["GPU:0", "GPU:3"], reduction="nccl", num_packs=2)
    assert (spec.kind, spec.devices) == ("mirrored", ("GPU:0", "GPU:3"))
    assert (spec.reduction, spec.num_packs) == ("nccl", 2)
    assert spec.cluster.is_alone


def test_a_strategy_of_one_process_ignores_the_job_and_says_so(monkeypatch, caplog):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert resolve("mirrored").cluster == Cluster()
    assert not caplog.messages
    monkeypatch.setenv("TF_CONFIG", workers(2).to_tf_config())
    assert resolve("mirrored").cluster == Cluster()
    assert "mirrored trains another model in each task of the job, which has 2" in caplog.text
    assert "--strategy=auto" in caplog.text


@pytest.mark.parametrize(
    ("tasks", "kind"),
    [
        ({}, "auto"),
        ({"worker": ["h:1"]}, "auto"),
        ({"worker": ["localhost:1", "localhost:2"]}, "multi_worker"),
        ({"chief": ["localhost:1"], "worker": ["localhost:2"]}, "multi_worker"),
        (
            {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]},
            "parameter_server",
        ),
    ],
)
def test_auto_is_the_strategy_of_the_job(monkeypatch, tasks, kind):
    job = Cluster(tasks, next(iter(tasks), "worker"))
    monkeypatch.setenv("TF_CONFIG", job.to_tf_config())
    spec = resolve("auto", 2)
    assert (spec.kind, spec.devices) == (kind, 2)
    assert spec.cluster == (Cluster() if kind == "auto" else job)
    assert resolve("auto", cluster=Cluster()).kind == "auto"


@pytest.mark.parametrize(("ps", "kind"), [("", "multi_worker"), ("1", "parameter_server")])
def test_auto_is_the_strategy_of_an_engines_nodes(monkeypatch, ps, kind):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("KDIST_HOSTS", "localhost:1,localhost:2,localhost:3")
    monkeypatch.setenv("KDIST_PS", ps)
    spec = resolve("auto")
    assert (spec.kind, spec.cluster.address) == (kind, "localhost:2")


def test_a_job_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", workers(2).to_tf_config())
    spec = resolve("multi_worker", 2, reduction="ring", step_timeout_seconds=7)
    assert spec.cluster == workers(2)
    assert (spec.kind, spec.devices, spec.step_timeout_seconds) == ("multi_worker", 2, 7)


def test_a_layout_of_one_process_uses_all_its_devices():
    spec = resolve(PIPELINES)
    assert (spec.kind, spec.layout, spec.devices) == ("layout", PIPELINES, 4)


def test_a_layout_is_divided_over_tasks():
    spec = resolve(PIPELINES, cluster=workers(2))
    assert (spec.devices, spec.cluster, spec.job_name) == (2, workers(2), "a layout")


def test_specs_are_frozen_and_comparable():
    spec = resolve("mirrored", 2)
    assert spec == resolve("mirrored", 2) != resolve("mirrored", 4)
    with pytest.raises(AttributeError):
        spec.kind = "tpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mirored"}, "unknown strategy 'mirored'; did you mean 'mirrored'"),
        ({"name": "zzz"}, "one of auto, one_device, mirrored, central_storage, tpu, multi_w"),
        ({"name": None}, "unknown strategy None"),
        (
            {"name": "parameter_server"},
            "needs tasks of the role chief and worker and ps.*kdist launch",
        ),
        ({"name": "local_sgd"}, r"mirrored' and 'multi_worker': use.*compile\(…, local_steps=k\)"),
        ({"name": "multi_worker"}, "needs tasks of the role worker.* has none.*TF_CONFIG"),
        ({"name": "multi_worker", "reduction": "hierarchical_copy"}, "auto, nccl, ring and no"),
        ({"name": "multi_worker", "cluster": workers(2, "10.0.0.1")}, "--allow_remote"),
        ({"name": "one_device", "devices": 2}, "one_device uses one device.* requests 2"),
        ({"name": "one_device", "devices": ["GPU:0", "GPU:1"]}, "one_device uses one device"),
        ({"name": "mirrored", "reduction": "ring"}, "reduction 'ring'; use one of auto, nccl"),
        ({"name": "mirrored", "num_packs": 2}, "needs --reduction=nccl or hierarchical_copy"),
        (
            {"name": "mirrored", "reduction": "hierarchical_copy", "num_packs": -1},
            "0 .no packing. or more, got -1",
        ),
        ({"name": "one_device", "reduction": "nccl"}, "options of 'mirrored'"),
        ({"name": "parameter_server", "cluster": SERVED, "num_packs": 2}, "options of 'mirrored'"),
        ({"name": "tpu", "devices": 2}, "uses all cores"),
        ({"name": "mirrored", "devices": 0}, "at least 1"),
        ({"name": "mirrored", "devices": 257}, "at most 256"),
        ({"name": "mirrored", "devices": ["gpu"]}, "not a device name"),
        ({"name": Layout(data=257)}, "at most 256"),
        ({"name": PIPELINES, "devices": 3}, "is for 4 devices and there are 3"),
        ({"name": PIPELINES, "reduction": "ring"}, "a layout does not support"),
        ({"name": PIPELINES, "cluster": workers(3)}, "cannot be divided over 3 tasks"),
        ({"name": PIPELINES, "cluster": workers(2), "devices": 3}, "4 devices and there are 6"),
        ({"name": PIPELINES, "cluster": workers(2, "10.0.0.1")}, "allow it with --allow_remote"),
        (
            {"name": PIPELINES, "cluster": Cluster({"ps": ["localhost:1", "localhost:2"]}, "ps")},
            "a layout needs tasks of the role worker",
        ),
    ],
)
def test_resolve_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(**arguments)


def test_a_partitioner_without_servers_is_logged(caplog):
    for arguments in ({"name": "auto"}, {"name": "parameter_server", "cluster": SERVED}):
        resolve(**arguments, partitioner=len)
    assert not caplog.text
    resolve("mirrored", partitioner=len)
    assert "partitioner has no effect under mirrored" in caplog.text


@pytest.mark.parametrize("name", ["parameter_server", PIPELINES])
def test_only_whole_replicas_that_wait_for_each_other_can_be_missing(name):
    tasks = {role: [f"localhost:{port}"] for port, role in enumerate(("chief", "worker"), 1)}
    if name == "parameter_server":
        tasks["ps"] = ["localhost:3"]
    with pytest.raises(ValueError, match="without --min_workers"):
        resolve(name, cluster=Cluster(tasks, "chief", planned_workers=3))


def test_sharded_replicas():
    layout = Layout(data=4, shard="optimizer", min_shard_bytes=1)
    spec = resolve(layout)
    assert (spec.kind, spec.devices, spec.layout) == ("mirrored", 4, layout)
    assert resolve("mirrored", 2, shard="optimizer").layout == Layout(shard="optimizer")
    assert resolve("auto", shard="optimizer").kind == "auto"
    spec = resolve(layout, cluster=workers(2))
    assert (spec.kind, spec.devices, spec.layout) == ("multi_worker", 2, layout)
    for devices in (4, 2):
        of_weights = Layout(data=devices, shard="weights")
        assert resolve(of_weights, cluster=workers(2)).layout == of_weights
    with_evaluator = Cluster({"worker": ["localhost:1"], "evaluator": ["localhost:2"]}, "worker", 0)
    spec = resolve(Layout(data=4, shard="weights"), cluster=with_evaluator)  # one process trains
    assert (spec.kind, spec.devices) == ("multi_worker", 4)
    spec = resolve("auto", shard="gradients", cluster=workers(3))
    assert (spec.kind, spec.devices) == ("multi_worker", None)
    assert spec.layout == Layout(shard="gradients")


@pytest.mark.parametrize(
    ("name", "devices", "shard", "message"),
    [
        ("central_storage", None, "optimizer", "use --strategy=mirrored"),
        ("parameter_server", None, "optimizer", "which parameter_server does not support"),
        (Layout(data=3, shard="optimizer"), None, None, "another number of tasks"),
        (PIPELINES, None, "optimizer", "write shard=optimizer in the layout"),
        (Layout(data=4, shard="optimizer"), 1, None, "there are 2"),
        ("mirrored", None, "weight", "use optimizer"),
    ],
)
def test_shards_that_are_refused(name, devices, shard, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, devices, cluster=workers(2), shard=shard)


def test_a_layout_of_shards_and_the_devices_of_one_process_agree():
    with pytest.raises(ValueError, match="make them equal"):
        resolve(Layout(data=4, shard="optimizer"), 2)
