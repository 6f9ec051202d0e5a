from kdist.cluster import Cluster
from kdist.telemetry.devices.collector import node_of
from kdist.telemetry.writers import device_curves, metric_curves


def test_names_of_metrics():
    record = {"kind": "timing", "epoch": 2, "examples": 256, "seconds": 1.5, "learning_rate": 0.1}
    measured = {
        "step_share": 0.75,
        "replica_busy_seconds": [0.5, None, 0.25],
        "model_flops_utilization": None,
        "host": "node7",
        "first": True,
        "loss": float("nan"),
    }
    assert metric_curves({**record, **measured}) == {
        "epoch": 2,
        "examples": 256,
        "seconds": 1.5,
        "learning_rate": 0.1,
        "timing/step_share": 0.75,
        "timing/replica_busy_seconds/0": 0.5,
        "timing/replica_busy_seconds/2": 0.25,
    }


def test_names_of_devices():
    def names(device, measured, **place):
        return list(
            device_curves(
                {"time": 1.0, "seconds": 2.0, "host": "a", **place, "device": device, **measured}
            )
        )

    utilization = {"utilization": 0.5, "name": "H100", "power_watts": None}
    assert names("gpu/0", utilization) == ["gpu/0/utilization"]
    assert names("gpu/0", utilization, node=0) == ["gpu/node0/0/utilization"]
    assert names("process/worker-0", {"threads": 7}) == ["process/worker-0/threads"]
    assert names("disk", {"read": 3.0}) == ["disk/read"]
    assert names("disk", {"read": 3.0}, node=1) == ["disk/node1/read"]


def test_hosts_of_a_job_have_numbers():
    def nodes(*workers):
        cluster = Cluster({"worker": workers}, "worker", 0)
        return [node_of(task) for task in cluster.all_tasks()]

    assert nodes("10.0.0.9:1", "10.0.0.2:1", "10.0.0.9:2") == [0, 1, 0]
    assert nodes("127.0.0.1:1", "127.0.0.1:2") == [None, None]
