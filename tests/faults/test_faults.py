"""Faults in a job of several processes: the task that is named, and the end of the run."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults import training_program
from tests.faults.jobs import RESTARTED, Run, check_equal
from tests.tiers import seldom

pytestmark = pytest.mark.slow


def test_a_stopped_worker_that_comes_back(start, undisturbed, record):
    run = start("multi_worker")
    run.wait_for_checkpoint(10)
    run.signal("worker 1", signal.SIGSTOP)
    detected_after = run.wait_for_message("worker 1 has sent no heartbeat for ")
    time.sleep(2)
    run.signal("worker 1", signal.SIGCONT)
    run.wait_for_message("worker 1 is back")
    run.wait_for_success()
    check_equal(run, undisturbed("multi_worker"))
    assert run.attempts() == 1
    record(
        "SIGSTOP, SIGCONT after 8 s",
        "multi_worker",
        "logged, and waited for",
        detected_after,
        0,
        "yes",
    )


def test_a_stopped_worker_that_does_not_come_back(start, undisturbed, record):
    run = start("multi_worker", "--max_restarts=1", "--hang_seconds=10")
    run.wait_for_checkpoint(10)
    run.signal("worker 1", signal.SIGSTOP)
    detected_after = run.wait_for_message("worker 1 hung: it sent no heartbeat for ")
    run.wait_for_success()
    check_equal(run, undisturbed("multi_worker"))
    record(
        "SIGSTOP for good, --hang_seconds=10",
        "multi_worker",
        RESTARTED,
        detected_after,
        run.num_lost_examples(),
        "yes",
    )


def test_a_callback_that_hangs_on_one_worker(start, undisturbed, record):
    run = start("multi_worker", "--max_restarts=1", "--hang_seconds=8", fault="sleep:1:12")
    run.wait_until(lambda: (run.directory / "fault-done").exists())
    detected_after = run.wait_for_message("worker 1 hung: it was between steps, after step ")
    run.wait_for_message(", and worker 0 waited for it")
    run.wait_for_message("in _sleep")  # its stack
    run.wait_for_success()
    check_equal(run, undisturbed("multi_worker"))
    record(
        "a callback sleeps forever on one worker, --hang_seconds=8",
        "multi_worker",
        RESTARTED + "; its log shows the Python stack",
        detected_after,
        run.num_lost_examples(),
        "yes",
    )


def test_a_callback_that_raises_on_one_worker(start, undisturbed, record):
    run = start("multi_worker", "--max_restarts=1", fault="raise:1:12")
    run.wait_until(lambda: (run.directory / "fault-done").exists())
    detected_after = run.wait_for_message("worker 1 failed with exit code 1")
    run.wait_for_success()
    assert "RuntimeError: a mistake of the user's" in run.output()
    check_equal(run, undisturbed("multi_worker"))
    record(
        "an exception on one worker",
        "multi_worker",
        RESTARTED,
        detected_after,
        run.num_lost_examples(),
        "yes",
    )


@pytest.mark.parametrize("kind", ["multi_worker", *seldom(["one_device"])])
def test_a_weight_that_is_nan(kind, start, undisturbed, record):
    """No checkpoint is saved after it, so that a restart resumes from an earlier one."""
    run = start(kind, "--max_restarts=1", fault="nan:0:12")
    run.wait_until(lambda: (run.directory / "fault-done").exists())
    detected_after = run.wait_for_message("NonFiniteLossError")
    run.wait_for_success()
    check_equal(run, undisturbed(kind))
    record("the loss becomes NaN", kind, RESTARTED, detected_after, run.num_lost_examples(), "yes")


def test_a_truncated_checkpoint_is_skipped(start, undisturbed, record):
    run = start("one_device")
    run.wait_for_checkpoint(20)
    run.signal("worker 0")
    run.wait_for_failure()
    newest = run.newest_step()
    tensors = next((run.checkpoints / f"step-{newest:010d}").glob("tensors.data*"))
    os.truncate(tensors, tensors.stat().st_size // 2)
    run.start().wait_for_success()
    assert "is damaged: the checksum of tensors.data" in run.output()
    assert f"resumed after step {newest} " not in run.output()
    check_equal(run, undisturbed("one_device"))
    record(
        "the newest checkpoint is truncated",
        "one_device",
        "logged; the previous one is used",
        0,
        run.num_lost_examples(),
        "yes",
    )


@pytest.mark.exhaustive
def test_a_second_run_in_the_same_directory(start, undisturbed, record):
    run = start("one_device")
    run.wait_for_checkpoint(5)
    process = run.process
    process.send_signal(signal.SIGSTOP)  # otherwise it would end before the second begins
    second = Run(run.directory, "one_device")
    second.result = run.directory / "second.json"
    second.start()
    try:
        assert second.process.wait(60) != 0
        assert "another run writes its checkpoints" in second.output()
    finally:
        second.stop()
        process.send_signal(signal.SIGCONT)
    run.wait_for_success()
    assert run.result.read_text() == undisturbed("one_device").result.read_text()
    assert not second.result.exists()
    record("two runs in one directory", "one_device", "the second one is rejected", 0, 0, "yes")


@pytest.fixture
def small_disk(tmp_path):
    """Returns a mounted disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_in_the_middle_of_checkpoints(small_disk, start, undisturbed, record):
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
    detected_after = run.wait_for_message("cannot write checkpoint")
    filler.unlink()
    run.wait_for_success()
    assert run.newest_step() == 60
    check_equal(run, undisturbed("one_device"))
    record(
        "the disk is full for a while",
        "one_device",
        "logged; the next one is tried",
        detected_after,
        0,
        "yes",
    )


