"""The GPU benchmark as a user runs it, with small sizes on the CPU."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.gpu import spec
from tests.benchmarks.programs import ROOT


def run(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_parts_resume_and_survive_one_that_is_killed(tmp_path):
    def measure(*given):
        return run("benchmarks.gpu", "--tiny", f"--results_dir={tmp_path}", *given)

    first = measure("--only=driver")
    assert first.returncode == 0, first.stderr[-3000:]
    # No process imports TensorFlow and trains within the limit.
    second = measure("--only=check,driver", "--limit_seconds=1")
    assert second.returncode == 1
    assert "driver: done before" in second.stdout
    assert "stopped after 1 s" in second.stdout

    (saved,) = tmp_path.glob("*-gpu-tiny.json")
    states = {name: part["state"] for name, part in json.loads(saved.read_text())["parts"].items()}
    assert states == {"driver": "done", "check": "stopped after 1 s"}
    text = saved.with_suffix(".md").read_text()
    assert "NVML and nvidia-smi: done" in text
    assert "kdist check: stopped after 1 s" in text


def imports_tensorflow(process):
    try:
        return "-m" in process.cmdline() and process.memory_info().rss > 1e8
    except psutil.Error:  # Such as `git`, which ended meanwhile.
        return False


@pytest.mark.slow
def test_an_interrupted_part_is_written(tmp_path):
    command = ["benchmarks.gpu", "--tiny", "--only=check,driver", f"--results_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    with process:
        runner = psutil.Process(process.pid)
        while not any(imports_tensorflow(child) for child in runner.children()):
            time.sleep(0.05)
        process.terminate()
    assert process.returncode == 1
    (saved,) = tmp_path.glob("*-gpu-tiny.json")
    (driver,) = json.loads(saved.read_text())["parts"].values()
    assert driver["state"] == "interrupted"


@pytest.mark.exhaustive
def test_row_of_a_training():
    task = spec.Task(
        "kdist", "transformer", tiny=True, only=spec.VARIANTS["kdist"].index(spec.TF32)
    )
    process = run("benchmarks.gpu.keras_training", task.to_json())
    assert process.returncode == 0, process.stderr[-3000:]
    row = json.loads(process.stdout.splitlines()[-1])["row"]
    assert row["variant"] == "tf32"
    assert row["ms_per_step"] > 0
    assert row["flops"] > 1e5
    assert row["predicted_bytes"] > 0
