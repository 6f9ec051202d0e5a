"""Jobs that run with fewer workers: which places work, and for how long the others are awaited."""

import os
import signal
import threading
import time

import pytest

from kdist.launch import elastic
from kdist.launch.elastic import Places, WorkerLimits
from kdist.launch.local_engine import local_job


class Clock:
    """Replaces the module `time`; time passes only by sleeping."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class Tasks:
    """A job that records that it has been asked to restart."""

    def __init__(self):
        self.restarted = threading.Event()

    def restart(self):
        self.restarted.set()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(elastic, "time", clock)
    return clock


@pytest.fixture
def places(tmp_path):
    """Returns a function that creates places, and the list of their messages."""

    def create(min_workers=2, wait_minutes=1.0):
        messages = []
        check = f"echo no device; ! [ -e {tmp_path}/missing-$KDIST_PLACE ]"
        limits = WorkerLimits(4, min_workers, wait_minutes)
        return Places(limits, messages.append, check, ["0", "1", "2", "3"]), messages

    return create


def lose(directory, *places):
    for place in places:
        (directory / f"missing-{place}").touch()


def test_a_job_whose_places_work_does_not_wait(places, clock):
    places, messages = places()
    assert places.choose() == [0, 1, 2, 3]
    assert clock.seconds == 0
    assert not messages
    assert places.variables([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_a_place_is_awaited_once(places, clock, tmp_path):
    places, messages = places()
    lose(tmp_path, 2)
    assert places.choose() == [0, 1, 3]
    assert clock.seconds == 60
    assert messages == [
        "waiting for place 2 (its check exits with 1: no device) for up to 1 min; then the job "
        "continues with 3 of 4 workers",
        "place 2 (its check exits with 1: no device) did not come back; the job continues with 3 "
        "of 4 workers",
    ]
    assert places.choose() == [0, 1, 3]
    assert clock.seconds == 60
    lose(tmp_path, 3)
    assert places.choose() == [0, 1]
    assert clock.seconds == 120


def test_a_place_that_comes_back_in_time_is_used(places, clock, tmp_path, monkeypatch):
    places, messages = places()
    lose(tmp_path, 1)

    def sleep(seconds):
        clock.seconds += seconds
        if clock.seconds > 10:
            (tmp_path / "missing-1").unlink(missing_ok=True)

    monkeypatch.setattr(clock, "sleep", sleep)
    assert places.choose() == [0, 1, 2, 3]
    assert 10 < clock.seconds < 20
    assert len(messages) == 1


def test_too_few_places_end_the_job(places, clock, tmp_path):
    places, messages = places(min_workers=3)
    lose(tmp_path, 0, 1)
    assert places.choose() == []
    assert messages[-1].endswith("did not come back; the job ends, as it needs 3 (--min_workers)")
    assert places.choose(limit_seconds=5.0) == []
    assert clock.seconds == 65


def test_a_place_that_works_again_restarts_the_job(places, tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "_CHECK_INTERVAL_SECONDS", 0.01)
    places, messages = places(wait_minutes=0.0)
    lose(tmp_path, 1, 2)
    assert places.choose() == [0, 3]
    tasks = Tasks()
    with places.watch(tasks):
        (tmp_path / "missing-2").unlink()
        assert tasks.restarted.wait(30)
    assert "back: place 2; the tasks save a checkpoint" in messages[-1]
    assert messages[-1].endswith("restarts with 3 of 4 workers")
    assert places.choose() == [0, 2, 3]


def test_a_check_that_hangs_is_a_failure(monkeypatch, clock):
    monkeypatch.setattr(elastic, "_MAX_CHECK_SECONDS", 0.1)
    messages = []
    places = Places(WorkerLimits(1, 1, 0.0), messages.append, "sleep 100 & wait")
    assert places.choose() == []
    assert "its check took longer than 0.1 s" in messages[-1]


def test_without_a_check_all_places_work():
    places = Places(WorkerLimits(2, 2, 0.0), pytest.fail)
    assert places.choose() == [0, 1]
    assert places.variables([0, 1]) == {}
    with places.watch(None):
        pass


def test_limits():
    limits = WorkerLimits(4, 2, 10.0)
    assert limits.attempts(4, 600, 5) == [(4, 600), (3, 5), (2, 5)]
    assert limits.attempts(2, 600, 5) == [(4, 5), (3, 5), (2, 600)]
    for minimum, minutes, message in ((0, 1, "from 1 to"), (5, 1, "from 1 to"), (2, -1, "from 0")):
        with pytest.raises(ValueError, match=message):
            WorkerLimits(4, minimum, minutes)


TRAPPED = "trap '{}' TERM; touch $KDIST_READY-$$; while true; do sleep 0.05; done"


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_job_that_is_ended_for_a_restart(tmp_path, interrupts):
    ready = tmp_path / "ready"
    shell = TRAPPED.format("" if interrupts else "exit 143")
    environment = {**os.environ, "KDIST_READY": str(ready)}
    job = local_job({"worker": 2}, ["sh", "-c", shell], tmp_path, environment=environment)

    def end(tasks):
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        tasks.restart()
        for _ in range(2 * interrupts):  # the second one kills
            while not tasks.is_restarting and tasks.stopped_by is None:
                time.sleep(0.05)
            tasks.stop(signal.SIGINT)

    with job as tasks:
        thread = threading.Thread(target=end, args=[tasks])
        thread.start()
        code = tasks.run()
        thread.join()
    assert tasks.failed is None
    assert (code, tasks.is_restarting) == ((130, False) if interrupts else (143, True))
