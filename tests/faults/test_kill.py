"""kill -9 at random moments: the run's end is bit-equal to that of a run that was left alone.

KDIST_KILLS=20 in the environment kills more often than CI has time for.
"""

import os
import random
import re
import signal
import time

import pytest

from tests.faults import trained
from tests.faults.jobs import check_equal

KILLS = int(os.environ.get("KDIST_KILLS", "3"))

LAST_STEP = trained.EPOCHS * trained.EXAMPLES // trained.BATCH

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker"])
def test_a_run_that_is_killed_ends_as_one_that_was_not(kind, start, whole, row):
    randomly = random.Random(int(os.environ.get("KDIST_KILL_SEED", "0")))
    expected = whole(kind)
    kills = lost = 0
    while kills < KILLS:  # over as many runs as that takes; some end before they are killed
        run, steps = start(kind), []
        while kills < KILLS and _is_killed(run, randomly):
            if run.newest():  # killed before its first checkpoint, it begins again
                steps.append(run.newest())
                kills += 1
            run.start()
        run.ends()
        # The launcher says a dead task's last lines again: what was said once may stand twice.
        said = map(int, re.findall(r"going on after step (\d+)", run.said(None)))
        assert list(dict.fromkeys(said)) == list(dict.fromkeys(steps))
        check_equal(run, expected)
        lost += run.lost()
    row(f"kill -9, {kills} times", kind, "started again by hand, goes on", None, lost, "yes")


def _is_killed(run, randomly):
    """Kills a task at some moment from its first step on; False if it has ended before."""
    attempts = run.attempts()
    run.wait_until(lambda: run.attempts() > attempts)
    # Between checkpoints, while one is written, in validation.
    time.sleep(randomly.uniform(0.0, 1.0))
    if run.newest() == LAST_STEP:
        return False
    run.signal(randomly.choice(list(run.tasks())))
    run.fails()
    return True


def test_the_launcher_goes_on_by_itself(start, whole, row):
    """A task is killed twice; nobody starts anything by hand."""
    expected = whole("multi_worker")
    run = start("multi_worker", "--max_restarts=1")
    noticed = []
    for name in ("worker 1", "worker 0"):
        run.wait_for_checkpoint(run.newest() + 1)
        run.signal(name)
        noticed.append(run.wait_to_be_told(f"{name} was ended by SIGKILL"))
    run.ends()
    assert run.said(None).count("starting again from the checkpoint of step ") == 2
    check_equal(run, expected)
    happens = "the task is named, the job started again from its last checkpoint"
    row(
        "kill -9 of a worker, of the chief",
        "multi_worker",
        happens,
        max(noticed),
        run.lost(),
        "yes",
    )


def test_a_preempted_worker_has_all_save_and_end(start, whole, row):
    run = start("multi_worker")
    run.wait_for_checkpoint(10)
    before = run.newest()
    run.signal("worker 1", signal.SIGTERM)
    noticed = run.wait_to_be_told("SIGTERM: saving, then ending")
    assert run.fails(30) == 128 + signal.SIGTERM
    assert run.newest() >= before
    run.start().ends()
    check_equal(run, whole("multi_worker"))
    assert run.lost() == 0
    row("SIGTERM to one worker", "multi_worker", "all save and end", noticed, 0, "yes")
