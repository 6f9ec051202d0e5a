"""Recomputation: the same numbers with less memory, and no state is written twice."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.compat.tensorflow import collect_function_graphs
from kdist.parallel import split, stage
from kdist.parallel.inspect.operation_devices import operations_that_run
from kdist.parallel.pipeline.schedule import stage_order
from kdist.parallel.pipeline.timeline import recorded_timeline
from kdist.testing import assert_same_weights
from tests.tiers import seldom

ROWS = 48
PLACEMENTS = {2: {"high": stage(1)}, 3: {"high": stage(1), "top": stage(2)}}
EVERY_SCHEDULE = [
    "pipeline=3,micro_batches=4",
    "pipeline=3,micro_batches=4,schedule=gpipe",
    "data=2,pipeline=2,micro_batches=3",
    "data=2,pipeline=2,micro_batches=3,schedule=gpipe",
]
every_schedule = pytest.mark.parametrize("layout", EVERY_SCHEDULE)
CROSSENTROPY = "sparse_categorical_crossentropy"


def rng():
    return np.random.default_rng(0)


def optimizer():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def three_stages(low=(), high=(), units=8, shape=(6,), top=4, dtype=None):
    """Dense layers on three stages, with more layers after the first and the second."""
    layers = keras.layers
    x = inputs = keras.Input(shape, dtype=dtype)
    for layer in (*low, layers.Dense(units, "tanh", name="low")):
        x = layer(x)
    for layer in (layers.Dense(units, "tanh", name="high"), *high):
        x = layer(x)
    return keras.Model(inputs, layers.Dense(top, "softmax", name="top")(x))


def vectors():
    return rng().normal(size=(ROWS, 6)).astype("float32"), rng().integers(0, 4, ROWS)


def trained(plain, layout, x, y, batch=16, **arguments):
    """Returns `plain`, split by the layout, after two epochs, and its history."""
    strategy = kdist.create_strategy(kdist.Layout.parse(layout))
    with strategy.scope():
        model = split(plain, PLACEMENTS[strategy.layout.pipeline])
        model.compile(optimizer(), **{"loss": CROSSENTROPY, **arguments})
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    return model, history


def assert_recomputes_the_same(make, layout, x, y, tolerance=1e-6, **arguments):
    """Compares weights, other state and history with a pipeline that keeps its activations."""
    results = []
    for asked in (layout, f"{layout},recompute"):
        keras.utils.set_random_seed(1)  # initial weights and seeds of layers
        results.append(trained(make(), asked, x, y, **arguments))
    (expected, history), (got, same_history) = results
    for name, values in history.items():
        np.testing.assert_allclose(same_history[name], values, atol=tolerance, err_msg=name)
    assert_same_weights(
        [v.numpy() for v in got.variables], [v.numpy() for v in expected.variables], tolerance
    )
    return got


def passes(operations, replica=0):
    """Returns {(stage, kind): micro-batches with matrix products in the forward pass}."""
    found = collections.defaultdict(list)
    for o in operations:
        match = re.search(r"(forward|recompute)_(\d+)_on_stage_(\d)/", o.name)
        is_here = ("replica_1/" in o.name) == replica
        if match and is_here and "MatMul" in o.type and not o.is_backward:
            found[int(match[3]), match[1]].append(int(match[2]))
    return {key: sorted(set(numbers)) for key, numbers in found.items()}


# Equality.


@pytest.mark.fast_cases(1)
@every_schedule
def test_the_weights_of_one_device(layout):
    plain = three_stages()
    plain.compile(optimizer(), CROSSENTROPY, metrics=["accuracy"])
    x, y = vectors()
    model, history = trained(plain, f"{layout},recompute", x, y, metrics=["accuracy"])
    expected = plain.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-6, err_msg=name)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-6)


class CountsCalls(keras.layers.Layer):
    """Computes with a variable that it writes, so that each call differs."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * (1.0 + 0.01 * self.calls)


