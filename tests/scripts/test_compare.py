"""Runs of `kdist compare`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.forked import run_program

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "compare.py"


def compare(*flags):
    return run_program(PROGRAM, *flags)


@pytest.mark.exhaustive
def test_two_rows(tmp_path):
    files = [f"--json={tmp_path / 'cells.json'}", f"--markdown={tmp_path / 'table.md'}"]
    process = compare(
        "--features=SGD,clipnorm", "--replicas=2", "--layouts=mirrored", "--jobs=1", *files
    )
    cells = {
        (cell["feature"], cell["library"]): cell["verdict"]
        for cell in json.loads((tmp_path / "cells.json").read_text())
    }
    assert cells["SGD", "Keras"] == cells["SGD", "kdist"] == "works"
    assert cells["clipnorm", "Keras"] == "wrong"
    assert process.returncode == int(cells["clipnorm", "kdist"] != "works"), process.stderr
    assert "[2/2] clipnorm: Keras × 2 wrong by 0.0" in process.stdout
    assert "2 features took " in process.stdout
    assert "| **SGD**: plain gradient descent | works | works |" in (
        (tmp_path / "table.md").read_text()
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--jsn=a"], "compare.py: Unknown command line flag"),
        (["--json=no/such/a.json"], "give one in a directory that exists"),
        (["--features=clipnrom"], "did you mean 'clipnorm'? --list shows all of them"),
        (["--replicas=3"], "there are 1, 2 and 4"),
        (["--layouts=pipeline"], "there are local_sgd, mirrored, multi_worker, parameter_server"),
        (["--libraries=Keras", "--replicas=1"], "Keras on 1 device is the reference"),
        (["--libraries=keras3"], "--libraries=keras3"),
        ([f"--markdown={__file__}"], "has no place for the table"),
    ],
)
def test_invalid_flags_are_rejected_with_a_remedy(flags, expected):
    process = compare(*flags)
    assert process.returncode == 1
    assert expected in process.stderr
    assert "Traceback" not in process.stderr


def test_the_command_has_its_own_name(monkeypatch):
    monkeypatch.chdir(PROGRAM.parents[1])
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}
    command = [sys.executable, "-m", "kdist", "compare"]
    options = {"capture_output": True, "text": True, "check": False, "env": environment}
    assert subprocess.run([*command, "--help"], **options).stdout.startswith("Usage: kdist compare")
    assert subprocess.run([*command, "--jsn=a"], **options).stderr.startswith("kdist compare: ")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(number):
    command = [sys.executable, PROGRAM, "--features=clipnorm,dropout", "--jobs=2"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    # A server that forks, a tracker of its resources, and two trainings.
    while len(children := psutil.Process(program.pid).children(recursive=True)) < 4:
        time.sleep(0.05)
    program.send_signal(number)
    assert program.wait(10) == (130 if number == signal.SIGINT else -number)
    assert psutil.wait_procs(children, 10)[1] == []
    assert "Traceback" not in program.stderr.read()


@pytest.mark.exhaustive
def test_layouts_of_several_processes():
    layouts = "--layouts=multi_worker,parameter_server,local_sgd"
    process = compare("--features=Adam, dropout", "--replicas=2", "--libraries=kdist", layouts)
    assert process.returncode == 0, process.stdout
    assert "kdist multi_worker × 2: 2 works" in process.stdout
    assert "kdist parameter_server × 2: 2 works" in process.stdout
    assert "kdist local_sgd × 2: 1 works, 1 not there" in process.stdout
