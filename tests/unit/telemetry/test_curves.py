from kdist.telemetry.writers.base import device_curves, metric_curves


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
    def names(device, **measured):
        return device_curves(
            {"time": 1.0, "seconds": 2.0, "host": "node7", "device": device, **measured}
        )

    assert names("gpu/0", utilization=0.5, name="H100", power_watts=None) == {
        "gpu/node7/0/utilization": 0.5
    }
    assert names("process/worker-0", memory_used_bytes=7) == {
        "process/node7/worker-0/memory_used_bytes": 7
    }
    assert names("disk", read_bytes_per_second=3.0) == {"disk/node7/read_bytes_per_second": 3.0}
