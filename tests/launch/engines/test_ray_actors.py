"""Tasks on Ray without a cluster: the actors of tasks are objects of this process."""

import os
import signal
import time
import types
from unittest import mock

import pytest

from kdist.cluster import Cluster
from kdist.launch.engines import Job, ray_actors
from kdist.launch.engines.ray_actors import Place, RayTask
from kdist.launch.task import Screen
from kdist.launch.task_group import TaskGroup, Timeouts


class Actor:
    """A handle of an actor, whose methods are called at once."""

    def __init__(self, place):
        self.place, self.is_lost = place, False

    def __getattr__(self, name):
        def remote(*arguments):
            if self.is_lost:
                raise ray_actors.ray.exceptions.ActorDiedError
            return getattr(self.place, name)(*arguments)

        return type("Method", (), {"remote": staticmethod(remote)})


@pytest.fixture
def group(monkeypatch, tmp_path):
    """Returns a function that makes the tasks of a job, their actors, and their lines."""
    monkeypatch.setattr(ray_actors.ray, "get", lambda value: value)
    monkeypatch.chdir(tmp_path)

    def make(shell, run_dir="", **limits):
        command = ("bash", "-c", shell)
        options = {"directory": str(tmp_path), "cpus": "3"}
        job = Job("cats", command, workers=2, run_dir=run_dir, options=options)
        addresses = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
        tasks, lines = [], []
        for cluster in Cluster(addresses, "worker", 0).all_tasks():
            actor = Actor(Place.__ray_metadata__.modified_class())
            tasks.append(RayTask(actor, cluster, job, {"KDIST_JOB_TOKEN": "t"}, None))
        screen = ray_actors._Lines(lines.append)
        assert isinstance(screen, Screen)
        return TaskGroup(tasks, "no process", screen, Timeouts(end_seconds=10, **limits)), lines

    return make


def test_lines_and_exit_codes_of_tasks(group, tmp_path):
    tasks, lines = group(
        'echo "$KDIST_JOB_TOKEN $TF_NUM_INTRAOP_THREADS $TF_CONFIG"; echo end; exec 1>&- 2>&-; '
        "sleep 0.2",
        run_dir="run",
    )
    assert tasks.run() == 0
    [first] = [line for line in lines if line.startswith("[worker 0] t 3 ")]
    assert '"index": 0' in first
    assert "[worker 1] end" in lines
    assert (tmp_path / "run/logs/worker-1.log").read_text().endswith("end\n")


def test_a_task_that_fails_ends_the_others(group, tmp_path):
    ready = tmp_path / "ready"  # worker 0 handles SIGTERM from then on
    tasks, lines = group(
        f'if echo "$TF_CONFIG" | grep -q \'"index": 1\'; then '
        f"until [ -e {ready} ]; do sleep 0.05; done; exit 3; fi; "
        f'trap "echo asked; exit 143" TERM; touch {ready}; while true; do sleep 0.05; done'
    )
    assert tasks.run() == 3
    assert tasks.failed.name == "worker 1"
    assert "[worker 0] asked" in lines


@pytest.mark.slow
def test_a_task_that_hangs_is_named_and_ended(group):
    tasks, lines = group(
        """beat() { echo '{"doing": "in step 3", "in_step": true}' >&"${KDIST_HEARTBEAT%%:*}"; }
        beat
        if echo "$TF_CONFIG" | grep -q '"index": 1'; then exec sleep 600; fi
        while sleep 0.1; do beat; done""",
        hang_seconds=3,
    )
    assert tasks.run() == 128 + signal.SIGABRT
    assert tasks.failed.name == "worker 1"
    assert any("worker 1 hung: it sent no heartbeat for 3 s" in line for line in lines)


def test_a_lost_actor_is_a_killed_task(group):
    tasks, lines = group("echo $$; sleep 60")
    lost = tasks.tasks[1]

    def lose():
        while not lost.last_lines:
            time.sleep(0.05)
        lost.place.is_lost = True

    import threading

    threading.Thread(target=lose).start()
    assert tasks.run() == 128 + signal.SIGKILL
    assert tasks.failed is lost
    assert any("[worker 1] (kdist: the task's actor or its node is gone" in each for each in lines)
    # In this test the process of the actor still runs, which would have ended its child.
    pid = int(next(line for line in lost.last_lines if line.isdecimal()))
    os.kill(pid, signal.SIGKILL)


class Room:
    """A cluster with room for a number of tasks, in place of Ray's placement groups."""

    def __init__(self, monkeypatch, free):
        self.free, self.asked, self.removed = free, [], 0
        monkeypatch.setattr(ray_actors, "placement_group", self.group)
        monkeypatch.setattr(ray_actors, "remove_placement_group", self.remove)
        monkeypatch.setattr(ray_actors, "_SHORT_ROOM_SECONDS", 0.02)

    def group(self, bundles, strategy):
        self.asked.append(len(bundles))

        def wait(seconds):
            time.sleep(0.01)
            return len(bundles) <= self.free

        return types.SimpleNamespace(wait=wait, bundle_count=len(bundles))

    def remove(self, group):
        self.removed += 1


@pytest.fixture
def supervisor(monkeypatch):
    """Returns a function that makes a supervisor that does not run yet."""
    monkeypatch.setattr(ray_actors.threading, "Thread", lambda **options: mock.Mock())

    def make(**fields):
        job = Job("cats", ("true",), workers=4, options={"room_seconds": "0.05"}, **fields)
        return ray_actors.Supervisor.__ray_metadata__.modified_class(job, None)

    return make


def test_a_job_continues_with_as_many_workers_as_have_room(monkeypatch, supervisor):
    room = Room(monkeypatch, free=3)
    job = supervisor(min_workers=2, wait_minutes=0.001)
    assert job._find_room().bundle_count == 3
    assert room.asked == [4, 3]
    job._refuse("")
    room.free = 1
    assert job._find_room() is None
    assert room.asked[2:] == [4, 3, 2]
    assert room.removed == 4
    room.free = 4
    assert job._find_room().bundle_count == 4
    lines = [line.partition(";")[0] for line in job.read(0)[0]]
    assert lines == [f"kdist launch: no room for {number} of 4 workers" for number in (4, 3)]


def test_a_job_without_limits_needs_room_for_all_tasks(monkeypatch, supervisor):
    room = Room(monkeypatch, free=3)
    assert supervisor()._find_room() is None
    assert room.asked == [4]
    job = supervisor(min_workers=1, wait_minutes=60.0)
    job._refuse("")
    job._stopped = True
    assert job._find_room() is not None  # it does not wait for an hour
