"""Undisturbed runs to compare with, and records for the table of faults."""

import fcntl
import json
import os
import shutil

import pytest

from tests.faults.jobs import Run


@pytest.fixture(scope="session")
def undisturbed(shared_directory):
    """Returns a function that returns an undisturbed run of a strategy.

    The first test process that needs a run starts it, and the others wait for its result.
    """
    runs = {}

    def run_of(kind):
        if kind not in runs:
            run = Run(shared_directory / f"undisturbed-{kind}", kind)
            with open(shared_directory / f"undisturbed-{kind}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not run.result.exists():
                    # What an attempt that failed has left would be resumed.
                    shutil.rmtree(run.directory, ignore_errors=True)
                    run.directory.mkdir()
                    run.start().wait_for_success()
            runs[kind] = run
        return runs[kind]

    return run_of


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a `Run`, which ends with the test at the latest."""
    runs = []

    def start_run(kind, *launch, fault="", **options):
        directory = tmp_path / f"run-{len(runs)}"
        directory.mkdir()
        runs.append(Run(directory, kind, launch, **options))
        return runs[-1].start(fault)

    yield start_run
    for run in runs:
        run.stop()


@pytest.fixture
def record():
    """Returns a function that appends a row for the table of faults (see `table.py`)."""

    def append(fault, strategy, outcome, detected_after=None, lost=None, equal=""):
        if path := os.environ.get("KDIST_FAULT_TABLE"):
            row = {
                "fault": fault,
                "strategy": strategy,
                "what happens": outcome,
                "seconds to notice": detected_after,
                "examples lost": lost,
                "equal at the end": equal,
            }
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return append
