"""Tasks that hang, that fall silent, and that come back: the launcher tells which one."""

import os
import signal
import time

import pytest

# A task that beats as `fit` does; `seconds` are those of its steps.
BEATING = """
sys.path.insert(0, {root!r})
from kdist import heartbeat
heartbeat.start()
def training(): pass
def steps(seconds, first=0, begins=False):
    for number, wait in enumerate(seconds):
        with heartbeat.step(training, first + number, 1, begins and number == 0):
            time.sleep(wait)
"""


@pytest.fixture
def beating(scripts):
    """The beginning of a task's code."""
    return BEATING.replace("{root!r}", repr(str(scripts.parent)))


def test_a_stopped_task_is_named_and_ended(launcher, beating, all_end):
    process = launcher.start(
        beating + "steps([0.1] * 5)\nnote(f'ready-{index}', os.getpid())\n"
        "steps([100] if index == 0 else [0.1] * 1000, 5)",
        "--workers=2",
        "--hang_seconds=7",
    )
    _, stopped = launcher.pids("ready-0", "ready-1")
    time.sleep(1.5)  # it has beaten
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert process.wait(30) != 0
    assert time.monotonic() - began < 20
    said = launcher.read("err")
    assert "worker 1 gives no sign of life since " in said
    assert "worker 1 hung: it gave no sign of life for " in said
    assert "ending worker 0 (in step 6 for " in said
    all_end(launcher.pids("worker-0", "worker-1"), 0)


def test_a_task_that_is_waited_for_is_named_and_shows_where_it_is(launcher, beating):
    code, out, err, seconds = launcher.run(
        beating
        + """
def a_callback_of_the_user(): time.sleep(100)
steps([0.1] * 5)
if index == 1: a_callback_of_the_user()
steps([100], 5)
""",
        "--workers=2",
        "--hang_seconds=2",
    )
    assert code == 128 + signal.SIGABRT
    assert seconds < 20
    assert "worker 1 hung: it was between steps, after step 5 for " in err
    assert ", and worker 0 waited for it (more time: hang_seconds)" in err
    assert "a_callback_of_the_user" in out


def test_a_slow_step_is_reported_before_it_is_judged(launcher, beating):
    code, out, err, _ = launcher.run(
        beating + "steps([0.2] * 5)\nsteps([100], 5)", "--workers=1", "--hang_seconds=8"
    )
    assert code == 128 + signal.SIGABRT
    assert "[worker 0] kdist: in step 6 for " in out
    assert " s by now; the usual is 0.2 s" in out
    assert "worker 0 hung: it was in step 6 for 8 s, usually 0.2 s" in err


@pytest.mark.slow
def test_a_task_that_has_not_begun_is_named_not_those_that_wait_for_it(launcher, beating):
    code, _, err, _ = launcher.run(
        "if index == 1: time.sleep(100)\n" + beating + "steps([100])",
        "--workers=2",
        "--hang_seconds=2",
    )
    assert code == 128 + signal.SIGABRT
    assert "worker 1 hung: it had not begun to train, and worker 0 waited for it" in err


def test_what_all_do_together_outside_of_steps_is_no_idling(launcher, beating):
    code, _, err, _ = launcher.run(
        beating
        + """
steps([0.1] * 5)
if index == 0:
    with heartbeat.meeting("averaging replicas"): time.sleep(100)
steps([100], 5)
""",
        "--workers=2",
        "--hang_seconds=3",
    )
    assert code == 128 + signal.SIGABRT
    assert "worker 1 hung: it was in step 6 for 3 s, usually 0.1 s" in err


@pytest.mark.slow
def test_what_usually_takes_long_and_first_steps_have_their_time(launcher, beating):
    code, _, err, _ = launcher.run(
        beating + "steps([1.0] * 5)\nsteps([4], 5)\nsteps([5], 0, begins=True)",
        "--workers=1",
        "--hang_seconds=2",
    )
    assert code == 0, err


@pytest.mark.slow
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
    said = launcher.read("err")
    assert "worker 0 gives no sign of life since " in said
    assert "worker 0 is back: " in said


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


def test_a_worker_of_parameter_servers_is_started_again_alone(launcher, beating):
    code, _, err, _ = launcher.run(beating + SERVING, "--workers=1", "--ps=1", "--max_restarts=1")
    assert code == 0, err
    assert "worker 0 was ended by SIGKILL" in err
    assert "starting worker 0 again; restart 1 of 1 since there was a new checkpoint" in err


def test_but_not_without_being_asked_to(launcher, beating):
    code, _, err, _ = launcher.run(beating + SERVING, "--workers=1", "--ps=1")
    assert code == 128 + signal.SIGKILL
    assert "again" not in err


def test_a_variable_that_is_inherited_without_its_pipe_is_no_pipe(tmp_path, monkeypatch):
    from kdist import heartbeat

    with open(tmp_path / "other", "w") as other:
        monkeypatch.setenv(heartbeat.PIPE, f"{other.fileno()}:1")
        heart = heartbeat.Heartbeat()
        heart.start()
        time.sleep(0.1)
    assert (tmp_path / "other").read_text() == ""
