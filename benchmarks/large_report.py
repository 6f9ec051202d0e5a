"""Times the report of many long runs, and measures the page.

  python -m benchmarks.large_report                          # 200 runs of 10,000 lines, 0.7 GB
  python -m benchmarks.large_report --runs=20 --lines=1000 --gpus=8

The runs are generated in a temporary directory. All have the same lines, which the report does not
exploit. The goals are 20 MB and 30 seconds. Exits with 1 if one is missed.
"""

import json
import pathlib
import random
import resource
import tempfile
import time

from absl import flags

import kdist
from kdist import program

FLAGS = flags.FLAGS

flags.DEFINE_integer("runs", 200, "How many runs.", lower_bound=1)
flags.DEFINE_integer("lines", 10_000, "Lines of metrics.jsonl per run.", lower_bound=1)
flags.DEFINE_integer("gpus", 4, "GPUs per run.", lower_bound=0)
flags.DEFINE_integer("samples", 500, "Samples per device of a run.", lower_bound=0)
flags.DEFINE_string("output", None, "Keep the page in this file.")

LARGEST_BYTES = 20e6
LONGEST_SECONDS = 30


def main(_):
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        runs = write_runs(directory, FLAGS.runs, FLAGS.lines, FLAGS.gpus, FLAGS.samples)
        read = sum(path.stat().st_size for run in runs for path in run.iterdir())
        began = time.perf_counter()
        page = kdist.report.write(runs, FLAGS.output or directory / "page.html")
        seconds = time.perf_counter() - began
        size = page.stat().st_size
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{FLAGS.runs} runs of {FLAGS.lines:,} lines and {FLAGS.samples:,} samples of each device "
        f"({read / 1e6:,.0f} MB): a page of {size / 1e6:.1f} MB (goal: {LARGEST_BYTES / 1e6:.0f}) "
        f"in {seconds:.1f} s (goal: {LONGEST_SECONDS}), memory {memory / 1e9:.1f} GB"
    )
    return int(size > LARGEST_BYTES or seconds > LONGEST_SECONDS)


def write_runs(directory, runs, lines, gpus=4, samples=500):
    """Writes generated runs and returns their paths."""
    chance = random.Random(0)
    metrics = "".join(json.dumps(line) + "\n" for line in metrics_lines(lines, gpus, chance))
    devices = "".join(json.dumps(line) + "\n" for line in device_lines(samples, gpus, chance))
    paths = [directory / f"run{number}" for number in range(runs)]
    for number, path in enumerate(paths):
        path.mkdir()
        config = {"model": "resnet50", "dataset": "imagenet", "seed": number}
        summary = {**config, "examples_per_second": 1000 + number, "num_replicas": gpus}
        (path / "config.json").write_text(json.dumps(config))
        (path / "summary.json").write_text(json.dumps(summary))
        (path / "metrics.jsonl").write_text(metrics)
        (path / "devices.jsonl").write_text(devices)
    return paths


def metrics_lines(lines, gpus, chance):
    """Returns lines of metrics: 90 % "train", every tenth "timing", every hundredth "epoch"."""
    for line in range(1, lines + 1):
        when = {"epoch": 1 + line // 100, "step": line, "examples": 128 * line, "seconds": line}
        loss = {"loss": 2 + chance.gauss(0, 1), "accuracy": chance.random()}
        if line % 100 == 0:
            validation = {f"val_{name}": value for name, value in loss.items()}
            yield {"kind": "epoch", **when, **loss, **validation}
        elif line % 10 == 0:
            shares = {"input_share": 0.1, "callback_share": 0.1, "step_share": 0.8}
            times = {f"step_seconds_{p}": chance.random() for p in ("p50", "p90", "p99")}
            busy = {"replica_busy_seconds": [chance.random() for _ in range(gpus)]}
            window = {"window_seconds": 10, "window_steps": 100, "examples_per_second": 1280}
            yield {"kind": "timing", **when, **window, **times, **shares, **busy}
        else:
            yield {"kind": "train", **when, **loss, "learning_rate": 0.1}


def device_lines(samples, gpus, chance):
    """Returns device samples: GPUs, 8 cores, a process, the disk, and the network."""
    rates = {
        f"{bus}_{direction}_bytes_per_second": 1e9
        for bus in ("pcie", "nvlink")
        for direction in ("sent", "received")
    }
    for sample in range(samples):
        when = {"time": 1.7e9 + sample, "seconds": sample, "host": "node7"}
        for gpu in range(gpus):
            yield {
                **when,
                "device": f"gpu/{gpu}",
                "utilization": chance.random(),
                "memory_utilization": chance.random(),
                "memory_used_bytes": 2**36 * chance.random(),
                "power_watts": 700 * chance.random(),
                "temperature_celsius": 60,
                "sm_clock_mhz": 1980,
                **rates,
            }
        for core in range(8):
            yield {**when, "device": f"cpu/{core}", "utilization": chance.random()}
        process = {"utilization": chance.random(), "memory_used_bytes": 4e9, "threads": 80}
        yield {**when, "device": "process/chief", **process}
        yield {**when, "device": "disk", "read_bytes_per_second": 1e8 * chance.random()}
        yield {**when, "device": "network", "sent_bytes_per_second": 1e6 * chance.random()}


if __name__ == "__main__":
    program.run(main)
