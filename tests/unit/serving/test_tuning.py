"""Simulation compared with queueing theory and manual calculation, and the choice of settings."""

import numpy as np
import pytest

import kdist
from kdist.serving import (
    BatchSettings,
    LatencyCurve,
    Objective,
    bursty,
    choose,
    poisson,
    read_trace,
    simulate,
)

# An accelerator: nearly as fast with 64 rows as with one.
ACCELERATOR = LatencyCurve(range(1, 65), [0.008 + 0.0001 * rows for rows in range(1, 65)])


# What a batch takes.


def test_a_batch_is_padded_to_the_next_size():
    curve = LatencyCurve([1, 4, 8], [0.001, 0.002, 0.003])
    assert [curve.seconds(rows) for rows in (1, 2, 4, 5, 8)] == [0.001, 0.002, 0.002, 0.003, 0.003]
    assert curve.table() == pytest.approx([0, 0.001, *[0.002] * 3, *[0.003] * 4])
    assert curve.capacity(8) == pytest.approx(8 / 0.003)
    assert curve.capacity(4) == pytest.approx(4 / 0.002)
    assert curve.capacity(2) == pytest.approx(1 / 0.001)  # two take as long as four


@pytest.mark.parametrize(
    ("sizes", "seconds", "says"),
    [
        ([], [], "from 1 on"),
        ([0, 1], [0.1, 0.1], "from 1 on"),
        ([1, 4, 4], [0.1] * 3, "ascending"),
        ([1, 2], [0.1], "one for each size"),
        ([1, 2], [0.1, 0.0], "above zero"),
        ([1], [float("nan")], "above zero"),
    ],
)
def test_curves_that_are_none(sizes, seconds, says):
    with pytest.raises(ValueError, match=says):
        LatencyCurve(sizes, seconds)
    with pytest.raises(ValueError, match="spread"):
        LatencyCurve([1], [1.0], [])
    with pytest.raises(ValueError, match="spread"):
        LatencyCurve([1], [1.0], [0.0, 2.0])


def test_a_curve_of_single_times():
    """Medians 2, 2 (not less than of one row) and 8; shares 0.5, 1, 3 | 0.5, 1, 1 | 1, 1, 4."""
    curve = LatencyCurve.of_times({1: [1, 2, 6], 2: [1, 2, 2], 4: [8, 8, 80]})
    mean = (0.5 + 1 + 3 + 0.5 + 1 + 1 + 1 + 1 + 4) / 9
    assert curve.sizes == [1, 2, 4]
    assert curve.batch_seconds == pytest.approx([2 * mean, 2 * mean, 8 * mean])
    assert sorted(curve.spread) == pytest.approx(
        [s / mean for s in (0.5, 0.5, 1, 1, 1, 1, 1, 3, 4)]
    )


# Counted by hand.


@pytest.mark.parametrize(
    ("timeout", "most", "latencies"),
    [
        # Free at once: the first alone, the next two together when it has ended, then the last.
        (0.0, 4, [1.0, 1.9, 1.8, 1.0]),
        # The oldest waits half a second, in which two more come; the last is 2.5 late.
        (0.5, 4, [1.5, 1.4, 1.3, 1.5]),
        # The second fills the batch, and it starts; the third waits for the device.
        (0.5, 2, [1.1, 1.0, 1.9, 1.5]),
        (0.0, 1, [1.0, 1.9, 2.8, 1.0]),
    ],
)
def test_four_requests(timeout, most, latencies):
    """Each batch takes a second; requests arrive at 0, 0.1, 0.2, and 5."""
    curve = LatencyCurve([4], [1.0])
    arrivals = np.array([0.0, 0.1, 0.2, 5.0])
    outcome = simulate(curve, arrivals, BatchSettings(timeout, most), overhead_seconds=0.25)
    assert outcome.mean_seconds == pytest.approx(np.mean(latencies) + 0.25)
    assert outcome.p50_seconds == pytest.approx(np.median(latencies) + 0.25)


