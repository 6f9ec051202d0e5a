"""kill -9 at random moments: the run's end is bit-equal to that of a run that was left alone.

KDIST_KILLS=20 in the environment kills more often than CI has time for.
"""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.faults import trained

KILLS = int(os.environ.get("KDIST_KILLS", "3"))
ROOT = pathlib.Path(__file__).parents[2]
TRAINED = pathlib.Path(trained.__file__)

pytestmark = pytest.mark.slow


class Run:
    """A job that trains in a directory, killed and started again."""

    def __init__(self, directory, kind):
        self.directory, self._kind = directory, kind
        self.output = directory / "result.json"
        self._jobs = 0

    def start(self):
        """Starts the job; gives its process, that of the launcher where there are two workers."""
        self.directory.mkdir(exist_ok=True)
        self._jobs += 1
        job = f"{self._jobs:03d}"
        command = [TRAINED, self._kind, self.directory, self.output, job]
        if self._kind == "multi_worker":
            logs = self.directory.with_name(f"{self.directory.name}-logs-{self._jobs}")
            launch = [ROOT / "scripts" / "launch.py", "--workers=2", f"--run_dir={logs}", "--"]
            command = [*launch, *command]
        self._log = open(self.directory / "log.txt", "a")  # noqa: SIM115
        return subprocess.Popen(
            [sys.executable, *map(os.fspath, command)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        )

    def to_the_end(self):
        """Runs the job until it ends, and gives what it wrote."""
        process = self.start()
        assert process.wait(180) == 0, self.said()
        return json.loads(self.output.read_text())

    def kill(self, process, randomly):
        """kill -9 to a task that trains, and waits for the job's end."""
        os.kill(randomly.choice(self._tasks(process)), signal.SIGKILL)
        code = process.wait(60)
        assert code != 0, self.said()
        assert not self._tasks(process)

    def trains(self):
        """Whether a step was made since the job was started."""
        return any((self.directory / "seen" / f"{self._jobs:03d}").glob("*.txt"))

    def said(self):
        """The end of what the jobs wrote."""
        return (self.directory / "log.txt").read_text()[-3000:]

    def seen(self):
        """For each step, in order, what it took of the data, in the last job that made it."""
        steps = {}
        for job in sorted((self.directory / "seen").iterdir()):
            here = collections.defaultdict(list)
            for file in sorted(job.glob("*.txt")):
                for line in file.read_text().splitlines():
                    step, *marks = line.replace("[", "").replace("]", "").split()
                    here[int(step)] += map(int, marks)
            steps.update(here)
        return [sorted(steps[step]) for step in sorted(steps)]

    def _tasks(self, process):
        if self._kind != "multi_worker":
            return [process.pid] if process.poll() is None else []
        found = _pids(f"trained.py {self._kind} {self.directory} ")
        return [pid for pid in found if pid != process.pid]


@pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker"])
def test_a_run_that_is_killed_ends_as_one_that_was_not(tmp_path, kind):
    randomly = random.Random(int(os.environ.get("KDIST_KILL_SEED", "0")))
    whole, killed = Run(tmp_path / "whole", kind), Run(tmp_path / "killed", kind)
    expected = whole.to_the_end()
    kills = 0
    while kills < KILLS:
        process = killed.start()
        deadline = time.monotonic() + 120
        while not killed.trains() and process.poll() is None:
            assert time.monotonic() < deadline, killed.said()
            time.sleep(0.01)
        # From the first step on; between checkpoints, while one is written, in validation.
        time.sleep(randomly.uniform(0.0, 1.0))
        if process.poll() is not None:
            break
        killed.kill(process, randomly)
        kills += 1
    result = killed.to_the_end()
    assert kills >= min(KILLS, 3)
    assert result == expected
    assert "going on after step" in killed.said()
    steps = killed.seen()
    per_epoch = trained.EXAMPLES // trained.BATCH
    assert len(steps) == trained.EPOCHS * per_epoch
    assert steps == whole.seen()
    for epoch in range(trained.EPOCHS):
        part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(mark for step in part for mark in step) == sorted(_marks_of_all())


def test_the_launcher_goes_on_by_itself(tmp_path):
    """A task is killed twice; nobody starts anything by hand."""
    whole = Run(tmp_path / "whole", "multi_worker")
    expected = whole.to_the_end()
    checkpoints = tmp_path / "run" / "checkpoints"
    output, randomly = tmp_path / "result.json", random.Random(0)
    command = [
        *(sys.executable, ROOT / "scripts" / "launch.py", "--workers=2", "--max_restarts=1"),
        *(f"--run_dir={tmp_path / 'run'}", "--", TRAINED, "multi_worker", checkpoints, output, "1"),
    ]
    with open(tmp_path / "log.txt", "w") as log:
        launcher = subprocess.Popen(
            [os.fspath(part) for part in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        )
    for _ in range(2):
        before = _newest(checkpoints)
        deadline = time.monotonic() + 120
        while _newest(checkpoints) <= before:
            assert launcher.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        victims = [pid for pid in _pids(f"{checkpoints} ") if pid != launcher.pid]
        os.kill(randomly.choice(victims), signal.SIGKILL)
    assert launcher.wait(180) == 0
    said = (tmp_path / "log.txt").read_text()
    assert said.count("starting again from the checkpoint of step ") == 2, said[-3000:]
    assert json.loads(output.read_text()) == expected
    assert not _pids(f"{checkpoints} ")


def _newest(directory):
    return max((int(path.name.split("-")[1]) for path in directory.glob("step-*")), default=0)


def _pids(pattern):
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _marks_of_all():
    import kdist

    train, _ = trained.pipelines(kdist.create_strategy("one_device"))
    marks = []
    for images, _ in train.dataset().take(trained.EXAMPLES // trained.BATCH):
        marks += trained.marks_of(images).numpy().tolist()
    return marks
