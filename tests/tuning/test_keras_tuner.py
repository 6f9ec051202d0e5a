"""KerasTuner under a strategy of kdist: two workers, run directories, and a kill."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

import kdist
from kdist.launch.local_engine import reserve_ports

PROGRAM = pathlib.Path(__file__).with_name("keras_tuner_program.py")
TRIALS = 4

pytestmark = pytest.mark.slow


def start(directory, **variables):
    return subprocess.Popen(
        [sys.executable, "-u", str(PROGRAM), str(directory), str(TRIALS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
    )


def check(directory):
    """Checks that all trials are recorded, and the best one is in the good region."""
    runs = kdist.report.read_runs([directory / "planted"])
    searches = [run.config["search"] for run in runs]
    assert [each["state"] for each in searches] == ["complete"] * TRIALS
    assert all(run.finished and run.get("num_replicas") == 2 for run in runs)
    best = min(searches, key=lambda each: each["value"])
    assert best["parameters"]["region"] == "good"
    oracle = json.loads((directory / "planted" / "oracle.json").read_text())
    assert sorted(oracle["end_order"]) == [each["trial"] for each in searches]


@pytest.mark.exhaustive
def test_two_workers_find_the_better_region(tmp_path):
    with contextlib.ExitStack() as stack, reserve_ports(1) as [port]:
        place = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": str(port)}
        processes = []
        for name in ("chief", "tuner0", "tuner1"):
            processes.append(start(tmp_path, KERASTUNER_TUNER_ID=name, **place))
            stack.callback(processes[-1].kill)
        for process in processes[1:]:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output[-3000:]
    check(tmp_path)


def test_a_killed_search_continues(tmp_path):
    first = start(tmp_path, SLOW="1")
    assert any(line.startswith("waits") for line in first.stdout)
    first.kill()
    first.communicate()
    second = start(tmp_path)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output[-3000:]
    check(tmp_path)
