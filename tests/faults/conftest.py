"""Undisturbed runs to compare with, and records for the table of faults."""

import json
import os

import pytest

from tests.faults.jobs import Run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Returns a function that returns an undisturbed run of a strategy."""
    runs = {}

    def run_of(kind):
        if kind not in runs:
            runs[kind] = Run(tmp_path_factory.mktemp(f"undisturbed-{kind}"), kind).start()
            runs[kind].wait_for_success()
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
