"""Search for fast settings, on simulated machines whose speed drifts."""

import doctest
import itertools
import math

import numpy as np
import pytest

from kdist.tuning import speed
from kdist.tuning.speed import Knob, MeasurementError, SpeedSearch, median_interval

KNOBS = (
    Knob("steps", 1, (8, 32), "nothing"),
    Knob("xla", False, (True,), "rounding"),
    Knob("precision", "float32", ("bfloat16",), "the precision"),
    Knob("batch", 1, (2, 4, 8), "the batch"),
    Knob("devices", 1, (2,), "rounding"),
    Knob("reduction", "auto", ("copies",), "rounding"),
)
MACHINES = {
    "small model": {"steps": {8: 1.5, 32: 1.7}, "xla": {True: 1.2}, "batch": {2: 1.2, 4: 1.3}},
    "large model": {"xla": {True: 0.7}, "devices": {2: 1.3}, "precision": {"bfloat16": 0.4}},
    "nothing helps": {"steps": {8: 1.0, 32: 0.9}, "xla": {True: 0.8}, "batch": {2: 0.95}},
}
START_SECONDS, TURN_SECONDS = 8.0, 0.5


class Machine:
    """Machine whose speed drifts by 40 %, with noise in each measurement and some outliers."""

    def __init__(self, gains, seed, fails=lambda settings: False):
        self._gains, self._fails = gains, fails
        self._rng = np.random.default_rng(seed)
        self._phase = self._rng.uniform(0, 6)
        self.seconds, self._started = 0.0, set()

    def speed(self, settings):
        gains = [self._gains.get(name, {}).get(value, 1.0) for name, value in settings.items()]
        together = 0.8 if {"steps", "batch"} <= set(settings) else 1.0  # both save launches
        return 1000.0 * math.prod(gains) * together

    def measure(self, settings):
        key = tuple(sorted(settings.items()))
        self.seconds += TURN_SECONDS + START_SECONDS * (key not in self._started)
        self._started.add(key)
        if self._fails(settings):
            raise MeasurementError("out of memory")
        drift = 1 + 0.2 * math.sin(self._phase + self.seconds / 60)
        noise = self._rng.lognormal(0, 0.04) * (0.6 if self._rng.uniform() < 0.05 else 1)
        return self.speed(settings) * drift * noise


def searched(machine, seconds=1e6):
    search = SpeedSearch(KNOBS, machine.measure, seconds, clock=lambda: machine.seconds)
    return search.run()


def grid():
    for values in itertools.product(*((each.present, *each.values) for each in KNOBS)):
        chosen = dict(zip((each.name for each in KNOBS), values, strict=True))
        yield {each.name: chosen[each.name] for each in KNOBS if chosen[each.name] != each.present}


@pytest.mark.parametrize("gains", MACHINES.values(), ids=MACHINES)
def test_is_within_five_percent_of_the_grid_in_an_eighth_of_its_time(gains):
    cells = list(grid())
    found = []
    for seed in range(20):
        machine = Machine(gains, seed)
        result = searched(machine)
        fastest = max(map(machine.speed, cells))
        found.append(machine.speed(result.settings) / fastest)
        # Each cell of the grid starts once and is measured as often as a single change.
        assert machine.seconds <= len(cells) * (START_SECONDS + 6 * TURN_SECONDS) / 8
    assert sum(each >= 0.95 for each in found) >= 18


def test_the_interval_contains_the_true_gain():
    contained = []
    for seed in range(40):
        machine = Machine(MACHINES["small model"], seed)
        result = searched(machine)
        low, high = result.interval
        contained.append(low <= machine.speed(result.settings) / machine.speed({}) <= high)
    assert sum(contained) >= 34


def test_settings_that_are_not_faster_for_certain_are_not_recommended():
    results = [searched(Machine(MACHINES["nothing helps"], seed)) for seed in range(20)]
    assert sum(result.settings == {} for result in results) >= 18
    kept = [result for result in results if not result.settings]
    assert all((result.gain, result.interval) == (1.0, None) for result in kept)


def test_a_candidate_that_fails_never_ends_the_search():
    machine = Machine(MACHINES["small model"], 0, fails=lambda given: given.get("steps") == 32)
    result = searched(machine)
    assert result.settings["steps"] == 8
    failed = [each for each in result.candidates if each.failure]
    assert [each.settings for each in failed] == [{"steps": 32}]
    assert "memory" in failed[0].failure


def test_combinations_that_are_slower_than_their_parts_are_taken_apart():
    class Together(Machine):
        def speed(self, settings):
            slow = 0.3 if {"xla", "devices"} <= set(settings) else 1.0
            return super().speed(settings) * slow

    machine = Together({"xla": {True: 1.4}, "devices": {2: 1.2}, "batch": {2: 1.3}}, 1)
    settings = searched(machine).settings
    assert {"xla": True, "batch": 2}.items() <= settings.items()
    assert "devices" not in settings


def test_present_settings_that_fail_are_an_error():
    with pytest.raises(MeasurementError, match="memory"):
        searched(Machine({}, 0, fails=lambda given: not given))


@pytest.mark.parametrize("seconds", [1, 30, 60, 100])
def test_the_time_is_kept(seconds):
    machine = Machine(MACHINES["small model"], 0)
    result = searched(machine, seconds)
    assert machine.seconds <= seconds + 3 * START_SECONDS + 12 * TURN_SECONDS
    assert all(each.ratios or each.failure == "the time was over" for each in result.candidates)


@pytest.mark.parametrize("seed", range(5))
def test_no_setting_is_preferred_on_the_strength_of_a_single_pair(seed):
    for seconds in range(10, 120):
        machine = Machine(MACHINES["small model"], seed)
        for each in searched(machine, seconds).candidates:
            assert each.failure == "the time was over" or len(each.ratios) >= 3


def test_a_steady_drift_cancels():
    class Faster(Machine):
        def measure(self, settings):
            self.seconds += 1
            return self.speed(settings) * 1.1**self.seconds

    result = searched(Faster({"xla": {True: 1.5}}, 0))
    assert result.settings == {"xla": True}
    assert result.gain == pytest.approx(1.5, rel=0.02)


def test_intervals_of_few_values_are_not_given():
    assert median_interval([1.0] * 4) is None
    assert median_interval([1.0] * 5) == (1.0, 1.0)


def test_examples():
    assert doctest.testmod(speed).failed == 0