MEMORY_BYTES = 1500 << 20


@pytest.fixture
def memory_group():
    """Returns a control group with a limit of `MEMORY_BYTES`."""
    group = pathlib.Path("/sys/fs/cgroup/memory", f"kdist-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    except OSError:
        pytest.skip("a memory limit needs root and the memory controller, version 1")
    yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


def test_an_out_of_memory_kill(memory_group, start, undisturbed, record):
    join = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh"]
    run = start("one_device", "--max_restarts=1", prefix=join)
    run.wait_for_checkpoint(10)
    pid = run.tasks()["worker 0"]
    pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    statistics = dict(line.split() for line in (memory_group / "memory.stat").open())
    missing = MEMORY_BYTES - int(statistics["total_rss"]) + (100 << 20)
    hog = subprocess.Popen([*join, sys.executable, "-c", f"b'x' * {missing}"])
    detected_after = run.wait_for_message("worker 0 was ended by SIGKILL")
    hog.wait(30)
    run.wait_for_success()
    check_equal(run, undisturbed("one_device"))
    record(
        "the kernel kills a task that is out of memory",
        "one_device",
        RESTARTED,
        detected_after,
        run.num_lost_examples(),
        "yes",
    )


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Writes the digits as PNG files, for runs to train on."""
    import keras
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = "train" if number < training_program.EXAMPLES else "test"
        folder = tmp_path / "images" / part / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        rgb = (15 * image[..., None]).repeat(3, axis=-1)
        keras.utils.save_img(folder / f"{number:04d}.png", rgb, scale=False)
    monkeypatch.setenv("KDIST_DATA", str(tmp_path / "images"))
    return tmp_path / "images"


@pytest.mark.exhaustive
def test_a_data_file_that_vanishes(images, start, record):
    expected = start("one_device").wait_for_success()
    run = start("one_device")
    run.wait_for_checkpoint(10)
    file = min((images / "train" / "3").iterdir())
    kept = file.rename(images / "kept")
    detected_after = run.wait_until(
        lambda: run.process.poll() is not None or file.name in run.output()
    )
    run.wait_for_failure()
    assert str(file) in run.output()
    kept.rename(file)
    assert run.start().wait_for_success() == expected
    outcome = "the file is named, the run ends; restarted, it resumes"
    record(
        "a data file vanishes",
        "one_device",
        outcome,
        detected_after,
        run.num_lost_examples(),
        "yes",
    )


@pytest.mark.exhaustive
def test_a_clock_that_jumps(start, undisturbed, record):
    """The clock of one worker jumps by a day, which must have no effect."""
    run = start("multi_worker", fault="jump:1:12")
    run.wait_for_success()
    assert (run.directory / "fault-done").exists()
    check_equal(run, undisturbed("multi_worker"))
    assert run.attempts() == 1
    record("one worker's clock jumps by a day", "multi_worker", "nothing", None, 0, "yes")
