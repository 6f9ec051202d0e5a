"""Processes that kdist starts where a user's files are named like modules of Python."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest

import kdist
from kdist.commands.tuning_run.trials import trial_command
from kdist.launch import child_python
from kdist.serving import Objective, choose, poisson
from kdist.serving.policy.selection import choose_in_subprocess
from kdist.testing import python
from tests.serving.running import save_times
from tests.unit.serving.test_adapting import CURVE

PACKAGE = os.path.dirname(os.path.dirname(kdist.__file__))
NAMES = ("json", "logging", "queue", "random", "signal", "socket", "statistics", "types")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, whose files would replace modules of Python."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    return tmp_path


def run_program(*command):
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    return subprocess.run(command, **options).stdout


def test_a_task_of_kdist_launch():
    launch = [sys.executable, f"{PACKAGE}/scripts/launch.py", "--run_dir=r", "--"]
    assert f"[worker 0] kdist {kdist.__version__}" in run_program(*launch, "kdist", "--version")


def test_a_trial_of_kdist_tune():
    assert "--model" in run_program(*trial_command(["--helpshort"]))


def test_a_check_of_a_strategy():
    assert python("import json, kdist; print(40 + 2)", (), child_python.variables()) == 42


def test_a_task_of_a_function():
    assert kdist.launch.local(len, 1, arguments=[(1, 2)], quiet=True) == 2


def test_a_choice_of_batch_settings():
    arrivals = poisson(400, 500)
    apart = asyncio.run(choose_in_subprocess(CURVE, arrivals, Objective()))
    assert apart == choose(CURVE, arrivals, Objective())


@pytest.mark.slow
def test_workers_of_a_server(folder):
    save_times(folder / "m" / "1", 3)
    serve = [sys.executable, f"{PACKAGE}/scripts/serve.py", "--model_dir=m", "--workers=1"]
    with subprocess.Popen(
        [*serve, "--port=0", "--grpc_port=-1"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert re.match("kdist serves m: http", server.stdout.readline())
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def test_kdist_itself_may_be_in_the_working_directory(monkeypatch):
    monkeypatch.chdir(PACKAGE)
    monkeypatch.delenv("PYTHONPATH")
    assert "--model" in run_program(*trial_command(["--helpshort"]))
