"""Price of a run on demand and on spot VMs."""

import pytest

from kdist.planner.cost.step import Spot, on_demand_usd


def test_price_times_time_times_machines():
    assert on_demand_usd(hours=3, usd_per_hour=2.5, machines=4) == 30


def test_no_preemptions_change_nothing():
    spot = Spot(preemptions_per_hour=0)
    assert spot.expected_hours(7, machines=8) == 7
    assert spot.interval_hours(0.1, machines=8) is None


def test_rare_preemption_costs_a_restart_and_half_a_checkpoint():
    spot = Spot(preemptions_per_hour=1e-4, restart_hours=0.2, checkpoint_hours=0.5)
    # To first order: λ T (R + c / 2).
    assert spot.expected_hours(100, 1) - 100 == pytest.approx(1e-4 * 100 * (0.2 + 0.25), rel=1e-3)


@pytest.mark.parametrize(("save_hours", "machines"), [(0.01, 1), (0.1, 4)])
def test_the_interval_is_nearly_the_best_one(save_hours, machines):
    spot = Spot(preemptions_per_hour=0.02)
    interval = spot.interval_hours(save_hours, machines)
    assert interval == pytest.approx((2 * save_hours / (0.02 * machines)) ** 0.5)
    hours = {
        factor: Spot(0.02, checkpoint_hours=factor * interval).expected_hours(
            100, machines, save_hours
        )
        for factor in (0.5, 0.9, 1, 1.1, 2)
    }
    assert hours[1] == spot.expected_hours(100, machines, save_hours)
    assert hours[1] == pytest.approx(min(hours.values()), rel=1e-3)
    assert min(hours[0.5], hours[2]) > hours[1]


def test_the_interval_has_limits():
    spot = Spot(preemptions_per_hour=1.0)
    assert spot.interval_hours(0.0, 1) == 1 / 60
    assert spot.interval_hours(3.0, 2) == 0.5  # saving takes longer than VMs live
    assert spot.expected_hours(1.0, 2, save_hours=1e6) > 1e300
    with pytest.raises(ValueError, match="save_bytes_per_second"):
        Spot(save_bytes_per_second=0)


def test_more_machines_are_preempted_more_often():
    hours = [Spot(0.01).expected_hours(10, machines) for machines in (1, 2, 8, 64)]
    assert hours == sorted(hours)
    assert len(set(hours)) == 4


def test_expected_hours_match_a_simulation():
    import numpy as np

    rate, restart, part, save, work = 0.5, 0.1, 0.25, 0.02, 50.0
    random = np.random.default_rng(0)
    times = []
    for _ in range(400):
        clock = done = 0.0
        fails = random.exponential(1 / rate)
        while done < work:
            if fails >= part + save:
                clock, done, fails = clock + part + save, done + part, fails - part - save
            else:  # what was computed since the checkpoint is lost
                clock, fails = clock + fails + restart, random.exponential(1 / rate)
        times.append(clock)
    expected = Spot(rate, restart, part).expected_hours(work, 1, save)
    assert np.mean(times) == pytest.approx(expected, rel=0.02)