# Against theory.


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_without_batches_it_is_the_queue_m_d_1(load):
    """Pollaczek and Khinchine: the mean wait is load / (2 (1 - load)) services."""
    curve = LatencyCurve([1], [0.01])
    outcome = simulate(curve, poisson(load / 0.01, 200_000), BatchSettings(0.0, 1))
    assert outcome.mean_seconds == pytest.approx(0.01 * (1 + load / (2 * (1 - load))), rel=0.05)
    assert outcome.device_share == pytest.approx(load, rel=0.01)
    assert outcome.batch_rows == 1


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_batches_that_vary_make_the_queue_m_g_1(load):
    """Pollaczek and Khinchine: the wait grows by the square of the coefficient of variation."""
    curve = LatencyCurve([1], [0.01], [0.25, 1.75])
    outcome = simulate(curve, poisson(load / 0.01, 200_000), BatchSettings(0.0, 1))
    wait = (1 + 0.75**2) * load / (2 * (1 - load))
    assert outcome.mean_seconds == pytest.approx(0.01 * (1 + wait), rel=0.05)
    assert outcome.device_share == pytest.approx(load, rel=0.01)


@pytest.mark.parametrize("rate", [50, 500, 2000])
def test_mean_latency_is_just_below_inoues_bound(rate):
    """With L(b) = a b + c, any batch and no timeout: Inoue, "Queueing analysis of GPU-based
    inference servers with dynamic batching", 2019, arXiv:1912.06322."""
    a, c = 0.0001, 0.008
    sizes = range(1, 1025)
    curve = LatencyCurve(sizes, [a * rows + c for rows in sizes])
    outcome = simulate(curve, poisson(rate, 100_000), BatchSettings(0.0, 1024))
    x, y = rate * a, rate * c
    few = (a + c) / (2 * (1 - x**2)) * (1 + 2 * y + (1 - y) / (1 + x))
    many = 3 / 2 * c / (1 - x) + a / 2 * (x + 2) / (1 - x**2)
    assert 0.97 < outcome.mean_seconds / min(few, many) < 1.01


def test_a_timeout_makes_larger_batches_and_spares_the_device():
    outcomes = [
        simulate(ACCELERATOR, poisson(500, 50_000), BatchSettings(timeout, 64))
        for timeout in (0.0, 0.016, 0.064)
    ]
    rows = [outcome.batch_rows for outcome in outcomes]
    shares = [outcome.device_share for outcome in outcomes]
    assert rows == sorted(rows)
    assert rows[-1] > 2 * rows[0]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0] / 2


def test_more_than_the_device_serves():
    assert simulate(ACCELERATOR, poisson(200, 5000), BatchSettings(0.0, 1)).over_capacity
    assert not simulate(ACCELERATOR, poisson(200, 5000), BatchSettings(0.0, 8)).over_capacity


def test_full_batches_that_serve_less_than_smaller_ones_are_what_is_served():
    """A long queue fills every batch: 356 requests per second, not the 471 of batches of 16."""
    cliff = LatencyCurve([1, 2, 4, 8, 16, 32], [0.004, 0.006, 0.010, 0.018, 0.034, 0.090])
    arrivals = poisson(420, 20_000)
    full = simulate(cliff, arrivals, BatchSettings(0.0, 32))
    assert full.mean_seconds > 1
    assert full.over_capacity
    assert not simulate(cliff, arrivals, BatchSettings(0.0, 16)).over_capacity


# What is chosen.


def test_for_the_mean_latency_nothing_is_waited_for():
    sizes = (1, 8, 16, 64)
    choice = choose(ACCELERATOR, poisson(500, 20_000), Objective("latency"), max_batches=sizes)
    assert choice.best.settings == BatchSettings(0.0, 64)
    assert [each.score for each in choice.tried] == sorted(each.score for each in choice.tried)
    assert len(choice.tried) == 9 * 4


def test_for_the_devices_time_as_long_as_the_bound_allows():
    load, sizes = poisson(500, 20_000), (8, 16, 32, 64)
    free = choose(ACCELERATOR, load, Objective("device_time"), max_batches=sizes).best
    bound = choose(ACCELERATOR, load, Objective("device_time", 0.03), max_batches=sizes).best
    assert free.settings.timeout_seconds == 0.064
    assert 0 < bound.settings.timeout_seconds < 0.03
    assert bound.outcome.p99_seconds <= 0.9 * 0.03
    assert free.outcome.device_share < bound.outcome.device_share


