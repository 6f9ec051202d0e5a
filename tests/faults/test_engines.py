"""Jobs of engines that are killed and preempted end as an undisturbed one, bit by bit."""

import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import uuid

import psutil
import pytest

from tests.faults.jobs import Run, check_equal
from tests.serving.test_ray import MARK, end_marked

HERE = pathlib.Path(__file__).parent

pytestmark = pytest.mark.slow


class EngineRun(Run):
    """A run that a program of this folder starts on an engine."""

    def __init__(self, directory, program, prefix=()):
        super().__init__(directory, "multi_worker", prefix=prefix)
        self._engine_program, self.mark = HERE / program, uuid.uuid4().hex

    def start(self, fault=""):
        self.checkpoints.mkdir(parents=True)
        command = [self._engine_program, self.directory, self.checkpoints, self.result]
        # A cluster of Ray has no authentication by default.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
        own = {**token, MARK: self.mark, "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = self._popen([*self._prefix, sys.executable, *command], **own)
        return self

    def seen(self):
        """Returns the last line of the output, which is JSON."""
        return json.loads(self.output().strip().splitlines()[-1])


@pytest.fixture
def short_path():
    """Returns a directory for Ray's sockets, whose names may not be long."""
    with tempfile.TemporaryDirectory(prefix="k", ignore_cleanup_errors=True) as directory:
        yield pathlib.Path(directory)


@pytest.mark.exhaustive  # Ray gives its processes half a minute to start
def test_ray_restarts_a_job_whose_task_and_actor_were_killed(short_path, undisturbed):
    expected = undisturbed("multi_worker")
    run = EngineRun(short_path, "ray_program.py").start()
    try:
        run.wait_until(run.newest_step, 300)
        environment = psutil.Process(run.tasks()["worker 0"]).environ()
        assert "TF_USE_LEGACY_KERAS" not in environment
        run.signal("worker 1")
        run.wait_for_message("worker 1 was ended by SIGKILL")
        step = run.newest_step()
        run.wait_until(lambda: run.newest_step() > step, 300)
        child = run.tasks()["worker 0"]
        os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
        run.wait_for_message("actor or its node is gone")
        run.wait_for_success(400)
    finally:
        run.stop()
        left = end_marked(run.mark)
    assert left == []
    check_equal(run, expected)
    seen = run.seen()
    assert seen["code"] == 0
    refusal, seconds = seen["refused"]
    assert "no room: the job needs 3 ×" in refusal
    assert seconds < 30
    assert seen["stopped"]
    assert seen["called"] == ["a", "2 workers", "worker 0", None]
    assert seen["elastic"] == 0
    for message in (
        "no room for 2 of 2 workers; waiting up to 1 s",
        "room for 2 of 2 workers: the",
    ):
        assert message in run.output()


def test_compute_engine_creates_preempted_vms_again(tmp_path, undisturbed):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root")
    # TensorFlow's servers listen at all addresses of the VMs, which share this namespace only.
    prefix = ["unshare", "--net", "--mount", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    run = EngineRun(tmp_path, "gce_program.py", prefix).start()
    try:
        run.wait_for_success(400)
    finally:
        run.stop()
    check_equal(run, undisturbed("multi_worker"))
    seen = run.seen()
    assert seen["code"] == 0
    assert seen["saved after"] < 30  # the time that Compute Engine gives
    workers = ("cats-worker-0", "cats-worker-1")
    kinds = [(name, kind, zone) for name, kind, zone, spot in seen["created"] if spot == "SPOT"]
    # No capacity in the first zone; later none of this kind at all, and then of the next kind.
    assert [each for each in kinds if each[0] == workers[0]] == [
        (workers[0], "n1-standard-8", "us-central1-a"),
        (workers[0], "n1-standard-8", "us-central1-b"),
        (workers[0], "n1-standard-8", "us-central1-a"),
        (workers[0], "n1-standard-8", "us-central1-b"),
        (workers[0], "n1-standard-16", "us-central1-a"),
    ]
    assert seen["left"] == []
    assert seen["limited"] == {"code": 124, "states": ["running"], "seconds": 60, "left": []}
