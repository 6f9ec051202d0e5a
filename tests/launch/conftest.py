"""The launcher as a user runs it, with tasks that are small Python scripts."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"

# What every task's script begins with.
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
    """Runs scripts/launch.py on a script of a test's; its logs are in `directory`/run/logs."""

    def __init__(self, directory):
        self.directory = directory
        self._processes = []

    def start(self, code, *flags):
        """The process of the launcher, not waited for."""
        script = self.directory / "task.py"
        script.write_text(HEAD + code)
        run_dir = f"--run_dir={self.directory / 'run'}"
        command = [sys.executable, SCRIPTS / "launch.py", *flags, "--", script, run_dir]
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=(self.directory / "out").open("w"),
            stderr=(self.directory / "err").open("w"),
            start_new_session=True,  # as a terminal gives it a group of its own
        )
        self._processes.append(process)
        return process

    def run(self, code, *flags, timeout=60):
        """(exit code, standard output, standard error, seconds) of a launcher that ends."""
        began = time.monotonic()
        code = self.start(code, *flags).wait(timeout)
        return code, self.read("out"), self.read("err"), time.monotonic() - began

    def read(self, name):
        """The text of a file in the directory."""
        return (self.directory / name).read_text()

    def log(self, name):
        """All that a task wrote."""
        return (self.directory / "run" / "logs" / f"{name}.log").read_bytes()

    def pids(self, *names, timeout=20):
        """What tasks have noted, waited for."""
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
    """The directory of kdist's programs."""
    return SCRIPTS


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


def runs(pid):
    """Whether the process runs; one that has ended and is not reaped does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def all_end():
    """A function that waits until none of some processes runs, and fails after `seconds`."""

    def wait(pids, seconds):
        deadline = time.monotonic() + seconds
        while left := [pid for pid in pids if runs(pid)]:
            assert time.monotonic() < deadline, f"{left} of {pids} still run"
            time.sleep(0.02)

    return wait
