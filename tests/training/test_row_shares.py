import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.training.replica.row_shares import BatchDivision, WorkerSlice, number_of_rows


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 24])
def test_every_row_is_in_exactly_one_share(rows, micro_steps, known):
    strategy = kdist.create_strategy("mirrored", 4)
    batch = tf.reshape(tf.range(rows * 2), [rows, 2])

    @tf.function(input_signature=[tf.TensorSpec([rows if known else None, 2], tf.int32)])
    def shares(batch):
        division = BatchDivision.of(
            {"x": batch, "none": None, "scalar": tf.constant(7)}, strategy, micro_steps
        )
        taken = []
        for micro_step in range(micro_steps):
            for replica in range(4):
                data, share = division.take(
                    {"x": batch, "none": None, "scalar": tf.constant(7)}, replica, micro_step
                )
                assert data["none"] is None
                numbers = share.rows, share.micro_rows, share.batch_rows, share.batch_fraction
                taken.append((data["x"], *(tf.convert_to_tensor(n) for n in numbers)))
        return taken

    taken = shares(batch)
    own = [x.numpy()[: int(size)] for x, size, *_ in taken]
    np.testing.assert_array_equal(
        np.sort(np.concatenate(own)[:, 0]), np.arange(rows) * 2, err_msg="rows lost or doubled"
    )
    assert sum(float(fraction) for *_, fraction in taken) == pytest.approx(1.0)
    for start in range(0, len(taken), 4):
        micro_step = taken[start : start + 4]
        assert sum(int(size) for _, size, *_ in micro_step) == int(micro_step[0][2])
    for x, size, _, total, _ in taken:
        assert len(x) >= 1, "an empty share is shown a row"
        assert len(x) == max(int(size), 1)
        assert int(total) == rows


def test_static_sizes_stay_static():
    strategy = kdist.create_strategy("mirrored", 4)
    batch = tf.zeros([24, 3])
    division = BatchDivision.of(batch, strategy, 2)

    @tf.function
    def first_share(micro_step):
        rows, share = division.take(batch, 1, micro_step)
        assert rows.shape == [3, 3]
        assert not share.may_be_empty
        assert share.batch_fraction == 1 / 8
        return rows

    assert first_share(tf.constant(1)).shape == [3, 3]


@pytest.mark.parametrize(("rows", "may_be_empty"), [(7, True), (8, False), (9, False)])
def test_may_be_empty_if_there_are_fewer_rows_than_shares(rows, may_be_empty):
    strategy = kdist.create_strategy("mirrored", 4)
    division = BatchDivision.of(tf.zeros([rows, 1]), strategy, 2)
    assert division.take(tf.zeros([rows, 1]), 0, 0)[1].may_be_empty == may_be_empty


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 13])
def test_worker_slices_hold_the_rows_of_their_replicas(rows, micro_steps):
    """Tests two workers with two replicas each."""
    strategy = kdist.create_strategy("mirrored", 4)
    batch = tf.reshape(tf.range(rows), [rows, 1])
    whole = BatchDivision.of(batch, strategy, micro_steps)
    for worker in range(2):
        part = WorkerSlice(worker, 2, rows)
        own = batch[part.first_row : rows * (worker + 1) // 2]
        division = BatchDivision.of(own, strategy, micro_steps, part)
        for replica in (2 * worker, 2 * worker + 1):
            for micro_step in range(micro_steps):
                expected, share = whole.take(batch, replica, micro_step)
                taken, own_share = division.take(own, replica, micro_step)
                assert own_share == share
                assert len(taken) == len(expected)
                if share.rows:
                    np.testing.assert_array_equal(taken, expected)


def test_sparse_and_ragged_rows():
    strategy = kdist.create_strategy("mirrored", 2)
    dense = tf.constant([[0, 1], [2, 0], [0, 3], [4, 5]])
    sparse, ragged = tf.sparse.from_dense(dense), tf.RaggedTensor.from_tensor(dense, padding=0)
    division = BatchDivision.of(sparse, strategy)
    second, share = division.take(sparse, 1, 0)
    np.testing.assert_array_equal(tf.sparse.to_dense(second), dense[2:])
    assert share.rows == 2
    assert number_of_rows(ragged) == 4
    second, _ = BatchDivision.of(ragged, strategy).take(ragged, 1, 0)
    assert second.to_list() == ragged[2:].to_list()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("steps", [1, 2])
def test_tensors_with_different_numbers_of_rows_are_refused(known, steps):
    """Semi-supervised programs take more unlabeled rows than labeled ones."""

    def batches(rows):
        return tf.data.Dataset.from_tensor_slices(tf.ones([2 * rows, 1])).batch(rows, known)

    with kdist.create_strategy("mirrored", 2).scope():
        model = kdist.Model(*[keras.Input((1,))] * 2)
        model.compile("sgd", "mse", steps_per_execution=steps)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="numbers of rows"):
        model.fit(tf.data.Dataset.zip(batches(4), batches(12)), verbose=0)
    model.fit(tf.data.Dataset.zip(batches(4), batches(4)), verbose=0)


def test_every_replica_receives_data_without_rows():
    strategy = kdist.create_strategy("mirrored", 4)
    division = BatchDivision.of(tf.constant(3.0), strategy, 2)
    data, share = division.take(tf.constant(3.0), 2, 1)
    assert float(data) == 3.0
    assert share.batch_fraction == 1 / 8


def test_divided_data_keeps_its_division():
    strategy = kdist.create_strategy("mirrored", 2)
    dataset = tf.data.Dataset.range(10).batch(6)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset.skip(1))))
    division = BatchDivision.of(batch, strategy)
    assert [int(size) for size in division.sizes] == [2, 2]