class AddsLoss(keras.layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def stateful():
    """Layers that draw numbers, write state, read what they write, or add to the loss."""
    layers = keras.layers
    twice = layers.Dropout(0.3, seed=3)
    regularized = layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2")
    return [
        *(twice, layers.Dropout(0.2), CountsCalls(), AddsLoss(), regularized, twice),
        layers.BatchNormalization(momentum=0.5),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EVERY_SCHEDULE[3], *seldom(EVERY_SCHEDULE[:1])])
def test_state_is_read_as_before_and_written_once(layout):
    """Wherever a layer is, and whichever stage recomputes.

    All rows are one batch: a BatchNorm of two rows makes 1e-5 of a difference of 1e-8.
    """
    make = lambda: three_stages(stateful(), stateful())  # noqa: E731
    assert_recomputes_the_same(make, layout, *vectors(), batch=ROWS, metrics=["accuracy"])


@pytest.mark.slow
def test_state_on_the_last_stage():
    """GPipe also computes the loss again: metrics and statistics are updated once."""
    layout = "pipeline=2,micro_batches=4,schedule=gpipe"
    make = lambda: keras.Sequential(  # noqa: E731
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="low"),
            keras.layers.BatchNormalization(name="high"),
            keras.layers.Dropout(0.5, name="drop"),
            AddsLoss(name="adds"),
            keras.layers.Dense(4, activation="softmax", name="top"),
        ]
    )
    assert_recomputes_the_same(make, layout, *vectors(), metrics=["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(("low", "replicas"), [("LSTM", 1), *seldom([("LSTM", 2), ("Dense", 2)])])
def test_masks(low, replicas):
    """Sequences of unequal length. An LSTM is a loop, in the second pass as well."""
    layers = keras.layers

    def make():
        inputs = keras.Input((7,), dtype="int32")
        x = layers.Embedding(11, 5, mask_zero=True, name="embedding")(inputs)
        if low == "LSTM":
            x = layers.LSTM(4, return_sequences=True, recurrent_dropout=0.2, name="low")(x)
        else:
            x = layers.Dense(4, activation="tanh", name="low")(x)
        x = layers.Dense(6, name="high")(x)
        return keras.Model(inputs, layers.Dense(3, activation="softmax", name="top")(x))

    tokens, lengths = rng().integers(1, 11, (ROWS, 7)), rng().integers(1, 8, ROWS)
    tokens *= np.arange(7) < lengths[:, None]
    y = rng().integers(0, 3, (ROWS, 7))
    layout = f"data={replicas},pipeline=2,micro_batches=3,schedule=gpipe"
    assert_recomputes_the_same(make, layout, tokens, y, metrics=["accuracy"])


def masked_attention():
    """Attention on the last two of three stages, to the same masked tokens."""
    layers = keras.layers
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True, name="embedding")(inputs)
    y = layers.MultiHeadAttention(2, 4, name="high")(x, x)
    y = layers.MultiHeadAttention(2, 4, name="top")(y, x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(y))


@pytest.mark.slow
def test_masks_that_attention_detaches():
    """Keras's attention detaches the masks of its inputs, for later layers as well."""
    tokens = rng().integers(1, 11, (16, 7)) * (np.arange(7) < rng().integers(1, 8, (16, 1)))
    data = tokens, rng().integers(0, 3, (16, 7))
    plain = masked_attention()
    plain.compile(optimizer(), CROSSENTROPY)
    layout = "pipeline=3,micro_batches=2,schedule=gpipe,recompute"
    model, _ = trained(plain, layout, *data)
    plain.fit(*data, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(model.get_weights(), plain.get_weights(), 1e-6)


@pytest.mark.slow
def test_mixed_precision_with_a_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        make = lambda: three_stages([keras.layers.Dropout(0.5)])  # noqa: E731
        # oneDNN fuses other operations in the two graphs, and float16 rounds by up to 5e-4.
        model = assert_recomputes_the_same(make, EVERY_SCHEDULE[0], *vectors(), tolerance=5e-4)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.slow
def test_fewer_rows_than_micro_batches():
    """Batches of 16 rows as 20 micro-batches; empty ones do not update statistics."""
    make = lambda: three_stages([keras.layers.BatchNormalization()])  # noqa: E731
    assert_recomputes_the_same(make, "pipeline=3,micro_batches=20", *vectors())


# What runs.


@pytest.mark.parametrize("layout", EVERY_SCHEDULE[1:3])
def test_each_stage_goes_forward_twice_but_where_it_goes_back_at_once(layout):
    """Executed graphs: passes are neither merged nor unnecessary."""
    x, y = vectors()
    with operations_that_run() as operations:
        trained(three_stages(), f"{layout},recompute", x[:16], y[:16])
    parsed = kdist.Layout.parse(layout)
    for replica in range(parsed.data):
        ran = passes(operations, replica)
        for number in range(parsed.pipeline):
            sizes = parsed.pipeline, parsed.micro_batches
            order = stage_order(parsed.schedule, *sizes, number, recompute=True)
            assert ran[number, "forward"] == list(range(parsed.micro_batches))
            again = sorted(work.micro_batch for work in order if work.is_again)
            assert ran.get((number, "recompute"), []) == again


def multiplied_before(graph, name):
    """Returns scopes of the matrix products that an operation depends on, by data or control."""
    nodes = {node.name: node for node in graph.node}
    seen, left = set(), [name]
    while left:
        node = nodes[left.pop()]
        taken = [each.lstrip("^").partition(":")[0] for each in node.input]
        left += [each for each in taken if each not in seen]
        seen.update(taken)
    return {each.partition("/")[0] for each in seen if "MatMul" in nodes[each].op}


def test_masks_of_dropout_wait_as_well():
    """They do not depend on a stage's inputs, and could be created and held from the start."""
    x, y = vectors()
    drop = keras.layers.Dropout(0.5, seed=1)
    with collect_function_graphs() as functions:
        trained(three_stages([drop]), "pipeline=2,micro_batches=2,recompute", x[:16], y[:16])
    before = {
        node.name.partition("/")[0]: multiplied_before(graph, node.name)
        for function in functions
        for graph in function.partition_graphs
        for node in graph.node
        if node.op == "StatelessRandomUniformV2" and node.name.startswith("recompute_")
    }
    assert before.keys() == {"recompute_0_on_stage_0", "recompute_1_on_stage_0"}
    assert "forward_1_on_stage_0" in before["recompute_0_on_stage_0"]
    assert "backward_0_on_stage_0" in before["recompute_1_on_stage_0"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_work_in_order(schedule):
    """Measured: a stage recomputes directly before the backward pass."""
    x, y = vectors()
    layout = f"pipeline=3,micro_batches=4,schedule={schedule},recompute"
    with recorded_timeline() as timeline:
        trained(three_stages([keras.layers.Dropout(0.5)]), layout, x, y)
    steps = timeline.steps()
    assert len(steps) == 6
    for step in steps:
        for number in range(3):
            own = [timed.work for timed in step if timed.work.stage == number]
            assert own == stage_order(schedule, 3, 4, number, recompute=True)


# What is refused.


class Draws(keras.layers.Layer):
    """Draws from TensorFlow's own random numbers."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def test_what_cannot_be_repeated():
    x, y = vectors()
    with pytest.raises(ValueError, match=r"draws.*RandomStandardNormal.*recompute"):
        trained(three_stages([Draws(name="draws")]), f"{EVERY_SCHEDULE[0]},recompute", x, y)


def test_weights_that_the_forward_pass_writes():
    x, y = vectors()
    norm = keras.layers.SpectralNormalization(keras.layers.Dense(8))
    with pytest.raises(ValueError, match="kernel.*is trained and written.*SpectralNormalization"):
        trained(three_stages([norm]), f"{EVERY_SCHEDULE[0]},recompute", x, y)
