"""What goes wrong in a job of several processes: who is named, and how the run ends."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults import trained
from tests.faults.jobs import RESTARTED, Run, check_equal

pytestmark = pytest.mark.slow


def test_a_stopped_worker_that_comes_back(start, whole, row):
    run = start("multi_worker")
    run.wait_for_checkpoint(10)
    run.signal("worker 1", signal.SIGSTOP)
    noticed = run.wait_to_be_told("worker 1 gives no sign of life since ")
    time.sleep(2)
    run.signal("worker 1", signal.SIGCONT)
    run.wait_to_be_told("worker 1 is back")
    run.ends()
    check_equal(run, whole("multi_worker"))
    assert run.attempts() == 1
    row("SIGSTOP, SIGCONT after 8 s", "multi_worker", "said, and waited for", noticed, 0, "yes")


def test_a_stopped_worker_that_does_not(start, whole, row):
    run = start("multi_worker", "--max_restarts=1", "--hang_seconds=10")
    run.wait_for_checkpoint(10)
    run.signal("worker 1", signal.SIGSTOP)
    noticed = run.wait_to_be_told("worker 1 hung: it gave no sign of life for ")
    run.ends()
    check_equal(run, whole("multi_worker"))
    row(
        "SIGSTOP for good, --hang_seconds=10", "multi_worker", RESTARTED, noticed, run.lost(), "yes"
    )


def test_a_callback_that_hangs_on_one_worker(start, whole, row):
    run = start("multi_worker", "--max_restarts=1", "--hang_seconds=8", fault="sleep:1:12")
    run.wait_until(lambda: (run.directory / "fault-done").exists())
    noticed = run.wait_to_be_told("worker 1 hung: it was between steps, after step ")
    run.wait_to_be_told(", and worker 0 waited for it")
    run.wait_to_be_told("in _sleep")  # where it was
    run.ends()
    check_equal(run, whole("multi_worker"))
    row(
        "a callback sleeps for ever on one worker, --hang_seconds=8",
        "multi_worker",
        RESTARTED + "; its log shows the line of Python",
        noticed,
        run.lost(),
        "yes",
    )


def test_a_callback_that_raises_on_one_worker(start, whole, row):
    run = start("multi_worker", "--max_restarts=1", fault="raise:1:12")
    run.wait_until(lambda: (run.directory / "fault-done").exists())
    noticed = run.wait_to_be_told("worker 1 failed with exit code 1")
    run.ends()
    assert "RuntimeError: a mistake of the user's" in run.said(None)
    check_equal(run, whole("multi_worker"))
    row("an exception on one worker", "multi_worker", RESTARTED, noticed, run.lost(), "yes")


@pytest.mark.parametrize("kind", ["one_device", "multi_worker"])
def test_a_weight_that_is_nan(kind, start, whole, row):
    """Nothing is saved after it, so that a restart goes on from before."""
    run = start(kind, "--max_restarts=1", fault="nan:0:12")
    run.wait_until(lambda: (run.directory / "fault-done").exists())
    noticed = run.wait_to_be_told("NonFiniteLossError")
    run.ends()
    check_equal(run, whole(kind))
    row("the loss becomes NaN", kind, RESTARTED, noticed, run.lost(), "yes")


def test_a_torn_checkpoint_is_passed_over(start, whole, row):
    run = start("one_device")
    run.wait_for_checkpoint(20)
    run.signal("worker 0")
    run.fails()
    newest = run.newest()
    tensors = next((run.checkpoints / f"step-{newest:010d}").glob("tensors.data*"))
    os.truncate(tensors, tensors.stat().st_size // 2)
    run.start().ends()
    assert "is torn: tensors.data" in run.said(None)
    assert f"going on after step {newest}," not in run.said(None)
    check_equal(run, whole("one_device"))
    row(
        "the newest checkpoint is truncated",
        "one_device",
        "said; the one before",
        0,
        run.lost(),
        "yes",
    )


def test_a_second_run_in_the_same_directory(start, whole, row):
    run = start("one_device")
    run.wait_for_checkpoint(5)
    process = run.process
    process.send_signal(signal.SIGSTOP)  # it would be through before the second begins
    second = Run(run.directory, "one_device")
    second.output = run.directory / "second.json"
    second.start()
    try:
        assert second.process.wait(60) != 0
        assert "another run writes its checkpoints into " in second.said()
    finally:
        second.stop()
        process.send_signal(signal.SIGCONT)
    run.ends()
    assert run.output.read_text() == whole("one_device").output.read_text()
    assert not second.output.exists()
    row("two runs in one directory", "one_device", "the second is refused", 0, 0, "yes")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root's rights")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_in_the_middle_of_checkpoints(small_disk, start, whole, row):
    run = start("one_device")
    run.stop()
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(small_disk)
    run.start()
    run.wait_for_checkpoint(10)
    filler = small_disk / "filler"
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], check=False, capture_output=True
    )
    noticed = run.wait_to_be_told("cannot be written to")
    filler.unlink()
    run.ends()
    assert run.newest() == 60
    check_equal(run, whole("one_device"))
    row(
        "the disk is full for a while",
        "one_device",
        "said; the next one is tried",
        noticed,
        0,
        "yes",
    )


MEMORY_BYTES = 1500 << 20


@pytest.fixture
def memory_group():
    """A group of processes that may use `MEMORY_BYTES` together."""
    group = pathlib.Path("/sys/fs/cgroup/memory", f"kdist-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    except OSError:
        pytest.skip("a limit on memory takes root's rights and the memory controller, version 1")
    yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


def test_an_out_of_memory_kill(memory_group, start, whole, row):
    join = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh"]
    run = start("one_device", "--max_restarts=1", around=join)
    run.wait_for_checkpoint(10)
    pid = run.tasks()["worker 0"]
    pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    statistics = dict(line.split() for line in (memory_group / "memory.stat").open())
    missing = MEMORY_BYTES - int(statistics["total_rss"]) + (100 << 20)
    hog = subprocess.Popen([*join, sys.executable, "-c", f"b'x' * {missing}"])
    noticed = run.wait_to_be_told("worker 0 was ended by SIGKILL")
    hog.wait(30)
    run.ends()
    check_equal(run, whole("one_device"))
    row("the kernel kills for want of memory", "one_device", RESTARTED, noticed, run.lost(), "yes")


@pytest.fixture
def images(tmp_path, monkeypatch):
    """The digits as a directory of PNG files, which runs then train on."""
    import keras
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = "train" if number < trained.EXAMPLES else "test"
        folder = tmp_path / "images" / part / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        in_colours = (15 * image[..., None]).repeat(3, axis=-1)
        keras.utils.save_img(folder / f"{number:04d}.png", in_colours, scale=False)
    monkeypatch.setenv("KDIST_DATA", str(tmp_path / "images"))
    return tmp_path / "images"


def test_a_data_file_that_vanishes(images, start, row):
    expected = start("one_device").ends()
    run = start("one_device")
    run.wait_for_checkpoint(10)
    file = min((images / "train" / "3").iterdir())
    kept = file.rename(images / "kept")
    noticed = run.wait_until(lambda: run.process.poll() is not None or file.name in run.said())
    run.fails()
    assert str(file) in run.said()
    kept.rename(file)
    assert run.start().ends() == expected
    happens = "the file is named, the run ends; started again it goes on"
    row("a data file vanishes", "one_device", happens, noticed, run.lost(), "yes")


def test_a_clock_that_jumps(start, whole, row):
    """By a day, on one worker: nothing here goes by the time of day."""
    run = start("multi_worker", fault="jump:1:12")
    run.ends()
    assert (run.directory / "fault-done").exists()
    check_equal(run, whole("multi_worker"))
    assert run.attempts() == 1
    row("one worker's clock jumps by a day", "multi_worker", "nothing", None, 0, "yes")
