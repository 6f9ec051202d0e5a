"""scripts/keras_suite.py as a user runs it, on a few of Keras's tests."""

import pathlib
import re
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "keras_suite.py"


def keras_suite(*flags):
    return subprocess.run(
        [sys.executable, PROGRAM, *flags], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("trainer", ["kdist", "keras"])
@pytest.mark.slow
def test_a_part_under_mirrored(trainer):
    """Keras's trainer fails at these under MirroredStrategy; kdist's does not."""
    tests = "test_nested_inputs or test_metric_update_in_compute_loss"
    process = keras_suite(f"--trainer={trainer}", "--strategy=mirrored", f"--tests={tests}")
    assert process.returncode == 0, process.stdout + process.stderr
    passed, chosen = map(
        int, re.search(rf"{trainer}, mirrored: (\d+) of (\d+) passed", process.stdout).groups()
    )
    assert chosen >= 2
    assert (passed == chosen) is (trainer == "kdist")


@pytest.mark.slow
def test_what_is_known_to_fail_is_named_with_its_reason():
    test = "steps_per_execution_steps_per_epoch_match_multi_epoch_non_jit"
    process = keras_suite("--strategy=default", f"--tests={test}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "kdist, default: 0 of 1 passed, 0 skipped" in process.stdout
    assert f"test_{test}: wants Keras's epochs" in process.stdout


@pytest.mark.slow
def test_what_selects_nothing_is_an_error():
    process = keras_suite("--strategy=default", "--tests=no_such_test")
    assert process.returncode == 1
    assert "no test matches --tests=no_such_test" in process.stderr
