"""Stand-ins for the command lines of engines, on the PATH of a test."""

import os
import pathlib

import pytest

STAND_INS = pathlib.Path(__file__).parent / "stand_ins"


class State:
    """Directory in which the stand-ins of one test keep their state, and note their arguments."""

    def __init__(self, directory):
        self.directory = directory

    def write(self, name, text):
        (self.directory / name).write_text(text)

    def read(self, name):
        """Returns the text of a file; "" if there is none."""
        path = self.directory / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def state(tmp_path, monkeypatch):
    """Returns the state of the stand-ins, which are first on the PATH.

    No cluster of Ray is found, such as that of another test.
    """
    directory = tmp_path / "state"
    directory.mkdir()
    monkeypatch.setenv("STAND_IN_STATE", str(directory))
    monkeypatch.setenv("PATH", os.pathsep.join([str(STAND_INS), os.environ["PATH"]]))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    return State(directory)
