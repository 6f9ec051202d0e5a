"""Jobs of engines that are killed and preempted end as an undisturbed one, bit by bit."""

import json
import os
import pathlib
import signal
import sys
import uuid

import psutil
import pytest

from tests.faults.jobs import RESTARTED, Run, check_equal
from tests.ray_programs import end_marked, ray_environment

HERE = pathlib.Path(__file__).parent

pytestmark = pytest.mark.slow


class EngineRun(Run):
    """A run that a program of this folder starts on an engine."""

    def __init__(self, directory, program):
        super().__init__(directory, "multi_worker")
        self._engine_program, self.mark = HERE / program, uuid.uuid4().hex

    def start(self, fault=""):
        self.checkpoints.mkdir(parents=True)
        command = [self._engine_program, self.directory, self.checkpoints, self.result]
        self.process = self._popen([sys.executable, *command], **ray_environment(self.mark))
        return self

    def seen(self):
        """Returns the last line of the output, which is JSON."""
        return json.loads(self.output().strip().splitlines()[-1])


@pytest.mark.exhaustive  # Ray gives its processes half a minute to start
def test_ray_restarts_a_job_whose_task_actor_and_node_were_killed(
    short_directory, undisturbed, record
):
    expected = undisturbed("multi_worker")
    run = EngineRun(short_directory, "ray_program.py").start()
    try:
        run.wait_until(run.newest_step, 600)
        environment = psutil.Process(run.tasks()["worker 0"]).environ()
        assert "TF_USE_LEGACY_KERAS" not in environment
        run.signal("worker 1")
        run.wait_for_message("worker 1 was ended by SIGKILL")
        for lost, times in ((actor_of, 1), (node_of, 2)):
            step = run.newest_step()
            run.wait_until(lambda step=step: run.newest_step() > step, 600)
            os.kill(lost(run), signal.SIGKILL)
            run.wait_for_message("actor or its node is gone", times=times)
        run.wait_for_success(400)
    finally:
        run.stop()
        left = end_marked(run.mark)
    assert left == []
    check_equal(run, expected)
    seen = run.seen()
    assert seen["code"] == 0
    *roles, refusal = seen["roles"]
    for name in ("chief", "worker 0", "ps 0"):
        assert any(line.startswith(f"[{name}] ") for line in roles), roles
    assert "no room: the job needs 4 ×" in refusal
    assert seen["stopped"]
    assert seen["called"] == ["a", "2 workers", "worker 0", None]
    assert seen["elastic"] == 0
    assert "1 of 2 workers at" in run.output()
    assert "there is room for 2 of 2 workers: the" in run.output()
    fault = "kill -9 of a task, of its actor, of its node, on Ray"
    record(fault, "multi_worker", RESTARTED, None, run.num_lost_examples(), "yes")


def actor_of(run):
    """Returns the process of the actor of a task."""
    return psutil.Process(run.tasks()["worker 0"]).ppid()


def node_of(run):
    """Returns the process of the node of a task that has no other actor than that of the task."""
    for task in run.tasks().values():
        node = psutil.Process(psutil.Process(task).ppid()).parent()
        if not any("ray::Supervisor" in " ".join(each.cmdline()) for each in node.children()):
            return node.pid
    raise AssertionError("no node has only a task")
