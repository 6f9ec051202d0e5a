"""Tasks of a model that is split over hosts die; the launcher starts the job again."""

import json
import pathlib

import pytest

from tests.faults import over_hosts
from tests.faults.jobs import RESTARTED

PROGRAM = pathlib.Path(over_hosts.__file__)
LAYOUT = "data=2,pipeline=2,between=model"

pytestmark = pytest.mark.slow


def test_a_run_whose_tasks_are_killed_ends_as_one_that_was_left_alone(start, row):
    """That which serves has no part in checkpoints; that which coordinates writes them."""
    whole = start(LAYOUT, "--workers=2", program=PROGRAM)
    expected = whole.ends()
    run = start(LAYOUT, "--workers=2", "--max_restarts=1", program=PROGRAM)
    noticed = []
    for name in ("worker 1", "worker 0"):
        run.wait_for_checkpoint(run.newest() + 1)
        run.signal(name)
        noticed.append(run.wait_to_be_told(f"{name} was ended by SIGKILL"))
    result = run.ends()
    assert run.said(None).count("starting again from the checkpoint of step ") == 2
    assert json.dumps(result) == json.dumps(expected)
    assert max(result["history"]["loss"]) < 2.3  # it has learned
    row("kill -9 of a host, of the coordinator", LAYOUT, RESTARTED, max(noticed), None, "yes")
