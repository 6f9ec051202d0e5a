"""`kdist tune` on real trainings, and trials that take too much memory."""

import re
import subprocess
import sys

import pytest

from kdist.commands import tune
from tests.scripts.test_train import program

ALLOCATE = "x = bytearray({}); import time; time.sleep(60)"


@pytest.mark.parametrize(("size", "is_ended"), [(400_000_000, True), (10_000_000, False)])
def test_a_trial_above_the_limit_is_ended(size, is_ended, monkeypatch):
    monkeypatch.setattr(tune, "_TRIAL_SECONDS", 5)
    child = subprocess.Popen([sys.executable, "-c", ALLOCATE.format(size)])
    try:
        peak, reason = tune._watch(child, 200e6)
    finally:
        child.kill()
        child.wait()
    assert (peak > 200e6) == is_ended
    assert ("more memory" in reason) == is_ended
    assert ("seconds were enough" in reason) != is_ended


@pytest.mark.parametrize(
    ("code", "error", "is_out_of_memory"),
    [
        (-9, "", True),
        (1, "ResourceExhaustedError: OOM when allocating tensor", True),
        (1, "ValueError: unknown model", False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(code, error, is_out_of_memory):
    assert tune._is_out_of_memory(code, error) == is_out_of_memory


@pytest.mark.slow
def test_tune_tries_batches_and_prints_a_command_that_trains(tmp_path):
    flags = ["--model=lenet", "--dataset=digits", "--num_devices=2"]
    tuned = program("tune", *flags, "--local_batch_size=32", "--max_batch=128")
    assert tuned.returncode == 0, tuned.stderr
    rows = [
        list(map(int, row)) for row in re.findall(r"^ +(\d+) +(\d+) +[\d.]+ ms", tuned.stdout, re.M)
    ]
    assert rows == [[32, 64], [128, 256]]
    assert "largest that was tried and fits: a local batch of 128, and memory" in tuned.stdout
    command = tuned.stdout.strip().splitlines()[-1]
    found = re.search(r"kdist train (.*--local_batch_size=(\d+) .*--base_batch_size=64)", command)
    assert 1 <= int(found[2]) <= 128
    trained = program("train", *found[1].split(), f"--run_dir={tmp_path / 'run'}")
    assert trained.returncode == 0, trained.stderr
