"""Runs that are left alone, to compare with; and the table of faults."""

import json
import os

import pytest

from tests.faults.jobs import Run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A function that gives the run of a kind of strategy that nothing happened to."""
    runs = {}

    def of(kind):
        if kind not in runs:
            runs[kind] = Run(tmp_path_factory.mktemp(f"whole-{kind}"), kind).start()
            runs[kind].ends()
        return runs[kind]

    return of


@pytest.fixture
def start(tmp_path):
    """A function that starts a `Run`; what is left of it ends with the test."""
    runs = []

    def started(kind, *launch, fault="", **more):
        directory = tmp_path / f"run-{len(runs)}"
        directory.mkdir()
        runs.append(Run(directory, kind, launch, **more))
        return runs[-1].start(fault)

    yield started
    for run in runs:
        run.stop()


@pytest.fixture
def row():
    """A function that notes a row for the table of faults (see `table.py`)."""

    def note(fault, strategy, happens, noticed=None, lost=None, equal=""):
        if path := os.environ.get("KDIST_FAULT_TABLE"):
            record = {
                "fault": fault,
                "strategy": strategy,
                "what happens": happens,
                "seconds to notice": noticed,
                "examples lost": lost,
                "equal at the end": equal,
            }
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    return note
