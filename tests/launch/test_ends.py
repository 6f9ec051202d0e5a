"""The end of a job: processes are killed, and searched for afterwards."""

import os
import signal
import sys
import time

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")

# A task with a child that ignores all signals, and another one in a session of its own.
WITH_CHILDREN = """
code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15, 1)]; "
code += "print('deaf', flush=True); time.sleep(100)"
for name, own_session in ("child", False), ("apart", True):
    child = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=own_session, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    note(f"{role}-{index}-{name}", child.pid)
"""
CHILDREN = ("worker-0-child", "worker-0-apart", "worker-1-child", "worker-1-apart")


def test_the_first_to_fail_ends_the_others_and_gives_the_exit_code(launcher, all_end):
    code, _, err, seconds = launcher.run(
        """
while len(list(here.glob("pid-*"))) < 3: time.sleep(0.01)
if index == 1:
    print(*(f"line {n}" for n in range(20)), sep="\\n")
    sys.exit(7)
time.sleep(100)
""",
        "--workers=3",
    )
    assert code == 7
    assert seconds < 5
    all_end(launcher.pids("worker-0", "worker-1", "worker-2"), 0)
    assert "worker 1 failed with exit code 7 after " in err
    assert "; ending worker 0, worker 2\n" in err
    end = err.splitlines()[-16:]
    assert "worker-1.log:" in end[0]
    assert end[1:] == [f"    line {n}" for n in range(5, 20)]


def test_a_task_that_is_killed_gives_128_and_the_signal(launcher):
    code, _, err, _ = launcher.run(
        "if index == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(100)", "--workers=2"
    )
    assert code == 128 + signal.SIGKILL
    assert "worker 0 was ended by SIGKILL (exit code 137)" in err


def test_a_task_may_finish_after_the_signal(launcher):
    code, out, _, _ = launcher.run(
        """
if index == 1:
    while not (here / "ready").exists(): time.sleep(0.01)
    sys.exit(4)
def end(*_):
    time.sleep(0.5); print("saved"); sys.exit(0)
signal.signal(signal.SIGTERM, end)
(here / "ready").touch()
time.sleep(100)
""",
        "--workers=2",
    )
    assert (code, out) == (4, "[worker 0] saved\n")


def test_a_task_that_ignores_the_signal_is_killed(launcher, all_end):
    code, _, _, seconds = launcher.run(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"ready-{index}").touch()
while not all((here / f"ready-{n}").exists() for n in range(2)): time.sleep(0.01)
if index == 1: sys.exit(4)
time.sleep(100)
""",
        "--workers=2",
        "--end_seconds=1",
    )
    assert code == 4
    assert 1 < seconds < 6
    all_end(launcher.pids("worker-0"), 0)


@LINUX
def test_children_of_tasks_end_with_the_job(launcher, all_end):
    code, _, err, _ = launcher.run(WITH_CHILDREN, "--workers=2", "--end_seconds=0.5")
    assert code == 0, err  # the tasks themselves have succeeded
    all_end(launcher.pids(*CHILDREN), 0)


def test_the_others_may_finish_after_the_chief(launcher):
    code, out, _, _ = launcher.run("if index == 1: time.sleep(1); print('finished')", "--workers=2")
    assert (code, out) == (0, "[worker 1] finished\n")


def test_the_others_are_ended_after_a_while(launcher, all_end):
    code, _, err, seconds = launcher.run(
        "if index == 1: time.sleep(100)", "--workers=2", "--wait_seconds=0.5"
    )
    assert code == 0
    assert seconds < 6
    all_end(launcher.pids("worker-1"), 0)
    assert "worker 1 still ran 0.5 s after worker 0 had ended" in err


def test_a_failure_after_the_chief_has_ended_counts(launcher):
    code, _, _, _ = launcher.run("if index == 1: time.sleep(0.5); sys.exit(9)", "--workers=2")
    assert code == 9


@pytest.mark.slow
def test_servers_are_ended_quietly_when_the_coordinator_has(launcher, all_end):
    code, out, err, seconds = launcher.run(
        """
if role == "chief":
    while not (here / "pid-worker-0").exists() or not (here / "pid-ps-0").exists():
        time.sleep(0.01)
    sys.exit(0)
if role == "worker":  # its coordinator has ended
    time.sleep(1)
    sys.exit(5)
