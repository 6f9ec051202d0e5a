"""Runs of scripts/keras_suite.py, on a few of Keras's tests."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.tiers import seldom

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "keras_suite.py"


def keras_suite(*flags):
    return subprocess.run(
        [sys.executable, PROGRAM, *flags], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("trainer", ["kdist", *seldom(["keras"])])
@pytest.mark.slow
def test_a_part_under_mirrored(trainer):
    """Keras's trainer fails in these tests under MirroredStrategy; kdist's does not."""
    tests = "test_nested_inputs or test_metric_update_in_compute_loss"
    process = keras_suite(
        f"--trainer={trainer}", "--strategy=mirrored", "--suite=trainers", f"--tests={tests}"
    )
    assert process.returncode == 0, process.stdout + process.stderr
    passed, chosen = map(
        int, re.search(rf"{trainer}, mirrored: (\d+) of (\d+) passed", process.stdout).groups()
    )
    assert chosen >= 2
    assert (passed == chosen) is (trainer == "kdist")


@pytest.mark.slow
def test_known_failures_are_listed_with_their_reason():
    test = "steps_per_execution_steps_per_epoch_match_multi_epoch_non_jit"
    process = keras_suite("--strategy=default", "--suite=trainers", f"--tests={test}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "kdist, default: 0 of 1 passed, 0 skipped" in process.stdout
    assert f"TestTrainer.test_{test}: expects epochs" in process.stdout


@pytest.mark.exhaustive
def test_a_part_of_other_suites_under_mirrored():
    """Includes tests that are known to fail, and models that are loaded and trained."""
    tests = "compile_preserved or BackupAndRestore or ReduceLROnPlateau or compiled_model_cloning"
    suites = [f"--suite={suite}" for suite in ("callbacks", "models", "saving")]
    process = keras_suite("--strategy=mirrored", *suites, f"--tests={tests}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "ReduceLROnPlateauTest.test_cooldown: builds its model in setUp" in process.stdout


@pytest.mark.exhaustive
def test_optimizers_have_no_run_with_a_strategy():
    process = keras_suite("--suite=optimizers", "--tests=SGDTest")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "kdist, default" in process.stdout
    assert "kdist, mirrored" not in process.stdout


@pytest.mark.slow
def test_empty_selection_is_an_error():
    process = keras_suite("--strategy=default", "--suite=trainers", "--tests=no_such_test")
    assert process.returncode == 1
    assert "no test matches --tests=no_such_test" in process.stderr
