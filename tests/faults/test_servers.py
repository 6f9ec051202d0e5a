"""Parameter servers: workers are replaced alone; else the job goes on from its checkpoint."""

import os
import pathlib
import random
import time

import pytest

from tests.faults import served

KILLS = int(os.environ.get("KDIST_KILLS", "3"))
SERVED = pathlib.Path(served.__file__)

pytestmark = pytest.mark.slow


def check(result):
    assert result["iterations"] == result["steps"]
    assert result["accuracy"] >= 0.95


def test_workers_are_replaced_alone(start, row):
    randomly = random.Random(0)
    flags = "--workers=2", "--ps=1", "--max_restarts=20"
    run = start("parameter_server", *flags, program=SERVED)
    run.wait_for_checkpoint(50)
    noticed, kills = [], 0
    while kills < KILLS and run.process.poll() is None:
        name = f"worker {randomly.randrange(2)}"
        if name not in run.tasks():
            continue
        started, joined = f"starting {name} again", f"{name} joins a job that runs already"
        starts, joins = run.told(started) + 1, run.told(joined) + 1
        run.signal(name)
        noticed.append(run.wait_to_be_told(started, times=starts))
        run.wait_to_be_told(joined, 60, times=joins)
        time.sleep(randomly.uniform(0.0, 2.0))
        kills += 1
    result = run.ends(600)
    assert kills == KILLS
    check(result)
    happens = "replaced alone; the others go on, what it was at is done again"
    row(f"kill -9 of a worker, {kills} times", "parameter_server", happens, max(noticed), None, "—")


@pytest.mark.parametrize("name", ["ps 0", "chief 0"])
def test_a_parameter_server_and_the_coordinator_start_again_with_the_job(name, start, row):
    flags = "--workers=2", "--ps=1", "--max_restarts=2"
    run = start("parameter_server", *flags, program=SERVED)
    noticed = []
    for kill in (1, 2):
        run.wait_for_checkpoint(run.newest() + 100)
        run.signal(name)
        noticed.append(run.wait_to_be_told("starting again from the checkpoint", times=kill))
    check(run.ends(600))
    happens = "named; the job is started again from its last checkpoint"
    row(
        f"kill -9 of {name.split()[0]}, twice", "parameter_server", happens, max(noticed), None, "—"
    )