time.sleep(100)
""",
        "--ps=1",
    )
    assert (code, out) == (0, "")
    assert seconds < 10
    all_end(launcher.pids("ps-0", "worker-0", "chief-0"), 0)
    assert "fail" not in err
    assert "still" not in err


def test_a_server_that_fails_before_is_a_failure(launcher):
    code, _, err, _ = launcher.run(
        "if role == 'ps': sys.exit(6)\ntime.sleep(100)", "--ps=1", "--end_seconds=1"
    )
    assert code == 6
    assert "ps 0 failed with exit code 6" in err


def test_a_job_that_exceeds_its_time_limit_is_ended(launcher, all_end):
    code, _, err, seconds = launcher.run("time.sleep(100)", "--workers=2", "--timeout_seconds=1")
    assert code == 124
    assert seconds < 6
    all_end(launcher.pids("worker-0", "worker-1"), 0)
    assert "the time limit of the job is over; ending worker 0, worker 1" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_launcher_end_the_tasks_in_order(launcher, number, all_end):
    process = launcher.start(
        """
def end(*_):
    print("saved"); sys.exit(0)
signal.signal(signal.SIGINT if (here / "interrupt").exists() else signal.SIGTERM, end)
note(f"ready-{index}", os.getpid())
time.sleep(100)
""".replace('(here / "interrupt").exists()', str(number == signal.SIGINT)),
        "--workers=2",
    )
    pids = launcher.pids("ready-0", "ready-1")
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    all_end(pids, 0)
    assert sorted(launcher.read("out").splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert f"{number.name}: ending worker 0, worker 1" in launcher.read("err")
    assert "Traceback" not in launcher.read("err")


def test_a_second_ctrl_c_kills_at_once(launcher, all_end):
    process = launcher.start(
        """
signal.signal(signal.SIGINT, lambda *_: note(f"heard-{index}", 0))
note(f"ready-{index}", os.getpid())
while True: time.sleep(100)
""",
        "--workers=2",
        "--end_seconds=60",
    )
    pids = launcher.pids("ready-0", "ready-1")
    process.send_signal(signal.SIGINT)
    launcher.pids("heard-0", "heard-1")
    began = time.monotonic()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert time.monotonic() - began < 3
    all_end(pids, 0)


@LINUX
def test_nothing_outlives_a_launcher_that_is_killed(launcher, all_end):
    process = launcher.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WITH_CHILDREN + "time.sleep(100)",
        "--workers=2",
    )
    pids = launcher.pids("worker-0", "worker-1", *CHILDREN)
    watchdogs = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(5)
    all_end([*pids, *watchdogs], 5)


@LINUX
def test_tasks_end_even_if_the_watchdog_is_killed_first(launcher, all_end):
    process = launcher.start("time.sleep(100)", "--workers=2")
    pids = launcher.pids("worker-0", "worker-1")
    for pid in set(_children(process.pid)) - set(pids):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(5)
    all_end(pids, 5)


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


FAILS = """
if index == 0:
    tries = len(list(here.glob("try-*")))
    (here / f"try-{tries}").touch()
    if tries in PROGRESS:
        (here / "run" / "checkpoints" / f"step-{tries:010d}").mkdir(parents=True)
    sys.exit(0 if tries == LAST else CODE)
"""


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("failure", "progress", "most", "last", "code", "tries"),
    [
        (5, (), 0, 3, 5, 1),
        (5, (), 2, 3, 5, 3),
        (5, (), 2, 2, 0, 3),
        (5, (0, 1, 2), 1, 3, 0, 4),  # counts only restarts without a new checkpoint
        (143, (), 1, 2, 0, 3),  # has saved, which is not counted
    ],
)
def test_a_job_that_failed_is_started_again(launcher, failure, progress, most, last, code, tries):
    text = FAILS.replace("PROGRESS", repr(progress)).replace("LAST", str(last))
    text = text.replace("CODE", str(failure))
    found, _, err, _ = launcher.run(text, "--workers=2", f"--max_restarts={most}")
    assert found == code, err
    assert len(list(launcher.directory.glob("try-*"))) == tries
    assert err.count("starting again from ") == tries - 1
    assert ("from the checkpoint of step 2 " in err) == bool(progress)
    assert ("restarts in a row produced no new checkpoint" in err) == (code != 0 and most > 0)
