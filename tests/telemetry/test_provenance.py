"""Commit and remote of a program."""

import subprocess

import pytest

from kdist.telemetry.provenance import git_commit, git_remote, versions


@pytest.fixture
def program(tmp_path):
    """Returns the path of a program in a repository with a remote."""
    program = tmp_path / "train.py"
    program.write_text("")
    name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (
        ["init", "-q"],
        ["add", "."],
        [*name, "commit", "-qm", "first"],
        ["remote", "add", "origin", "https://token:secret@example.com/team/project.git"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return program


def test_the_commit_is_that_of_the_program(program):
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=True)
    assert git_commit(str(program)) == head.stdout.strip()


def test_a_login_in_the_address_of_the_remote_is_left_out(program):
    assert git_remote(str(program)) == "https://example.com/team/project.git"


def test_outside_of_a_repository_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(str(tmp_path / "train.py")) is None
    assert git_remote(str(tmp_path / "train.py")) is None
    assert set(versions("no_such_package")) >= {"python", "numpy"}
