import pytest

from kdist.training.groups.step_groups import GroupTuner


def tuned(call_seconds):
    """Returns the tuner after all its calls, given the seconds of a call by its length."""
    tuner = GroupTuner()
    for _ in range(100):
        tuner.note(tuner.length, call_seconds(tuner.length))
        if tuner.is_done:
            return tuner
    raise AssertionError("it never made up its mind")


@pytest.mark.parametrize(
    ("overhead", "work", "expected"),
    [(0.001, 0.0001, 128), (0.0, 0.01, 1), (0.001, 0.004, 4), (0.0, 3.0, 1)],
)
def test_finds_the_best_length(overhead, work, expected):
    assert tuned(lambda length: overhead + length * work).length == expected


def test_a_call_stays_short():
    tuner = tuned(lambda length: 0.2 + 0.02 * length)
    assert tuner.length * tuner.step_seconds[tuner.length] <= 0.5


def test_calls_that_compile_or_end_an_epoch_do_not_count():
    tuner = GroupTuner()
    for seconds in (60.0, 0.002, 0.002, 0.002):
        tuner.note(1, seconds)
    tuner.note(1, 99.0)  # two are wanted now
    assert tuner.length == 2
    assert tuner.step_seconds == {1: 0.002}


def test_describes_its_result():
    assert str(tuned(lambda length: 0.01 * length)).startswith(
        "steps_per_execution=1 (milliseconds per step, by steps per call: 1: 10.00, 2: 10.00)"
    )
