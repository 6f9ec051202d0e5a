import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.compat.tensorflow import collect_function_graphs, yields_on_host
from kdist.testing import assert_same_weights
from kdist.training.groups import functions
from kdist.training.replica import row_shares
from kdist.training.replica.row_shares import BatchDivision, WorkerSlice, number_of_rows
from tests.tiers import seldom

# Rows, micro-steps, and whether the number of rows is known while the step is traced.
SHARES = list(itertools.product([1, 2, 5, 12, 13, 24], [1, 3], [True, False]))
OFTEN = [(1, 1, False), (2, 3, True), (5, 3, False), (12, 1, True), (13, 3, False), (24, 3, True)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("rows", "micro_steps", "known"), [*OFTEN, *seldom(SHARES, other_than=OFTEN)]
)
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
    # In float64: fractions that are rounded to float32 are far from 1 by 1e-8.
    assert sum(float(fraction) for *_, fraction in taken) == pytest.approx(1.0, abs=1e-14)
    for start in range(0, len(taken), 4):
        micro_step = taken[start : start + 4]
        assert sum(int(size) for _, size, *_ in micro_step) == int(micro_step[0][2])
    for x, size, _, total, _ in taken:
        assert len(x) >= 1, "an empty share is shown a row"
        assert len(x) == max(int(size), 1)
        assert int(total) == rows


def test_a_batch_that_is_not_divided_may_have_different_numbers_of_rows():
    data = tf.zeros([4, 3]), tf.zeros([7, 2])
    division = BatchDivision.of(data, kdist.create_strategy("one_device"))
    taken, share = division.take(data, 0, 0)
    assert [part.shape[0] for part in taken] == [4, 7]
    assert share.batch_fraction == 1


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


class TwoParts(kdist.Model):
    """Model whose step takes more unlabeled rows than labeled ones."""

    def train_step(self, data):
        labeled, unlabeled = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(labeled) - 1) ** 2) + tf.reduce_sum(self(unlabeled)) / 12
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def _trained_on_two_parts(known, strategy=None, **options):
    """Returns the weights after two steps, each with 4 labeled and 12 unlabeled rows."""

    def batches(rows):
        data = np.linspace(0, 1, 2 * rows, dtype="float32")[:, None]
        return tf.data.Dataset.from_tensor_slices(data).batch(rows, known)

    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = keras.Input((1,))
        model = TwoParts(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), **options)
    model.fit(tf.data.Dataset.zip(batches(4), batches(12)), verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
def test_parts_with_different_numbers_of_rows_are_those_of_the_whole_batch(options):
    """Nothing tells which rows of one part belong to those of the other."""
    strategy = kdist.create_strategy("mirrored", 2)
    with pytest.warns(UserWarning, match="numbers of rows.*gather_batch"):
        weights = _trained_on_two_parts(True, strategy, **options)
    assert_same_weights(weights, _trained_on_two_parts(True), 1e-6)


def test_unknown_different_numbers_of_rows_are_refused_unless_the_batch_is_whole():
    strategy = kdist.create_strategy("mirrored", 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match='gather_batch="step"'):
        _trained_on_two_parts(False, strategy)
    weights = _trained_on_two_parts(False, strategy, gather_batch="step")
    assert_same_weights(weights, _trained_on_two_parts(False), 1e-6)


def test_parts_with_different_numbers_of_rows_have_no_micro_steps():
    with pytest.raises(ValueError, match="numbers of rows"):
        _trained_on_two_parts(True, kdist.create_strategy("mirrored", 2), accumulate=2)


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


def step_graph(devices, **options):
    """Returns (weights after an epoch, nodes that copy a batch) of a model, as if on GPUs."""
    strategy = kdist.create_strategy("mirrored" if devices > 1 else "one_device", devices)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = {"x": keras.Input((3,)), "number": keras.Input((), dtype="int32")}
        x = keras.layers.Concatenate()(
            [inputs["x"], keras.layers.Embedding(9, 2)(inputs["number"])]
        )
        model = kdist.Model(inputs, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse", **options)
    x = np.random.default_rng(0).random((10, 3)).astype("float32")
    data = {"x": x, "number": np.arange(10) % 9}, np.ones(10, "float32")
    with collect_function_graphs() as graphs_of_functions:
        model.fit(*data, batch_size=4, verbose=0, shuffle=False)
    graphs = [function.post_optimization_graph for function in graphs_of_functions]
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for part in graph.library.function for node in part.node_def]
    return model.get_weights(), [node for node in nodes if node.op == "Snapshot"]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"steps_per_execution": 2}, {"jit_compile": True}], ids=str
)
def test_batches_for_gpus_are_copied_to_page_locked_memory(devices, options, monkeypatch):
    expected, copies = step_graph(devices, **options)
    assert not copies, "no GPU computes"
    for module in (functions, row_shares):
        monkeypatch.setattr(module, "computes_on_gpus", lambda strategy: True)
    weights, copies = step_graph(devices, **options)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert {node.device.rpartition("device:")[2] for node in copies} == {"CPU:0"}
    types = {tf.as_dtype(node.attr["T"].type) for node in copies}
    assert types >= {tf.float32, tf.int64}


def test_only_dense_numbers_are_copied_to_page_locked_memory():
    batch = {
        "text": tf.constant(["a", "b"]),
        "ragged": tf.ragged.constant([[1], [2, 3]]),
        "none": None,
        "flags": tf.constant([True, False]),
    }

    @tf.function
    def copied():
        taken = row_shares.in_page_locked_memory(batch)
        assert taken["flags"].op.type == "Snapshot"
        return taken

    taken = copied()
    assert taken["none"] is None
    assert taken["text"].numpy().tolist() == [b"a", b"b"]
    assert taken["ragged"].to_list() == [[1], [2, 3]]
    assert taken["flags"].numpy().tolist() == [True, False]


def test_the_memory_of_an_iterators_batches():
    assert yields_on_host(iter(tf.data.Dataset.range(3)))
    assert not yields_on_host(iter([1, 2])), "it belongs to the program"
