"""`kdist launch` in a process of its own, with small Python scripts as tasks."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"

# The beginning of every task's script.
HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
here = pathlib.Path(__file__).parent
def note(name, pid):
    (here / f"new-{name}").write_text(str(pid))
    (here / f"new-{name}").rename(here / f"pid-{name}")
note(f"{role}-{index}", os.getpid())
"""


class Launcher:
    """Runs `kdist launch` with a test's script; the logs are in `directory`/run/logs."""

    def __init__(self, directory):
        self.directory = directory
        self._processes = []

    def start(self, code, *flags):
        """Returns the launcher's process, without waiting."""
        script = self.directory / "task.py"
        script.write_text(HEAD + code)
        run_dir = f"--run_dir={self.directory / 'run'}"
        command = [sys.executable, SCRIPTS / "launch.py", *flags, "--", script, run_dir]
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=(self.directory / "out").open("w"),
            stderr=(self.directory / "err").open("w"),
            start_new_session=True,  # its own process group, as in a terminal
        )
        self._processes.append(process)
        return process

    def run(self, code, *flags, timeout=60):
        """Returns (exit code, standard output, standard error, seconds) of the launcher."""
        began = time.monotonic()
        code = self.start(code, *flags).wait(timeout)
        return code, self.read("out"), self.read("err"), time.monotonic() - began

    def read(self, name):
        """Returns the text of a file in the directory."""
        return (self.directory / name).read_text()

    def log(self, name):
        """Returns the complete output of a task."""
        return (self.directory / "run" / "logs" / f"{name}.log").read_bytes()

    def pids(self, *names, timeout=20):
        """Waits until tasks have noted process ids, and returns them."""
        deadline = time.monotonic() + timeout
        paths = [self.directory / f"pid-{name}" for name in names]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, self.read("err") + self.read("out")
            time.sleep(0.02)
        return [int(path.read_text()) for path in paths]

    def end(self):
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for path in self.directory.glob("pid-*"):
            if runs(pid := int(path.read_text())):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def scripts():
    """Returns the directory of kdist's programs."""
    return SCRIPTS


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


def runs(pid):
    """Returns whether the process runs; a zombie does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def all_end():
    """Returns a function that waits for processes to end, and fails after `seconds`."""

    def wait(pids, seconds):
        deadline = time.monotonic() + seconds
        while left := [pid for pid in pids if runs(pid)]:
            assert time.monotonic() < deadline, f"{left} of {pids} still run"
            time.sleep(0.02)

    return wait
