"""Parameter servers: a killed worker is replaced; otherwise the job resumes from a checkpoint."""

import pathlib
import random
import time

import pytest

from tests.faults import parameter_server_program
from tests.faults.jobs import KILLS
from tests.tiers import seldom

PROGRAM = pathlib.Path(parameter_server_program.__file__)

pytestmark = pytest.mark.slow


def check(result):
    assert result["iterations"] == result["steps"]
    assert result["accuracy"] >= 0.95


def test_workers_are_replaced_alone(start, record):
    randomly = random.Random(0)
    flags = "--workers=2", "--ps=1", "--max_restarts=20"
    run = start("parameter_server", *flags, program=PROGRAM)
    run.wait_for_checkpoint(50)
    detected_after, kills = [], 0
    while kills < KILLS and run.process.poll() is None:
        name = f"worker {randomly.randrange(2)}"
        if name not in run.tasks():
            continue
        restart, join = f"starting {name} again", f"{name} joins a running job"
        starts, joins = run.count(restart) + 1, run.count(join) + 1
        run.signal(name)
        detected_after.append(run.wait_for_message(restart, times=starts))
        run.wait_for_message(join, 60, times=joins)
        time.sleep(randomly.uniform(0.0, 2.0))
        kills += 1
    (run.directory / "full-speed").touch()
    result = run.wait_for_success(600)
    assert kills == KILLS
    check(result)
    outcome = "replaced alone; the others continue, and its step group is repeated"
    record(
        f"kill -9 of a worker, {kills} times",
        "parameter_server",
        outcome,
        max(detected_after),
        None,
        "—",
    )


@pytest.mark.parametrize("name", ["ps 0", *seldom(["chief 0"])])
@pytest.mark.exhaustive
def test_without_a_parameter_server_or_the_coordinator_the_job_restarts(name, start, record):
    flags = "--workers=2", "--ps=1", "--max_restarts=2"
    run = start("parameter_server", *flags, program=PROGRAM)
    detected_after = []
    for kill in (1, 2):
        run.wait_for_checkpoint(run.newest_step() + 100)
        run.signal(name)
        detected_after.append(
            run.wait_for_message("starting again from the checkpoint", times=kill)
        )
    (run.directory / "full-speed").touch()
    check(run.wait_for_success(600))
    outcome = "named; the job is restarted from its last checkpoint"
    record(
        f"kill -9 of {name.split()[0]}, twice",
        "parameter_server",
        outcome,
        max(detected_after),
        None,
        "—",
    )
