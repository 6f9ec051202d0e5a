"""Processes of `kdist.testing`."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

# Each process leaves its number.
CODE = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w'); time.sleep(99)"


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize(
    ("function", "arguments"), [("python", {}), ("python_tasks", {"tasks": {"worker": 2}})]
)
def test_they_end_with_a_program_that_a_signal_ends(function, arguments, tmp_path):
    arguments |= {"code": CODE, "arguments": [str(tmp_path / "started")]}
    code = f"from kdist.testing import {function}\n{function}(**{arguments})"
    program = subprocess.Popen([sys.executable, "-c", code])
    count = sum(arguments.get("tasks", {"worker": 1}).values())
    while len(found := list(tmp_path.glob("started*"))) < count:
        assert program.poll() is None
        time.sleep(0.05)
    children = [psutil.Process(int(file.name.removeprefix("started"))) for file in found]
    program.send_signal(signal.SIGTERM)
    assert program.wait(10) == -signal.SIGTERM
    assert psutil.wait_procs(children, 10)[1] == []
