"""Slurm's batch script run by bash, and its command line, with stand-ins for Slurm's programs."""

import os
import signal
import subprocess

import pytest

from kdist.launch.engines import Job, NoSuchJobError
from kdist.launch.engines.slurm import Slurm

# Each run of a task adds a letter to a file of its own.
COUNT = 'printf x >> "run-$SLURM_PROCID"; runs=$(wc -c < "run-$SLURM_PROCID");'

# The first task to end ends the other, which may not have begun.
ONLY_THE_FIRST_ENDS = "[ $SLURM_PROCID = 0 ] || exec /bin/sleep 20;"


def shell_job(code, **fields):
    return Job("cats", ("sh", "-c", COUNT + code), workers=2, run_dir="runs/cats", **fields)


@pytest.fixture
def run(state, tmp_path):
    """Returns a function that runs the script of a job; returns its exit code and output."""

    def call(job, slurm_state="RUNNING"):
        state.write("state", slurm_state)
        script = tmp_path / "script.sh"
        script.write_text(Slurm().text(job))
        names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "cats", "SLURM_NTASKS": "2"}
        done = subprocess.run(
            ["bash", script],
            env={**os.environ, **names, "SLURM_SUBMIT_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert not list(tmp_path.glob(".cats*")), "the record of exit codes is left"
        return done.returncode, done.stdout + done.stderr

    return call


def test_a_job_that_ends_well(run, state):
    code, out = run(shell_job('echo "task $SLURM_PROCID of $WHO"', environment={"WHO": "a b"}))
    assert code == 0
    assert "task 0 of a b" in out
    assert "task 1 of a b" in out
    assert state.read("calls") == ""


def test_a_job_that_saved_is_requeued_once(run, state):
    code, _ = run(shell_job("exit 143"))
    assert code == -signal.SIGKILL  # as Slurm ends the script of a job that it requeues
    assert state.read("calls") == "requeue 7\n"


def test_a_task_that_saves_later_is_not_killed(run, state, tmp_path):
    """The first worker is still writing the checkpoint when the second has ended."""
    slow = '[ $SLURM_PROCID = 1 ] || /bin/sleep 0.5; echo saved > "saved-$SLURM_PROCID"; exit 143'
    run(shell_job(slow))
    assert (tmp_path / "saved-0").exists()
    assert state.read("calls") == "requeue 7\n"


@pytest.mark.parametrize("slurm_state", ["COMPLETING", "CANCELLED"])
def test_a_job_that_scancel_ended_is_not_requeued(run, state, slurm_state):
    assert run(shell_job("exit 143"), slurm_state)[0] == 143
    assert state.read("calls") == ""


def test_a_failure_is_restarted_and_those_that_it_ends_do_not_hide_it(run, tmp_path):
    """The other task is ended by SIGTERM, and srun's exit code is 143."""
    failing = "[ $SLURM_PROCID = 1 ] && exit 1; exec /bin/sleep 20"
    code, out = run(shell_job(failing, max_restarts=2))
    assert code == 1
    assert (tmp_path / "run-1").read_text() == "xxx"
    assert "restart 2 of 2" in out


def test_restarts_are_counted_since_the_last_checkpoint(run, tmp_path):
    saving = (
        "[ $SLURM_PROCID = 0 ] || exit 0;"
        "[ $runs -gt 3 ] || mkdir -p runs/cats/checkpoints/step-000$runs;"
        "exit 75"
    )
    code, _ = run(shell_job(saving, max_restarts=1))
    assert code == 75
    # Three starts with a new checkpoint, the restart of the third, and the one after it.
    assert (tmp_path / "run-0").read_text() == "x" * 4


def test_a_run_that_finished_before_a_task_failed_is_done(run, tmp_path):
    finishing = "mkdir -p runs/cats; touch runs/cats/summary.json; exit 1"
    code, _ = run(shell_job(ONLY_THE_FIRST_ENDS + finishing))
    assert code == 0
    assert (tmp_path / "run-0").read_text() == "x"


@pytest.mark.parametrize("code", [124, 130])
def test_ends_that_are_final(run, tmp_path, code):
    assert run(shell_job(f"{ONLY_THE_FIRST_ENDS} exit {code}"))[0] == code
    assert (tmp_path / "run-0").read_text() == "x"


def test_at_its_time_limit_a_job_saves_and_ends(run, state):
    # A limit that has been reached when the script starts.
    job = shell_job("exit 143", time_limit_hours=0.01)
    assert run(job)[0] == 124
    assert state.read("calls") == ""
    run(shell_job("exit 143", time_limit_hours=0.01, options={"at_time_limit": "requeue"}))
    assert state.read("calls") == "requeue 7\n"


def test_submit_find_and_stop(state):
    engine = Slurm()
    with pytest.raises(NoSuchJobError, match="no job cats"):
        engine.find("cats")
    job = shell_job("true")
    assert engine.submit(job).number == "7"
    assert state.read("script") == engine.text(job)
    with pytest.raises(RuntimeError, match="another --name"):
        engine.submit(job)
    found = engine.find("cats")
    assert str(found.status()) == "pending, 1 restarts: PENDING"
    assert str(found.cost()) == "1.00 machine hours, $1.50 ($1.5 per machine and hour)"
    found.stop()
    assert state.read("calls") == "scancel 7\n"
    assert found.status().state == "stopped"
    assert found.follow(print) == 130


def test_a_refusal_has_slurms_words(state):
    with pytest.raises(RuntimeError, match="invalid partition specified: nowhere"):
        Slurm().submit(shell_job("true", options={"partition": "nowhere"}))


def test_follow_shows_the_output_to_its_end(state, monkeypatch):
    engine = Slurm()
    handle = engine.submit(shell_job("true"))
    state.write("out", "0: epoch 1\n1: epo")
    shown = []

    def show(line):
        shown.append(line)
        if "RUNNING" in line:
            state.write("out", "0: epoch 1\n1: epoch 1\nend")
            state.write("state", "COMPLETED")

    state.write("state", "RUNNING")
    monkeypatch.setattr("kdist.launch.engines.slurm._POLL_SECONDS", 0.01)
    assert handle.follow(show) == 0
    assert [line for line in shown if "kdist:" not in line] == ["0: epoch 1", "1: epoch 1", "end"]


def test_an_old_job_is_found_in_slurms_accounts(state):
    state.write("forgotten", "")
    found = Slurm().find("cats")
    assert found.status().state == "done"
    assert found.cost().usd == 72.0
