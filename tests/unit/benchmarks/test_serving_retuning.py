"""What is said of a tuner at ten times the load."""

import pytest

from benchmarks.serving_devices import Timed
from benchmarks.serving_retuning import Found, Retuning, verdict
from kdist.serving import BatchSettings, LatencyCurve, Objective

LONG, SHORT, NONE = (BatchSettings(timeout, 32) for timeout in (0.064, 0.016, 0.0))
FOUND = {
    LONG: Found(0.40, 0.070, 0.110),
    SHORT: Found(0.44, 0.040, 0.099),
    NONE: Found(0.60, 0.030, 0.050),
}
BOUND = Objective("device_time", 0.1)


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(-9, LONG), (2.5, SHORT)], "from 0.0 s on"),  # the bound is broken by a tenth
        ([(-9, NONE), (1, LONG), (2.5, NONE), (4, SHORT)], "from 4.0 s on"),
        ([(-9, SHORT), (1, NONE)], "never"),
        ([(-9, BatchSettings(0.0, 1)), (3, SHORT)], "from 3.0 s on"),
    ],
)
def test_when_the_settings_are_good(spans, said):
    text = verdict(spans, FOUND, BOUND)
    assert f"measured settings {said}." in text
    assert f"former settings ({spans[0][1]})" in text
    assert f"the best measured ({SHORT})" in text


def test_what_was_not_measured_is_over_capacity():
    assert "over capacity" in verdict([(-9, BatchSettings(0.0, 1)), (3, SHORT)], FOUND, BOUND)
    assert "no setting" in verdict([(-9, SHORT)], FOUND, Objective("device_time", 0.01))


def test_the_mean_latency_has_no_bound():
    text = verdict([(-9, LONG), (1, SHORT), (3, NONE)], FOUND, Objective())
    assert "settings from 3.0 s on." in text
    assert f"the best measured ({NONE}): 60% of the device, mean 30.0 ms, p99 50.0 ms" in text


def test_the_bound_sets_the_loads_apart():
    curve = LatencyCurve([1, 8, 32], [0.010, 0.012, 0.020])
    bound = Retuning(Timed(None), {}, curve, share=0.5, seconds=1).bound()
    assert 1.3 * 0.020 <= bound < 4 * 0.020
    # A device that takes as long for all: whatever is best for few is for many.
    flat = LatencyCurve([1], [0.010])
    assert Retuning(Timed(None), {}, flat, share=0.5, seconds=1).bound() is None
