"""Metrics of training windows."""

import pytest

from kdist.telemetry.steps.step_times import StepTimes
from kdist.telemetry.steps.trace import ProfileSummary
from kdist.training.groups.clock import Times


def times(steps=10, seconds=2.0, input_seconds=0.5, callback_seconds=0.1, step_seconds=None):
    return Times(steps, seconds, input_seconds, callback_seconds, step_seconds or {0.2: steps})


def test_rates_and_shares():
    figures = StepTimes(64, 4).window(times())
    assert figures["window_seconds"] == 2.0
    assert figures["window_steps"] == 10
    assert figures["examples_per_second"] == pytest.approx(320)
    assert figures["examples_per_second_per_replica"] == pytest.approx(80)
    shares = [figures[f"{part}_share"] for part in ("input", "callback", "step")]
    assert shares == pytest.approx([0.25, 0.05, 0.7])
    assert figures["model_flops_utilization"] is None


def test_the_time_of_telemetry_is_not_that_of_callbacks():
    book = StepTimes(64, 1)
    for own_seconds in (0.08, 0.12):  # the last one is counted before its call has ended
        figures = book.window(times(), own_seconds=own_seconds)
        parts = ("input", "callback", "telemetry", "step")
        assert sum(figures[f"{part}_share"] for part in parts) == pytest.approx(1)
    assert figures["callback_share"] == 0
    assert book.total()["telemetry_share"] == pytest.approx(0.05)


def test_percentiles_count_steps_not_calls():
    figures = StepTimes(64, 1).window(times(100, step_seconds={0.5: 1, 0.1: 95, 0.3: 4}))
    assert [figures[f"step_seconds_p{p}"] for p in (50, 90, 99)] == [0.1, 0.1, 0.3]


def test_windows_add_up():
    book = StepTimes(64, 1)
    book.window(times(10, 2.0, 0.5, 0.0, {0.2: 10}))
    book.window(times(30, 2.0, None, 0.4, {0.1: 30}))
    total = book.total()
    assert total["window_steps"] == 40
    assert total["examples_per_second"] == pytest.approx(640)
    assert total["input_share"] == pytest.approx(0.125)
    assert total["callback_share"] == pytest.approx(0.1)
    assert total["step_seconds_p50"] == 0.1
    assert total["step_seconds_p90"] == 0.2


def test_a_profile_splits_the_step_time():
    book = StepTimes(64, 2)
    figures = book.window(times(), ProfileSummary([0.1, 0.2], 0.3, 0.1, []))
    assert figures["compute_share"] == pytest.approx(0.7 * 0.75)
    assert figures["reduce_share"] == pytest.approx(0.7 * 0.25)
    assert figures["replica_busy_seconds"] == [0.1, 0.2]
    assert "compute_share" not in book.window(times())
    assert book.total()["reduce_share"] == pytest.approx(0.7 * 0.25)


def test_model_flops_utilization():
    figures = StepTimes(64, 2, flops_per_example=1e9, peak_flops=1e12).window(times())
    assert figures["model_flops_utilization"] == pytest.approx(320 * 1e9 / 1e12)


def test_unknown_values_are_none():
    figures = StepTimes(None, 2).window(times(input_seconds=None))
    assert figures["examples_per_second"] is None
    assert figures["input_share"] is None
    assert figures["step_share"] == pytest.approx(0.95)
    assert StepTimes(64, 2).total() == {}
