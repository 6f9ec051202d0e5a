import dataclasses
import itertools

import pytest

from kdist.batch import Batch


def test_sizes():
    batch = Batch(local=16, replicas=4, accumulate=2)
    assert (batch.micro_size, batch.global_size) == (64, 128)


@pytest.mark.parametrize(
    ("examples", "full", "all_of_them"), [(128, 1, 1), (129, 1, 2), (255, 1, 2), (256, 2, 2)]
)
def test_steps(examples, full, all_of_them):
    batch = Batch(32, 4)
    assert batch.steps_per_epoch(examples) == full
    assert batch.steps_to_see_all(examples) == all_of_them


def test_is_frozen_and_a_value():
    batch = Batch(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.local = 3
    assert batch == Batch(2, 1, 1)
    assert hash(batch) == hash(Batch(2))


@pytest.mark.parametrize("field", ["local", "replicas", "accumulate"])
@pytest.mark.parametrize("size", [0, -1, True])
def test_refuses_sizes_below_one(field, size):
    with (
        pytest.raises(ValueError, match=f"{field} must be at least 1")
        if size is not True
        else (pytest.raises((ValueError, TypeError)))
    ):
        Batch(**{"local": 1, field: size})


def test_refuses_non_integers():
    with pytest.raises(TypeError, match="local must be an integer, got 2.5"):
        Batch(2.5)


def test_a_batch_larger_than_the_data_names_the_largest_that_fits():
    with pytest.raises(ValueError, match=r"--local_batch_size\) to 7 or less"):
        Batch(16, 4).steps_per_epoch(30)
    with pytest.raises(ValueError, match="fewer replicas"):
        Batch(1, 4).steps_per_epoch(3)


def test_from_global():
    assert Batch.from_global(128, replicas=4) == Batch(32, 4)
    with pytest.raises(ValueError, match="use 128 or 132"):
        Batch.from_global(130, replicas=4)
    with pytest.raises(ValueError, match="use 4$"):
        Batch.from_global(3, replicas=4)


@pytest.mark.parametrize(
    ("batch", "replicas", "expected"),
    [
        (Batch(8, 4), 4, Batch(8, 4)),
        (Batch(8, 4), 3, Batch(6, 3, 2, total=32)),
        (Batch(8, 4), 2, Batch(8, 2, 2)),
        (Batch(8, 4), 1, Batch(8, 1, 4)),
        (Batch(8, 4, 3), 3, Batch(8, 3, 4)),
        (Batch(1, 4), 3, Batch(1, 3, 2, total=4)),
        (Batch(1, 2), 3, Batch(1, 3, total=2)),
    ],
)
def test_the_same_global_batch_on_another_number_of_replicas(batch, replicas, expected):
    moved = batch.on_replicas(replicas)
    assert moved == expected
    assert moved.global_size == batch.global_size
    assert moved.on_replicas(batch.replicas).global_size == batch.global_size


def test_no_micro_step_is_larger_than_planned_and_none_can_be_left_out():
    for local, replicas, accumulate, others in itertools.product(
        range(1, 12), range(1, 6), (1, 2), range(1, 6)
    ):
        batch = Batch(local, replicas, accumulate)
        moved = batch.on_replicas(others)
        assert moved.global_size == batch.global_size
        assert moved.local <= local
        assert others * local * (moved.accumulate - 1) < batch.global_size


def test_an_uneven_batch_shows_its_size():
    batch = Batch(6, 3, 2, total=32)
    assert eval(repr(batch)) == batch
    assert str(batch) == "up to 6 local × 3 replicas × 2 micro-steps = 32"
    assert batch.steps_per_epoch(100) == 3
    with pytest.raises(ValueError, match="total=37 is more than"):
        Batch(6, 3, 2, total=37)
