"""Search for the largest local batch, against machines of known memory and speed."""

import pytest

from kdist.tuning.batch import MAX_TRIALS, BatchSearch, BatchTrial

GB = 1e9


def searched(
    memory, *, first=64, limit=16 * GB, max_batch=1 << 20, seconds=lambda n: 0.01 + n / 1e4
):
    """Returns the search on a machine on which a batch needs `memory(batch)` bytes."""
    search = BatchSearch(first, limit, max_batch)
    while (batch := search.next_batch()) is not None:
        assert batch not in [trial.local_batch for trial in search.trials]
        assert 1 <= batch <= max_batch
        fits = memory(batch) <= limit
        search.add(BatchTrial(batch, fits, seconds(batch), memory(batch)))
    assert len(search.trials) <= MAX_TRIALS
    return search


@pytest.mark.parametrize("constant", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("each", [1e4, 1e6, 3e7, 2e8])
def test_finds_most_of_the_largest_batch(constant, each):
    most = (16 * GB - constant * GB) / each
    search = searched(lambda n: constant * GB + each * n)
    largest = 1 << 20 if most > 1 << 20 else most
    grown = 64 * 4 * 16**3  # by five trials
    assert 0.8 * min(largest, grown) - 8 <= search.largest <= most
    assert search.is_limited == (largest == most)


def test_memory_that_is_not_linear_never_breaks_the_search():
    steps = searched(lambda n: 2 * GB + 1e7 * n + (6 * GB if n > 300 else 0))
    assert 300 <= steps.largest <= 800
    square = searched(lambda n: 1 * GB + 2e4 * n**2)
    assert 600 <= square.largest <= 866


def test_a_first_batch_that_is_too_large_becomes_smaller():
    search = searched(lambda n: 15.9 * GB + 1e8 * n, first=4096)
    assert search.largest in (None, 1)
    assert [trial.local_batch for trial in search.trials] == [4096, 1024, 256, 64, 16]
    assert searched(lambda n: 20 * GB, first=4).largest is None


def test_without_a_limit_it_grows_until_something_fails():
    search = BatchSearch(64, None, 10_000)
    while (batch := search.next_batch()) is not None:
        search.add(BatchTrial(batch, batch <= 3000, 0.01, 1e9))
    assert 1500 <= search.largest <= 3000


def test_the_largest_batch_is_that_of_the_data():
    search = searched(lambda n: 1 * GB, max_batch=100)
    assert search.largest == 100
    assert not search.is_limited


@pytest.mark.parametrize(
    ("seconds", "knee"),
    [
        (lambda n: 0.010 + n * 1e-4, 904),  # 9 * 0.010 / 1e-4 = 900
        (lambda n: n * 1e-4, 1),
        (lambda n: 5.0 + n * 1e-6, None),  # the largest batch
    ],
)
def test_from_the_knee_on_it_is_nearly_as_fast_as_possible(seconds, knee):
    search = searched(lambda n: 1 * GB + 5e5 * n, seconds=seconds)
    assert search.knee() == (knee or search.largest)
    if knee:
        assert knee / seconds(knee) >= 0.9 * 1e4
