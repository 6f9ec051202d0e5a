"""Jobs of real processes, for tests that disturb them."""

import collections
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from kdist.run_directory import checkpoint_step
from tests.faults import training_program

ROOT = pathlib.Path(__file__).parents[2]
TRAINING_PROGRAM = pathlib.Path(training_program.__file__)
PYTHON_PATH = f"{ROOT / 'tests' / 'site'}{os.pathsep}{ROOT}"

# How often a test kills one task after another; CONTRIBUTING.md sets more.
KILLS = int(os.environ.get("KDIST_KILLS", "2"))

# The lines of output that the message of a failed test has; a log of CI may keep few of them.
LAST_LINES = 40

# The launcher's reaction to most faults, for the table.
RESTARTED = "named; the job is restarted from its last checkpoint"


class Run:
    """A training run in a directory; the launcher starts several workers.

    Args:
        directory: Directory of all files.
        kind: Name of the strategy.
        launch: Flags of the launcher; with any, it also starts a single process.
        program: Program that trains. Its arguments are the strategy, the directory of checkpoints,
            and the file of results.
        prefix: Command that wraps the job, such as a memory limit.
    """

    def __init__(self, directory, kind, launch=(), program=TRAINING_PROGRAM, prefix=()):
        self.directory, self._kind, self._program = directory, kind, program
        self._launch, self._prefix = list(launch), list(prefix)
        if kind == "multi_worker":
            self._launch.insert(0, "--workers=2")
        self.checkpoints = directory / "run" / "checkpoints"
        self.result = directory / "result.json"
        self.process = None

    def start(self, fault=""):
        """Starts the job; `fault` is the value of KDIST_FAULT."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        command = [self._program, self._kind, self.checkpoints, self.result]
        if self._launch:
            run_dir = f"--run_dir={self.directory / 'run'}"
            command = [ROOT / "scripts" / "launch.py", *self._launch, run_dir, "--", *command]
        self.process = self._popen([*self._prefix, sys.executable, *command], KDIST_FAULT=fault)
        return self

    def _popen(self, command, **environment):
        """Starts a process that writes to the log."""
        with open(self.directory / "log.txt", "a") as log:
            return subprocess.Popen(
                [os.fspath(part) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": PYTHON_PATH, **environment},
            )

    def wait_for_success(self, seconds=400):
        """Waits until the job succeeds, and returns its result."""
        assert self.process.wait(seconds) == 0, self._state()
        assert not self.tasks()
        return json.loads(self.result.read_text())

    def wait_for_failure(self, seconds=90):
        """Waits until the job fails, and returns its exit code."""
        code = self.process.wait(seconds)
        assert code != 0, self._state()
        assert not self.tasks()
        return code

    def stop(self):
        """Ends the processes that a failed test has left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)

    # While it runs.

    def wait_until(self, condition, seconds=240):
        """Waits for a condition while the job runs; returns the waiting time in seconds."""
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None, self._state()
            assert time.monotonic() - began < seconds, self._state()
            time.sleep(0.01)
        return time.monotonic() - began

    def newest_step(self):
        """Returns the step of the newest checkpoint; 0 without any."""
        return max((checkpoint_step(p) or 0 for p in self.checkpoints.glob("step-*")), default=0)

    def wait_for_checkpoint(self, step):
        """Waits for a checkpoint of this step or a later one."""
        self.wait_until(lambda: self.newest_step() >= step)

    def wait_for_message(self, text, seconds=120, times=1):
        """Waits until the job has written a text `times` times; returns the seconds waited."""
        return self.wait_until(lambda: self.count(text) >= times, seconds)

    def count(self, text):
        """Returns how often the job has written a text."""
        return self.output().count(text)

    def output(self):
        """Returns the output of the job."""
        return (self.directory / "log.txt").read_text(errors="replace")

    def _state(self):
        """Returns the exit code and the end of the output, for the message of a failed test."""
        lines = self.output().splitlines()[-LAST_LINES:]
        return "\n".join([f"exit code {self.process.poll()}; the end of its output:", *lines])

    def attempts(self):
        """Returns the number of times that a replica has begun to train."""
        return len(list((self.directory / "seen").glob("*/0.txt")))

    def tasks(self):
        """Returns the ids of the training processes, by names such as "worker 1"."""
        found = subprocess.run(
            ["pgrep", "-f", f"{self._program.name} {self._kind} {self.checkpoints} "],
            capture_output=True,
            text=True,
            check=False,
        )
        tasks = {}
        for pid in map(int, found.stdout.split()):
            if (name := _task_name(pid)) is not None:
                tasks[name] = pid
        return tasks

    def signal(self, name, number=signal.SIGKILL):
        """Sends a signal to a task."""
        os.kill(self.tasks()[name], number)

    # Results.

    def recorded_examples(self):
        """Returns the marks of the examples of each step, in the last attempt that ran it."""
        last, self._repeated = collections.defaultdict(dict), set()
        for file in sorted((self.directory / "seen").glob("*/*.txt")):
            steps_here = collections.defaultdict(list)
            for line in file.read_text().splitlines():
                step, *marks = map(int, re.findall(r"\d+", line))
                steps_here[step] += marks
            self._repeated |= steps_here.keys() & last[file.name].keys()
            last[file.name].update(steps_here)
        steps = {step for replica in last.values() for step in replica}
        return [
            sorted(mark for replica in last.values() for mark in replica.get(step, ()))
            for step in sorted(steps)
        ]

    def num_lost_examples(self):
        """Returns the number of examples that had to be trained on again."""
        self.recorded_examples()
        return len(self._repeated) * training_program.BATCH


def check_equal(run, undisturbed):
    """Checks that a run has the result and the examples per step of the undisturbed one."""
    assert json.loads(run.result.read_text()) == json.loads(undisturbed.result.read_text())
    steps = run.recorded_examples()
    assert steps == undisturbed.recorded_examples()
    per_epoch = training_program.EXAMPLES // training_program.BATCH
    assert len(steps) == training_program.EPOCHS * per_epoch
    for epoch in range(training_program.EPOCHS):
        part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(mark for step in part for mark in step) == _marks_of_all()


@functools.cache
def _marks_of_all():
    import kdist

    train, _ = training_program.pipelines(kdist.create_strategy("one_device"))
    marks = []
    for images, _ in train.dataset().take(training_program.EXAMPLES // training_program.BATCH):
        marks += training_program.marks_of(images).numpy().tolist()
    return sorted(marks)


def _task_name(pid):
    """Returns a task's name from its environment; None for the launcher and ended processes."""
    try:
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if b"launch.py" in command or status.rpartition(")")[2].split()[0] in "ZX":
        return None
    for variable in environment.split(b"\0"):
        if variable.startswith(b"TF_CONFIG="):
            task = json.loads(variable.partition(b"=")[2])["task"]
            return f"{task['type']} {task['index']}"
    return "worker 0"
