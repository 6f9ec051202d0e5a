"""Run directories as a training on four GPUs leaves them, without training.

write_run(tmp_path / "first", windows=30, slower=1.5)
"""

import json
import math
import random

GPUS = 4
VERDICT = [
    "input-bound: the pipeline gives 410 examples/s, the replicas could take 1,200 examples/s",
    "unbalanced: replica 3 is busy 1.4 times as long as replica 0",
]
OPERATIONS = [
    {
        "name": f"conv{i}/Conv2D",
        "type": "Conv2D",
        "device": "GPU:0",
        "seconds_per_step": 0.004 / (i + 1),
        "share": 0.2 / (i + 1),
        "calls": 2 + i,
    }
    for i in range(10)
]


def write_run(path, windows=30, slower=1.0, gpus=GPUS, hosts=("node7",), **summary):
    """Writes a finished run of 10-second windows; gives its path.

    Args:
        path: the directory, which is made.
        windows: how many windows the run has; ten `train` lines in each, an epoch every ten.
        slower: factor on the time of a step.
        gpus: GPUs of a host; the run's speed grows with them.
        hosts: names of the hosts.
        **summary: fields that are added to the summary, or replace what it has.
    """
    path.mkdir(parents=True)
    _write(path / "config.json", [{"model": "resnet50", "dataset": "pets", "seed": len(hosts)}])
    _write(path / "metrics.jsonl", metrics(windows, slower, gpus * len(hosts)))
    _write(path / "devices.jsonl", devices(windows, gpus, hosts))
    _write(path / "summary.json", [{**a_summary(windows, slower, gpus, hosts), **summary}])
    return path


def _write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def a_summary(windows, slower, gpus, hosts):
    """The summary of `write_run`."""
    replicas = gpus * len(hosts)
    return {
        "model": "resnet50",
        "dataset": "pets",
        "strategy": "MirroredStrategy",
        "devices": [f"GPU:{i}" for i in range(replicas)],
        "num_replicas": replicas,
        "local_batch_size": 32,
        "global_batch_size": 32 * replicas,
        "precision": "mixed_bfloat16",
        "epochs": max(windows // 10, 1),
        "test_accuracy": 0.91234,
        "test_loss": 0.3217,
        "seconds_per_epoch": 100.0,
        "examples_per_second": 300.0 * replicas / slower,
        "total_seconds": 10.0 * windows,
        "step_seconds_p50": 0.1 * slower,
        "step_seconds_p90": 0.12 * slower,
        "step_seconds_p99": 0.3 * slower,
        "model_flops_utilization": 0.31,
        "goodput": 0.93,
        "cost_usd": None,
        "breakdown": {"input": 0.22, "callbacks": 0.02, "compute": 0.56, "reduce": 0.2},
        "verdict": VERDICT,
        "top_operations": OPERATIONS,
        "versions": {"tensorflow": "2.21.0", "keras": "3.15.0"},
        "git_commit": "abc123",
    }


def metrics(windows, slower=1.0, replicas=GPUS):
    """Lines of metrics.jsonl."""
    chance = random.Random(0)
    batch, steps = 32 * replicas, round(100 / slower)  # of a window
    for window in range(1, windows + 1):
        for tenth in range(10):
            step = (window - 1) * steps + (tenth + 1) * steps // 10
            done = step * batch
            yield {
                "kind": "train",
                "epoch": 1 + (window - 1) // 10,
                "step": step,
                "examples": done,
                "seconds": 10.0 * (window - 1) + tenth + 1,
                "loss": 0.3 + 2 * math.exp(-done / 1e5) + chance.gauss(0, 0.02),
                "accuracy": 0.95 - 0.9 * math.exp(-done / 1e5) + chance.gauss(0, 0.005),
                "learning_rate": 0.1 * min(1.0, done / 5e4),
            }
        when = {"epoch": 1 + (window - 1) // 10, "step": step, "examples": done}
        times = [slower * (t + abs(chance.gauss(0, t / 20))) for t in (0.1, 0.12, 0.3)]
        profiled = {"compute_share": 0.55, "reduce_share": 0.21} if window % 5 == 0 else {}
        yield {
            "kind": "timing",
            **when,
            "seconds": 10.0 * window,
            "window_seconds": 10.0,
            "window_steps": steps,
            **{f"step_seconds_{p}": t for p, t in zip(("p50", "p90", "p99"), times, strict=True)},
            "examples_per_second": steps * batch / 10 + chance.gauss(0, 5),
            "examples_per_second_per_replica": steps * 3.2,
            "input_share": 0.22,
            "callback_share": 0.02,
            "step_share": 0.76,
            **profiled,
            "replica_busy_seconds": [0.06 + 0.005 * r for r in range(replicas)],
            "model_flops_utilization": 0.31,
        }
        if window % 10 == 0:
            yield {
                "kind": "epoch",
                **when,
                "seconds": 10.0 * window,
                "loss": 0.32 + 2 * math.exp(-done / 1e5),
                "accuracy": 0.94 - 0.9 * math.exp(-done / 1e5),
                "val_loss": 0.4 + 2 * math.exp(-done / 1e5),
                "val_accuracy": 0.91 - 0.9 * math.exp(-done / 1e5),
            }


def devices(windows, gpus=GPUS, hosts=("node7",), cores=4):
    """Lines of devices.jsonl, a sample each ten seconds."""
    chance = random.Random(1)
    for window in range(windows):
        for host in hosts:
            when = {"time": 1.7e9 + 10 * window, "seconds": 10.0 * window, "host": host}
            for gpu in range(gpus):
                yield {**when, "device": f"gpu/{gpu}", **_of_gpu(chance)}
            for core in range(cores):
                yield {**when, "device": f"cpu/{core}", "utilization": chance.random()}
            memory = 4e9 + 1e7 * window
            for device, fields in [
                ("process/chief", {"utilization": 3.2, "memory_used_bytes": memory, "threads": 80}),
                ("disk", {"read_bytes_per_second": 2e8, "written_bytes_per_second": 1e6}),
                ("network", {"sent_bytes_per_second": 1e6, "received_bytes_per_second": 2e6}),
            ]:
                yield {**when, "device": device, **fields}


def _of_gpu(chance):
    return {
        "name": "NVIDIA H100",
        "uuid": "GPU-0",
        "utilization": 0.7 + 0.2 * chance.random(),
        "memory_utilization": 0.4 + 0.1 * chance.random(),
        "memory_used_bytes": 60 * 2**30,
        "memory_total_bytes": 80 * 2**30,
        "power_watts": 500 + 60 * chance.random(),
        "temperature_celsius": 60 + round(5 * chance.random()),
        "sm_clock_mhz": 1980,
        "pcie_sent_bytes_per_second": 2e9,
        "pcie_received_bytes_per_second": 3e9,
        "nvlink_sent_bytes_per_second": None,
        "nvlink_received_bytes_per_second": None,
    }
