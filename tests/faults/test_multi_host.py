"""Killed tasks of a model that is split over hosts; the launcher restarts the job."""

import json
import pathlib

import pytest

from tests.faults import multi_host_program
from tests.faults.jobs import RESTARTED

PROGRAM = pathlib.Path(multi_host_program.__file__)
LAYOUT = "data=2,pipeline=2,between=model"

pytestmark = pytest.mark.slow


def test_a_killed_run_has_the_result_of_an_undisturbed_one(start, record):
    """Only the coordinator writes checkpoints; the other task serves."""
    undisturbed = start(LAYOUT, "--workers=2", program=PROGRAM)
    expected = undisturbed.wait_for_success()
    run = start(LAYOUT, "--workers=2", "--max_restarts=1", program=PROGRAM)
    detected_after = []
    for name in ("worker 1", "worker 0"):
        run.wait_for_checkpoint(run.newest_step() + 1)
        run.signal(name)
        detected_after.append(run.wait_for_message(f"{name} was ended by SIGKILL"))
    result = run.wait_for_success()
    assert run.output().count("starting again from the checkpoint of step ") == 2
    assert json.dumps(result) == json.dumps(expected)
    assert max(result["history"]["loss"]) < 2.3  # the model has learned
    record(
        "kill -9 of a host, of the coordinator", LAYOUT, RESTARTED, max(detected_after), None, "yes"
    )