def test_a_bound_that_none_keeps_with_room_to_spare_is_just_kept():
    load = poisson(500, 20_000)
    tried = choose(ACCELERATOR, load, Objective("device_time"), max_batches=[64]).tried
    fastest = min(each.outcome.p99_seconds for each in tried)
    just = choose(ACCELERATOR, load, Objective("device_time", 1.05 * fastest), max_batches=[64])
    assert 0.95 * fastest < just.best.outcome.p99_seconds <= 1.05 * fastest
    never = choose(ACCELERATOR, load, Objective("device_time", 0.95 * fastest), max_batches=[64])
    assert never.best is None
    assert "no setting keeps" in never.reason


def test_for_throughput_the_largest_batches():
    """Without batching the device serves 123 requests per second."""
    objective = Objective("throughput", 0.1)
    choice = choose(
        ACCELERATOR, poisson(100, 5000), objective, timeouts_ms=[0, 8], max_batches=[1, 8, 64]
    )
    assert choice.best.settings.max_batch == 64
    rates = {(each.settings.max_batch): -each.score for each in reversed(choice.tried)}
    assert rates[1] < 125 < rates[8] < ACCELERATOR.capacity(8)
    assert 2000 < rates[64] < ACCELERATOR.capacity(64)


def test_nothing_serves_the_load():
    over = choose(ACCELERATOR, poisson(6000, 5000), Objective(), max_batches=[16, 64])
    assert over.best is None
    assert over.reason.startswith("over capacity: 5,9")
    assert " rows per second arrive" in over.reason
    assert "serves at most 4,444" in over.reason
    late = choose(ACCELERATOR, poisson(100, 5000), Objective("latency", 0.001), max_batches=[64])
    assert late.best is None
    assert "no setting keeps 99 of 100 requests within 1 ms" in late.reason


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Objective("speed"), "latency, throughput, device_time"),
        (lambda: Objective("throughput"), "--p99_ms=50"),
        (lambda: Objective("latency", 0.0), "above zero"),
        (lambda: BatchSettings(-0.001), "negative"),
        (lambda: BatchSettings(0.0, 0), "at least one row"),
        (lambda: simulate(ACCELERATOR, poisson(1, 9), BatchSettings(0, 65)), "up to 64"),
        (lambda: simulate(ACCELERATOR, np.array([1.0]), BatchSettings()), "two or more"),
        (lambda: poisson(0, 5), "above zero"),
        (lambda: bursty(1, 5, busy_share=1.0), "between 0 and 1"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# When requests come.


def test_bursts_have_the_rate_and_are_bursts():
    times = bursty(200, 200_000, seed=1)
    assert len(times) / times[-1] == pytest.approx(200, rel=0.1)
    assert np.all(np.diff(times) >= 0)

    def spread(times):
        """Returns variance / mean of the requests per tenth of a second; 1 if independent."""
        counts = np.histogram(times, np.arange(0, times[-1], 0.1))[0]
        return counts.var() / counts.mean()

    assert spread(poisson(200, 200_000)) == pytest.approx(1, rel=0.1)
    assert spread(times) > 5


def test_a_recorded_trace(tmp_path):
    (tmp_path / "trace.txt").write_text("# seconds\n3.5\n2.5\n\n4\n")
    assert read_trace(tmp_path / "trace.txt") == pytest.approx([0, 1, 1.5])
    (tmp_path / "wrong.txt").write_text("1\ntwo\n")
    with pytest.raises(ValueError, match=r"wrong.txt, line 2: 'two' is not a number"):
        read_trace(tmp_path / "wrong.txt")
    (tmp_path / "short.txt").write_text("1\n")
    with pytest.raises(ValueError, match="1 finite times"):
        read_trace(tmp_path / "short.txt")


def test_two_devices_serve_what_one_cannot():
    curve, arrivals = LatencyCurve([1], [1.5]), np.arange(1000.0)
    one = simulate(curve, arrivals, BatchSettings(0.0, 1))
    two = simulate(curve, arrivals, BatchSettings(0.0, 1), devices=2)
    assert one.over_capacity
    assert not two.over_capacity
    assert two.mean_seconds == pytest.approx(1.5)
    assert two.device_share == pytest.approx(0.75, rel=0.01)
    assert "over capacity" in choose(curve, arrivals, Objective()).reason
    assert choose(curve, arrivals, Objective(), devices=2).best is not None


def test_old_names_still_work():
    with pytest.warns(DeprecationWarning, match="ServerLimits"):
        assert kdist.serving.Limits is kdist.serving.ServerLimits
    with pytest.raises(AttributeError, match="limits"):
        kdist.serving.limits  # noqa: B018
