"""Price of a run on demand and on spot VMs."""

import pytest

from kdist.planner.cost.step import Spot, on_demand_usd


def test_price_times_time_times_machines():
    assert on_demand_usd(hours=3, usd_per_hour=2.5, machines=4) == 30


def test_no_preemptions_change_nothing():
    spot = Spot(preemptions_per_hour=0)
    assert spot.expected_hours(7, machines=8) == 7
    assert spot.expected_restarts(7, machines=8) == 0


def test_rare_preemption_costs_a_restart_and_half_a_checkpoint():
    spot = Spot(preemptions_per_hour=1e-4, restart_hours=0.2, checkpoint_hours=0.5)
    # To first order: λ T (R + c / 2).
    assert spot.expected_hours(100, 1) - 100 == pytest.approx(1e-4 * 100 * (0.2 + 0.25), rel=1e-3)


def test_more_machines_are_preempted_more_often():
    hours = [Spot(0.01).expected_hours(10, machines) for machines in (1, 2, 8, 64)]
    assert hours == sorted(hours)
    assert len(set(hours)) == 4


def test_expected_hours_match_a_simulation():
    import numpy as np

    rate, restart, part, work = 0.5, 0.1, 0.25, 50.0
    random = np.random.default_rng(0)
    times = []
    for _ in range(400):
        clock = done = 0.0
        fails = random.exponential(1 / rate)
        while done < work:
            if fails >= part:
                clock, done, fails = clock + part, done + part, fails - part
            else:  # what was computed since the checkpoint is lost
                clock, fails = clock + fails + restart, random.exponential(1 / rate)
        times.append(clock)
    expected = Spot(rate, restart, part).expected_hours(work, 1)
    assert np.mean(times) == pytest.approx(expected, rel=0.02)
