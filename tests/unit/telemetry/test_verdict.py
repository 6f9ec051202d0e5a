"""Diagnosis of what slows a training down."""

import re

import pytest

from kdist.telemetry.steps import verdict as verdicts

LONG = {"window_steps": 500, "window_seconds": 60.0}


def verdict(timing, *arguments, **options):
    """Returns the verdict of a training that is long enough."""
    return verdicts.verdict({**LONG, **timing}, *arguments, **options)


def gpu(index, host="a", **measured):
    return {"host": host, "device": f"gpu/{index}", **measured}


def test_no_findings():
    even = [gpu(n, utilization=0.95, sm_clock_mhz=1410) for n in range(4)]
    timing = {
        "input_share": 0.02,
        "callback_share": 0.01,
        "reduce_share": 0.1,
        "examples_per_second": 100.0,
        "replica_busy_seconds": [0.1, 0.102],
        "bubble_share": 0.1,
    }
    assert verdict(timing, even) == []
    assert verdict({}) == []


def test_waiting_for_input_names_both_rates():
    (text,) = verdict({"input_share": 0.8, "examples_per_second": 410.0})
    assert text.startswith("input-bound: the pipeline delivers 410 examples/s, ")
    assert "the devices could train on 2,050 " in text
    assert "80% of a step" in text
    assert "2 data workers to 60% and 5 data workers to 0% of waiting" in text
    assert "kdist launch --data_workers=5" in text


@pytest.mark.parametrize(
    ("share", "workers", "predicted"), [(0.5, 1, 0.5), (0.5, 2, 0.0), (0.8, 2, 0.6), (0.8, 9, 0.0)]
)
def test_data_workers_divide_the_time_of_the_input(share, workers, predicted):
    assert verdicts.predicted_input_share(share, workers) == pytest.approx(predicted)


def test_gradients_and_callbacks():
    reduction, callbacks = verdict({"reduce_share": 0.41, "callback_share": 0.15})
    assert "all-reduce is 41% of a step" in reduction
    assert "callbacks take 15%" in callbacks


def test_the_bubble_of_a_split_model():
    (text,) = verdict({"bubble_share": 0.4})
    assert "wait 40% of the time for each other" in text


def test_a_slow_replica_is_named():
    (text,) = verdict({"replica_busy_seconds": [0.078, 0.078, 0.1, 0.078]})
    assert text.startswith("replica 2 runs 22% behind the others")
    assert "busy 100.0 ms per step, the others 78.0 ms" in text


def test_a_gpu_with_a_lower_clock_is_named():
    gpus = [gpu(n, utilization=0.9, sm_clock_mhz=1410) for n in range(3)]
    gpus.append(gpu(3, utilization=0.9, sm_clock_mhz=1100, temperature_celsius=88.0))
    (text,) = verdict({}, gpus)
    assert text.startswith("GPU 3 runs 22% behind the others: its clock is 1,100 MHz")
    assert "88 °C" in text


def test_a_gpu_with_less_to_do_is_named_with_its_host():
    gpus = [gpu(n, host, utilization=0.9) for host in "ab" for n in range(2)]
    gpus[3]["utilization"] = 0.5
    (text,) = verdict({}, gpus)
    assert text.startswith("GPU 1 of b is busy 50% of the time, the others 90%")


def test_idle_gpus_are_not_reported_if_input_is_slow():
    gpus = [gpu(n, utilization=0.3) for n in range(2)]
    (text,) = verdict({"input_share": 0.05}, gpus)
    assert re.match(r"the GPUs are busy 30% of the time", text)
    (text,) = verdict({"input_share": 0.7, "examples_per_second": 10.0}, gpus)
    assert text.startswith("input-bound")


def test_missing_counters_are_not_zero():
    assert verdict({}, [gpu(0), gpu(1, utilization=None), gpu(2, utilization=0.9)]) == []


SLOW = {
    "input_share": 0.5,
    "examples_per_second": 100.0,
    "callback_share": 0.4,
    "reduce_share": 0.4,
    "bubble_share": 0.4,
    "replica_busy_seconds": [0.1, 0.2],
}


def test_a_short_training_has_no_verdict():
    assert len(verdict(SLOW)) == 5
    for short in ({"window_steps": 19}, {"window_seconds": 4.9}, {"window_steps": None}):
        assert verdict({**SLOW, **short}) == []


def test_devices_that_share_cores_are_not_compared():
    input_bound, callbacks = verdict(SLOW, shares_cores=True)
    assert input_bound.startswith("input-bound")
    assert callbacks.startswith("callbacks")
