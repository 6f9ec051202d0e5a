"""Functions called in each task of a job."""

import os
import signal
import subprocess
import sys
import time

import pytest

import kdist
from kdist.launch import TaskFailed


def test_the_chiefs_result_is_returned(capsys):
    def place(word, factor):
        import os

        import kdist

        cluster = kdist.Cluster.resolve()
        print(word, cluster.name)
        return cluster.name, cluster.counts(), factor * 7, os.getpid()

    name, counts, product, pid = kdist.launch.local(place, workers=2, arguments=("this is", 6))
    assert (name, counts, product) == ("worker 0", "2 workers", 42)
    assert pid != os.getpid()
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == ["[worker 0] this is worker 0", "[worker 1] this is worker 1"]

    name, counts, *_ = kdist.launch.local(place, workers=1, ps=1, arguments=("", 0))
    assert (name, counts) == ("chief", "1 chief, 1 worker, 1 ps")


def test_quiet_hides_the_tasks_output(capsys, tmp_path):
    def function(fails):
        print("a line of a task")
        return 1 / (0 if fails else 1)

    assert kdist.launch.local(function, 2, arguments=(False,), quiet=True, log_dir=tmp_path) == 1
    assert capsys.readouterr() == ("", "")
    assert "a line of a task" in (tmp_path / "worker-1.log").read_text()
    with pytest.raises(TaskFailed, match="division by zero\n    a line of a task"):
        kdist.launch.local(function, workers=1, arguments=(True,), quiet=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "kdist launch: worker 0 failed" in err


def test_other_tasks_may_return_what_cannot_be_pickled():
    def function():
        import threading

        import kdist

        return 1 if kdist.Cluster.resolve().is_chief else threading.Lock()

    assert kdist.launch.local(function, workers=2) == 1


def test_a_result_that_cannot_be_pickled_is_an_error():
    def function():
        import threading

        return threading.Lock()

    with pytest.raises(TaskFailed, match="lock.* cannot be sent back"):
        kdist.launch.local(function, workers=1)


def test_a_function_of_the_program_itself(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import kdist
print("started")
factor = 5
def times(n):
    return factor * n
def closure(offset):
    return lambda n: times(n) + offset
if __name__ == "__main__":
    print("result", kdist.launch.local(closure(2), workers=2, arguments=(8,)))
"""
    )
    out = subprocess.check_output([sys.executable, script], text=True, timeout=60, cwd=tmp_path)
    assert out == "started\nresult 42\n"


def test_tasks_find_the_modules_of_this_process(tmp_path, monkeypatch):
    (tmp_path / "user_module.py").write_text("def answer(n):\n    return 6 * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    import user_module

    assert kdist.launch.local(user_module.answer, workers=1, arguments=(7,)) == 42


def test_an_exception_names_its_task(tmp_path):
    def function():
        import time

        import kdist

        if kdist.Cluster.resolve().name == "worker 1":
            print("I am about to fail")
            raise ArithmeticError("2 and 2 is 5")
        time.sleep(100)

    began = time.monotonic()
    with pytest.raises(TaskFailed) as caught:
        kdist.launch.local(function, workers=2, log_dir=tmp_path)
    assert time.monotonic() - began < 8
    assert (caught.value.task, caught.value.exit_code) == ("worker 1", 1)
    first, *last = str(caught.value).splitlines()
    assert first.startswith("worker 1 failed with exit code 1 after ")
    assert first.endswith(": ArithmeticError: 2 and 2 is 5")
    assert "    I am about to fail" in last
    assert "I am about to fail" in (tmp_path / "worker-1.log").read_text()


def test_a_process_that_dies_is_named():
    def function():
        import os

        os.kill(os.getpid(), 11)

    with pytest.raises(TaskFailed, match="^worker 0 was ended by SIGSEGV") as caught:
        kdist.launch.local(function, workers=1)
    assert caught.value.exit_code == 139


def test_a_job_that_exceeds_its_time_limit():
    def function():
        import time

        print("waiting")
        time.sleep(100)

    with pytest.raises(
        TimeoutError, match="timeout_seconds.*\n    worker 0: waiting\n    worker 1"
    ):
        kdist.launch.local(function, workers=2, timeout_seconds=1.5)


def test_a_job_needs_a_worker():
    with pytest.raises(ValueError, match="workers=0"):
        kdist.launch.local(print, workers=0)


def test_an_interrupt_ends_all_tasks(tmp_path, all_end):
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, pathlib, sys, time
import kdist
directory = sys.argv[1]
def function():
    name = kdist.Cluster.resolve().name
    pathlib.Path(directory, f"new {name}").write_text(str(os.getpid()))
    pathlib.Path(directory, f"new {name}").rename(pathlib.Path(directory, name))
    time.sleep(100)
try:
    kdist.launch.local(function, workers=2)
except KeyboardInterrupt:
    pass
try:
    print("interrupted")
    time.sleep(100)
except KeyboardInterrupt:
    print("as before")
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-u", script, tmp_path], stdout=subprocess.PIPE, text=True
    )
    try:
        paths = [tmp_path / "worker 0", tmp_path / "worker 1"]
        deadline = time.monotonic() + 20
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        while "interrupted" not in process.stdout.readline():
            assert process.poll() is None
        all_end([int(path.read_text()) for path in paths], 0)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[0] == "as before\n"
    finally:
        process.kill()
        process.wait()
