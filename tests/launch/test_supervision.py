"""Tasks that hang, become silent, or come back, as the launcher reports them."""

import os
import re
import signal
import time

import pytest

# A task that sends heartbeats as `fit` does; `seconds` are those of its steps.
BEATING = """
sys.path.insert(0, {root!r})
from kdist.cluster import heartbeat
heartbeat.start()
def training(): pass
def steps(seconds, first=0, begins=False):
    for number, wait in enumerate(seconds):
        with heartbeat.step(training, first + number, 1, begins and number == 0) as note_steps:
            time.sleep(wait)
            note_steps(1)
"""


@pytest.fixture
def beating(scripts):
    """Returns the beginning of a task's code."""
    return BEATING.replace("{root!r}", repr(str(scripts.parent)))


@pytest.mark.slow
def test_a_stopped_task_is_named_and_ended(launcher, beating, all_end):
    process = launcher.start(
        beating + "steps([0.1] * 5)\nnote(f'ready-{index}', os.getpid())\n"
        "steps([100] if index == 0 else [0.1] * 1000, 5)",
        "--workers=2",
        "--hang_seconds=7",
    )
    _, stopped = launcher.pids("ready-0", "ready-1")
    time.sleep(1.5)  # it has sent heartbeats
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert process.wait(30) != 0
    assert time.monotonic() - began < 20
    err = launcher.read("err")
    assert "worker 1 has sent no heartbeat for " in err
    assert "worker 1 hung: it sent no heartbeat for " in err
    assert "ending worker 0 (in step 6 for " in err
    all_end(launcher.pids("worker-0", "worker-1"), 0)


@pytest.mark.slow
def test_a_task_that_others_wait_for_is_named_and_dumps_its_stack(launcher, beating):
    code, out, err, seconds = launcher.run(
        beating
        + """
def user_callback(): time.sleep(100)
steps([0.1] * 5)
if index == 1: user_callback()
steps([100], 5)
""",
        "--workers=2",
        "--hang_seconds=2",
    )
    assert code == 128 + signal.SIGABRT
    assert seconds < 20
    assert "worker 1 hung: it was between steps, after step 5 for " in err
    assert ", and worker 0 waited for it (more time: hang_seconds)" in err
    assert "user_callback" in out


@pytest.mark.slow
def test_a_slow_step_is_logged_before_it_counts_as_hung(launcher, beating):
    code, out, err, _ = launcher.run(
        beating + "steps([0.2] * 5)\nsteps([100], 5)", "--workers=1", "--hang_seconds=8"
    )
    assert code == 128 + signal.SIGABRT
    assert "[worker 0] kdist: in step 6 for " in out
    assert re.search(r" s so far; it usually takes 0\.\d+ s", out)
    assert re.search(r"worker 0 hung: it was in step 6 for \d+ s, usually 0\.\d+ s", err)


@pytest.mark.exhaustive
def test_a_task_that_has_not_begun_is_named(launcher, beating):
    code, _, err, _ = launcher.run(
        "if index == 1: time.sleep(100)\n" + beating + "steps([100])",
        "--workers=2",
        "--hang_seconds=2",
    )
    assert code == 128 + signal.SIGABRT
    assert "worker 1 hung: it had not begun to train, and worker 0 waited for it" in err


@pytest.mark.slow
def test_a_collective_outside_of_steps_is_not_idle_time(launcher, beating):
    code, _, err, _ = launcher.run(
        beating
        + """
steps([0.1] * 5)
if index == 0:
    with heartbeat.collective("averaging replicas"): time.sleep(100)
steps([100], 5)
""",
        "--workers=2",
        "--hang_seconds=3",
    )
    assert code == 128 + signal.SIGABRT
    assert re.search(r"worker 1 hung: it was in step 6 for \d+ s, usually 0\.1", err)


@pytest.mark.slow
def test_long_steps_and_first_steps_have_longer_limits(launcher, beating):
    code, _, err, _ = launcher.run(
        beating + "steps([1.0] * 5)\nsteps([4], 5)\nsteps([5], 0, begins=True)",
        "--workers=1",
        "--hang_seconds=2",
    )
    assert code == 0, err


@pytest.mark.exhaustive
def test_a_task_that_comes_back_is_not_ended(launcher, beating):
    process = launcher.start(
        beating + "steps([0.1] * 5)\nnote('ready', os.getpid())\nsteps([0.1] * 100, 5)",
        "--workers=1",
        "--hang_seconds=30",
    )
    (stopped,) = launcher.pids("ready")
    time.sleep(1.5)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(7)
    os.kill(stopped, signal.SIGCONT)
    assert process.wait(30) == 0
    err = launcher.read("err")
    assert "worker 0 has sent no heartbeat for " in err
    assert "worker 0 is back: " in err


SERVING = """
if role == "chief":
    while not (here / "pid-again").exists(): time.sleep(0.01)
elif role == "worker" and not (here / "died").exists():
    (here / "died").touch()
    heartbeat.start()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    if role == "worker": note("again", os.getpid())
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_worker_of_parameter_servers_is_started_again_alone(launcher, beating):
    code, _, err, _ = launcher.run(beating + SERVING, "--workers=1", "--ps=1", "--max_restarts=1")
    assert code == 0, err
    assert "worker 0 was ended by SIGKILL" in err
    assert "starting worker 0 again; restart 1 of 1 since the last new checkpoint" in err


def test_a_worker_is_not_restarted_by_default(launcher, beating):
    code, _, err, _ = launcher.run(beating + SERVING, "--workers=1", "--ps=1")
    assert code == 128 + signal.SIGKILL
    assert "again" not in err


def test_an_inherited_variable_without_its_pipe_is_ignored(tmp_path, monkeypatch):
    from kdist.cluster import heartbeat

    with open(tmp_path / "other", "w") as other:
        monkeypatch.setenv(heartbeat.PIPE_VARIABLE, f"{other.fileno()}:1")
        heart = heartbeat.Heartbeat()
        heart.start()
        time.sleep(0.1)
    assert (tmp_path / "other").read_text() == ""
