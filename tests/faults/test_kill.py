"""kill -9 at random moments: the result is bit-equal to that of an undisturbed run.

The environment variable KDIST_KILLS=20 kills more often than in CI.
"""

import os
import random
import re
import shutil
import signal
import time

import pytest

from kdist import exit_codes
from kdist.testing.metadata import metadata_server
from tests.faults import training_program
from tests.faults.jobs import KILLS, check_equal
from tests.tiers import seldom

LAST_STEP = training_program.EPOCHS * training_program.EXAMPLES // training_program.BATCH

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["multi_worker", *seldom(["mirrored", "one_device"])])
def test_a_killed_run_has_the_result_of_an_undisturbed_one(kind, start, undisturbed, record):
    randomly = random.Random(int(os.environ.get("KDIST_KILL_SEED", "0")))
    expected = undisturbed(kind)
    kills = lost = 0
    while kills < KILLS:  # over several runs, as some end before they are killed
        run, steps = start(kind), []
        while kills < KILLS and _is_killed(run, randomly):
            if run.newest_step():  # before its first checkpoint, it starts from the beginning
                steps.append(run.newest_step())
                kills += 1
            run.start()
        run.wait_for_success()
        # The launcher repeats a dead task's last lines, so a message may appear twice.
        steps_resumed = map(int, re.findall(r"resumed after step (\d+)", run.output()))
        assert list(dict.fromkeys(steps_resumed)) == list(dict.fromkeys(steps))
        check_equal(run, expected)
        lost += run.num_lost_examples()
    record(f"kill -9, {kills} times", kind, "restarted by hand, resumes", None, lost, "yes")


def _is_killed(run, randomly):
    """Kills a task at a random time after its first step; returns False if the job had ended."""
    attempts = run.attempts()
    run.wait_until(lambda: run.attempts() > attempts)
    # Between checkpoints, while one is written, or in validation.
    time.sleep(randomly.uniform(0.0, 1.0))
    if run.newest_step() == LAST_STEP:
        return False
    run.signal(randomly.choice(list(run.tasks())))
    run.wait_for_failure()
    return True


@pytest.mark.exhaustive
def test_a_run_whose_disk_is_gone_resumes_from_its_mirror(
    start, undisturbed, record, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    expected = undisturbed("multi_worker")
    monkeypatch.setenv("KDIST_MIRROR", str(store))
    run = start("multi_worker")
    run.wait_until(lambda: _steps_in(store, complete=False) and _steps_in(store, complete=True))
    run.signal("worker 0")  # the chief, during an upload
    run.wait_for_failure()
    step = max(_steps_in(store, complete=True))
    assert _steps_in(store, complete=False)
    shutil.rmtree(run.checkpoints.parent)
    run.start().wait_for_success()
    assert f"resumed after step {step} from" in run.output()
    check_equal(run, expected)
    assert max(_steps_in(store, complete=True)) == LAST_STEP
    record(
        "kill -9 of the chief during an upload; its disk is gone",
        "multi_worker",
        "resumes from the newest complete checkpoint in object storage",
        None,
        run.num_lost_examples(),
        "yes",
    )


def _steps_in(store, complete):
    """Returns the steps of complete checkpoints in a store, or of those that are not."""
    found = (store / "checkpoints").glob("step-*")
    return [int(p.name[5:15]) for p in found if (p / "checksums.json").exists() == complete]


@pytest.mark.exhaustive
def test_the_launcher_restarts_a_job(start, undisturbed, record):
    """Two tasks are killed, and the launcher alone restarts the job."""
    expected = undisturbed("multi_worker")
    run = start("multi_worker", "--max_restarts=1")
    detected_after = []
    for name in ("worker 1", "worker 0"):
        run.wait_for_checkpoint(run.newest_step() + 1)
        run.signal(name)
        detected_after.append(run.wait_for_message(f"{name} was ended by SIGKILL"))
    run.wait_for_success()
    assert run.output().count("starting again from the checkpoint of step ") == 2
    check_equal(run, expected)
    outcome = "the task is named; the job is restarted from its last checkpoint"
    record(
        "kill -9 of a worker, of the chief",
        "multi_worker",
        outcome,
        max(detected_after),
        run.num_lost_examples(),
        "yes",
    )


def test_after_a_preemption_all_workers_save_and_end(start, undisturbed, record, monkeypatch):
    """First SIGTERM to one worker, then the notice of a cloud to the launcher and all tasks."""
    run = start("multi_worker")
    run.wait_for_checkpoint(10)
    before = run.newest_step()
    run.signal("worker 1", signal.SIGTERM)
    signaled_after = run.wait_for_message("SIGTERM: saving a checkpoint")
    assert run.wait_for_failure(30) == exit_codes.SAVED
    assert run.newest_step() >= before
    with metadata_server("gce") as server, monkeypatch.context() as variables:
        variables.setenv(*next(iter(server.environment.items())))
        run.start()
        run.wait_for_checkpoint(before + 10)
        chief_saved = "[worker 0] kdist: saved after step "
        before, times = run.newest_step(), run.count(chief_saved)
        server.announce()
        noticed_after = run.wait_for_message("gce takes this machine away soon")
        run.wait_for_message(chief_saved, seconds=10, times=times + 1)
        assert run.newest_step() > before
        assert run.wait_for_failure(30) == exit_codes.SAVED
    run.start().wait_for_success()
    check_equal(run, undisturbed("multi_worker"))
    assert run.num_lost_examples() == 0
    outcome = "all save and end"
    record("SIGTERM to one worker", "multi_worker", outcome, signaled_after, 0, "yes")
    record("a preemption notice of GCE", "multi_worker", outcome, noticed_after, 0, "yes")
