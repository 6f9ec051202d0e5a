"""Jobs of real processes that tests disturb."""

import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from kdist.run_directory import checkpoint_step
from tests.faults import trained

ROOT = pathlib.Path(__file__).parents[2]
TRAINED = pathlib.Path(trained.__file__)

# What the launcher does about most faults, for the table.
RESTARTED = "named; the job is started again from its last checkpoint"


class Run:
    """A training in a directory; several workers are started by the launcher.

    Args:
        directory: for everything.
        kind: the strategy.
        launch: flags of the launcher; any of them has one device started by it, too.
        program: what trains; it takes the strategy, the directory for checkpoints, and an output.
        around: what stands before the command, such as a limit on memory.
    """

    def __init__(self, directory, kind, launch=(), program=TRAINED, around=()):
        self.directory, self._kind, self._program = directory, kind, program
        self._launch, self._around = list(launch), list(around)
        if kind == "multi_worker":
            self._launch.insert(0, "--workers=2")
        self.checkpoints = directory / "run" / "checkpoints"
        self.output = directory / "result.json"
        self.process = None

    def start(self, fault=""):
        """Starts the job; `fault` is what KDIST_FAULT says."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        command = [self._program, self._kind, self.checkpoints, self.output]
        if self._launch:
            run_dir = f"--run_dir={self.directory / 'run'}"
            command = [ROOT / "scripts" / "launch.py", *self._launch, run_dir, "--", *command]
        self.process = self._begin([*self._around, sys.executable, *command], KDIST_FAULT=fault)
        return self

    def _begin(self, command, **environment):
        """A process that writes to the log."""
        with open(self.directory / "log.txt", "a") as log:
            return subprocess.Popen(
                [os.fspath(part) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.fspath(ROOT), **environment},
            )

    def ends(self, seconds=240):
        """Waits for the end, which has to be a good one; gives what the job wrote."""
        assert self.process.wait(seconds) == 0, self.said()
        assert not self.tasks()
        return json.loads(self.output.read_text())

    def fails(self, seconds=90):
        """Waits for the end, which has to be a bad one; gives the exit code."""
        code = self.process.wait(seconds)
        assert code != 0, self.said()
        assert not self.tasks()
        return code

    def stop(self):
        """Ends what a test that failed has left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)

    # What it does.

    def wait_until(self, condition, seconds=120):
        """Waits for something to hold while the job runs; gives the seconds that took."""
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() - began < seconds, self.said()
            time.sleep(0.01)
        return time.monotonic() - began

    def newest(self):
        """The step of the newest checkpoint; 0 without any."""
        return max((checkpoint_step(p) or 0 for p in self.checkpoints.glob("step-*")), default=0)

    def wait_for_checkpoint(self, step):
        """Waits until there is one of that step or of a later one."""
        self.wait_until(lambda: self.newest() >= step)

    def wait_to_be_told(self, text, seconds=120, times=1):
        """Waits until the job has written something so often; gives the seconds that took."""
        return self.wait_until(lambda: self.told(text) >= times, seconds)

    def told(self, text):
        """How often the job has written something."""
        return self.said(None).count(text)

    def said(self, characters=4000):
        """The end of what the job wrote; all of it without a number."""
        text = (self.directory / "log.txt").read_text(errors="replace")
        return text if characters is None else text[-characters:]

    def attempts(self):
        """How often a replica began to train."""
        return len(list((self.directory / "seen").glob("*/0.txt")))

    def tasks(self):
        """The processes that train: their ids by their names, such as "worker 1"."""
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

    # What came out.

    def seen(self):
        """For each step, in order, the marks of what it took of the data, in the last attempt."""
        last, self._again = collections.defaultdict(dict), set()
        for file in sorted((self.directory / "seen").glob("*/*.txt")):
            here = collections.defaultdict(list)
            for line in file.read_text().splitlines():
                step, *marks = map(int, re.findall(r"\d+", line))
                here[step] += marks
            self._again |= here.keys() & last[file.name].keys()
            last[file.name].update(here)
        steps = {step for replica in last.values() for step in replica}
        return [
            sorted(mark for replica in last.values() for mark in replica.get(step, ()))
            for step in sorted(steps)
        ]

    def lost(self):
        """Examples that were computed with and had to be computed with again."""
        self.seen()
        return len(self._again) * trained.BATCH


def check_equal(run, whole):
    """The run ends as the one that was left alone, having seen the same in each step."""
    assert json.loads(run.output.read_text()) == json.loads(whole.output.read_text())
    steps = run.seen()
    assert steps == whole.seen()
    per_epoch = trained.EXAMPLES // trained.BATCH
    assert len(steps) == trained.EPOCHS * per_epoch
    for epoch in range(trained.EPOCHS):
        part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(mark for step in part for mark in step) == _marks_of_all()


def _marks_of_all():
    import kdist

    train, _ = trained.pipelines(kdist.create_strategy("one_device"))
    marks = []
    for images, _ in train.dataset().take(trained.EXAMPLES // trained.BATCH):
        marks += trained.marks_of(images).numpy().tolist()
    return sorted(marks)


def _task_name(pid):
    """A task's name by its environment; None for the launcher, and for what has ended."""
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
