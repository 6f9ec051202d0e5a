"""Pipelines train to the weights of one device, each stage on its device and in order."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.parallel import split, stage
from kdist.parallel.inspect.operation_devices import groups_of, operations_that_run
from kdist.parallel.pipeline.micro_batches import MicroBatchStep
from kdist.parallel.pipeline.schedule import (
    overlapped_share,
    peak_live,
    stage_order,
    waiting_share,
)
from kdist.parallel.pipeline.timeline import recorded_timeline
from kdist.testing import assert_same_weights, largest_difference
from tests.parallel.in_place import assert_in_place
from tests.tiers import seldom

BATCH = 16
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3),
}
CROSSENTROPY = "sparse_categorical_crossentropy"


def split_in(layout, plain, placement, **arguments):
    """Returns `plain` split, both compiled with the same arguments."""
    optimizer = arguments.pop("optimizer", OPTIMIZERS["momentum"])
    own = {
        name: arguments.pop(name)
        for name in ("accumulate", "local_steps", "steps_per_execution", "loss_reduction")
        if name in arguments
    }
    with kdist.create_strategy(layout).scope():
        model = split(plain, placement)
        model.compile(optimizer(), **arguments, **own)
    plain.compile(optimizer(), **arguments)
    return model


def assert_trains_alike(model, plain, *data, tolerance=1e-5, **arguments):
    """Compares weights and history with one device after two epochs."""
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    expected = plain.fit(*data, **arguments).history
    got = model.fit(*data, **arguments).history
    assert expected.keys() == got.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, atol=10 * tolerance, err_msg=name)
    assert_same_weights(model.get_weights(), plain.get_weights(), tolerance)


def rng():
    return np.random.default_rng(0)


# Models.


def residual():
    """A CNN whose first stage has outputs for the second and third stage and the head."""
    layers = keras.layers

    def convolution(name, x):
        return layers.Conv2D(3, 3, padding="same", activation="tanh", name=name)(x)

    inputs = keras.Input((5, 5, 2))
    first = convolution("first", inputs)
    second = layers.Add(name="second_sum")([convolution("second", first), first])
    third = layers.Concatenate(name="third_join")([convolution("third", second), second, first])
    return keras.Model(
        inputs,
        layers.Dense(4, activation="softmax", name="head")(layers.Flatten(name="flat")(third)),
    )


THREE_STAGES = {"second|second_sum": stage(1), "third|third_join": stage(2)}
TWO_STAGES = {"second|second_sum": stage(1)}


def images(rows=80):
    return rng().normal(size=(rows, 5, 5, 2)).astype("float32"), rng().integers(0, 4, rows)


def dense(units=8, **arguments):
    """Two stages of Dense layers. The arguments are for the first."""
    layers = keras.layers
    inputs = keras.Input((6,))
    x = layers.Dense(units, activation="tanh", name="low", **arguments)(inputs)
    x = layers.Dense(units, activation="tanh", name="high")(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))


DENSE = {"high": stage(1)}
DENSE_IN = kdist.Layout(pipeline=2, micro_batches=3)


def vectors(rows=80):
    return rng().normal(size=(rows, 6)).astype("float32"), rng().integers(0, 4, rows)


def two_ways():
    """Two inputs, one for the last stage; two outputs, one of the first stage."""
    layers = keras.layers
    left, right = keras.Input((6,), name="left"), keras.Input((3,), name="right")
    low = layers.Dense(5, activation="tanh", name="low")(left)
    early = layers.Dense(1, name="early")(low)
    high = layers.Concatenate(name="join")([layers.Dense(4, name="high")(low), right])
    return keras.Model([left, right], [early, layers.Dense(2, name="late")(high)])


# Equality.


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("layout", "placement", "optimizer", "rows"),
    [
        ("pipeline=3,micro_batches=4", THREE_STAGES, "adam", 75),
        ("pipeline=2,micro_batches=3,schedule=gpipe", TWO_STAGES, "adam", 75),
        ("data=2,pipeline=2,micro_batches=4", TWO_STAGES, "momentum", 80),
        *seldom(
            [
                ("pipeline=2,micro_batches=2", TWO_STAGES, "sgd", 80),
                ("pipeline=3,micro_batches=4,schedule=gpipe", THREE_STAGES, "momentum", 80),
                ("data=2,pipeline=2,micro_batches=3,schedule=gpipe", TWO_STAGES, "sgd", 75),
            ]
        ),
    ],
)
def test_a_residual_network(layout, placement, optimizer, rows):
    """Ten steps. With 75 rows, the last batch of each epoch has 11."""
    plain = residual()
    arguments = {"optimizer": OPTIMIZERS[optimizer], "loss": CROSSENTROPY, "metrics": ["accuracy"]}
    model = split_in(kdist.Layout.parse(layout), plain, placement, **arguments)
    assert_trains_alike(model, plain, *images(rows))


@pytest.mark.slow
@pytest.mark.parametrize("data", [2, *seldom([1])])
def test_inputs_and_outputs_of_several_stages(data):
    plain = two_ways()
    layout = kdist.Layout(data=data, pipeline=2, micro_batches=3)
    arguments = {"loss": ["mse", "mae"], "loss_weights": [0.3, 1.0], "metrics": [["mae"], ["mse"]]}
    model = split_in(layout, plain, {"high|join|late": stage(1)}, **arguments)
    x = rng().normal(size=(80, 6)).astype("float32"), rng().normal(size=(80, 3)).astype("float32")
    y = rng().normal(size=(80, 1)).astype("float32"), rng().normal(size=(80, 2)).astype("float32")
    assert_trains_alike(model, plain, x, y)


@pytest.mark.slow
def test_unequal_micro_batches_weigh_by_their_rows(monkeypatch):
    """Batches of 5 rows as micro-batches of 1, 1, 1 and 2; equal weights would be wrong."""
    x, y = vectors(50)
    layout = kdist.Layout(pipeline=2, micro_batches=4)
    plain = dense()
    model = split_in(layout, plain, DENSE, loss=CROSSENTROPY)
    equal = split_in(layout, plain, DENSE, loss=CROSSENTROPY)
    assert_trains_alike(model, plain, x, y, batch_size=5)
    monkeypatch.setattr(MicroBatchStep, "scaled", lambda micro, loss: loss / 4)
    equal.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(equal.get_weights(), plain.get_weights()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("data", [2, *seldom([1])])
def test_fewer_rows_than_micro_batches(data):
    """Batches of 5 rows and a last one of 2 as eight micro-batches, with a convolution."""
    layers = keras.layers
    plain = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(3, 3, name="low"),
            layers.Flatten(name="high"),
            layers.Dense(4, activation="softmax", name="head"),
        ]
    )
    layout = kdist.Layout(data=data, pipeline=2, micro_batches=8)
    model = split_in(layout, plain, DENSE, loss=CROSSENTROPY, metrics=["accuracy"])
    assert_trains_alike(model, plain, *images(52), batch_size=5, epochs=1)


@pytest.mark.parametrize(
    ("reduction", "data"),
    [
        ("sum_over_batch_size", 1),
        ("mean_with_sample_weight", 2),
        *seldom([("mean_with_sample_weight", 1), ("sum", 2)]),
    ],
)
def test_sample_weights(reduction, data):
    plain = dense()
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    layout = kdist.Layout(data=data, pipeline=2, micro_batches=3)
    arguments = {"loss": loss, "weighted_metrics": ["accuracy"]}
    optimizer = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    model = split_in(layout, plain, DENSE, optimizer=optimizer, **arguments)
    x, y = vectors()
    weights = rng().uniform(size=80) ** 4
    assert_trains_alike(model, plain, x, y, sample_weight=weights, tolerance=2e-5)


@pytest.mark.slow
def test_class_weights_and_a_loss_that_is_not_reduced():
    x, y = vectors()
    plain = dense()
    model = split_in(DENSE_IN, plain, DENSE, loss=CROSSENTROPY)
    assert_trains_alike(model, plain, x, y, class_weight={0: 3.0, 1: 0.1, 2: 1.0, 3: 0.0})
    plain = dense()
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="none")
    optimizer = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    model = split_in(DENSE_IN, plain, DENSE, loss=loss, optimizer=optimizer)
    assert_trains_alike(model, plain, x, y)


@pytest.mark.slow
def test_fewer_rows_than_micro_batches_and_a_loss_that_is_not_reduced():
    """A batch of 8 rows, and a last one of 3, which is fewer than the four micro-batches."""
    plain = dense()
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="none")
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=2)
    model = split_in(layout, plain, DENSE, loss=loss)
    assert_trains_alike(model, plain, *vectors(11), batch_size=8, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "low"), [(1, "LSTM"), (2, "Dense")])
def test_masks(data, low):
    """Sequences of unequal length, so that micro-batches of equal rows have unequal masks."""
    layers = keras.layers
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(11, 5, mask_zero=True, name="embedding")(inputs)
    if low == "LSTM":
        x = layers.LSTM(4, return_sequences=True, name="low")(x)
    else:
        x = layers.Dense(4, activation="tanh", name="low")(x)
    x = layers.Dense(6, name="high")(x)
    plain = keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))
    layout = kdist.Layout(data=data, pipeline=2, micro_batches=3)
    model = split_in(layout, plain, DENSE, loss=CROSSENTROPY, metrics=["accuracy"])
    tokens, lengths = rng().integers(1, 11, (32, 7)), rng().integers(1, 8, 32)
    tokens *= np.arange(7) < lengths[:, None]
    with operations_that_run() as operations:
        assert_trains_alike(model, plain, tokens, rng().integers(0, 3, (32, 7)))
    rehearsed = {o.type for o in operations if "divisors" in o.name}
    assert "NotEqual" in rehearsed
    # TensorFlow prunes unused operations, except loops that read variables.
    loop = {"MatMul"} if low == "LSTM" else set()
    assert {"MatMul", "BatchMatMulV2", "Softmax"} & rehearsed == loop


class AddsLoss(keras.layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("data", [2, *seldom([1])])
def test_losses_of_layers(data):
    layers, regularizers = keras.layers, keras.regularizers
    inputs = keras.Input((6,))
    x = layers.Dense(
        8,
        name="low",
        kernel_regularizer=regularizers.L2(0.05),
        activity_regularizer=regularizers.L2(0.02),
    )(inputs)
    x = AddsLoss(name="adds")(x)
    x = layers.Dense(5, name="high", bias_regularizer="l1", activity_regularizer="l1")(x)
    plain = keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))
    layout = kdist.Layout(data=data, pipeline=2, micro_batches=3)
    model = split_in(layout, plain, DENSE, loss=CROSSENTROPY)
    assert_trains_alike(model, plain, *vectors())


class AddsSum(keras.layers.Layer):
    """Adds sums over rows to the loss, one of them as values per row.

    With `is_hidden`, the graph does not tell that the other one is a sum.
    """

    def __init__(self, is_hidden=False, **arguments):
        super().__init__(**arguments)
        self.is_hidden = is_hidden

    def call(self, x):
        total = 0.01 * keras.ops.sum(keras.ops.square(x))
        if self.is_hidden:
            total = keras.ops.sqrt(keras.ops.square(total) + 1e-12)
        self.add_loss(total)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(x), axis=-1))
        return x

    def get_config(self):
        return {**super().get_config(), "is_hidden": self.is_hidden}


def adds_sum(is_hidden=False):
    layers = keras.layers
    low = [layers.Dense(8, name="low"), AddsSum(is_hidden), layers.Dense(4, name="high")]
    return keras.Sequential([keras.Input((6,)), *low])


@pytest.mark.slow
@pytest.mark.parametrize("data", [2, *seldom([1])])
def test_losses_that_are_sums_over_rows(data):
    """Of a layer, and of a function that reduces its values; the last batch has 3 rows."""
    plain = adds_sum()
    squares = lambda y, y_pred: 0.1 * keras.ops.sum(keras.ops.square(y - y_pred))  # noqa: E731
    layout = kdist.Layout(data=data, pipeline=2, micro_batches=3)
    model = split_in(layout, plain, DENSE, loss=squares, optimizer=OPTIMIZERS["adam"])
    x, y = vectors(35)
    assert_trains_alike(model, plain, x, np.eye(4)[y])


@pytest.mark.slow
def test_losses_that_may_be_means_or_sums():
    plain, (x, y) = adds_sum(is_hidden=True), vectors(32)
    y = np.eye(4)[y]
    model = split_in(DENSE_IN, plain, DENSE, loss="mse", loss_reduction="sum")
    assert_trains_alike(model, plain, x, y)
    model = split_in(DENSE_IN, plain, DENSE, loss="mse")
    with pytest.warns(UserWarning, match="may be a mean or a sum"):
        model.fit(x, y, batch_size=BATCH, verbose=0)


def compares_rows(y, y_pred):
    scores = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
    return keras.ops.mean(keras.ops.logsumexp(scores, axis=-1))


def test_losses_of_the_whole_batch():
    """Micro-batches do not have it: gathering is refused, and a loss that compares rows warns."""
    x, y = vectors(BATCH)
    with kdist.create_strategy(DENSE_IN).scope():
        model = split(dense(), DENSE)
    for gather in (True, "step"):
        with pytest.raises(ValueError, match="micro_batches=3"):
            model.compile("sgd", CROSSENTROPY, gather_batch=gather)
    gathers = lambda y, y_pred: compares_rows(y, kdist.gather_batch(y_pred))  # noqa: E731
    with pytest.raises(ValueError, match="micro_batches=1"):
        split_in(DENSE_IN, dense(), DENSE, loss=gathers).fit(x, y, verbose=0)
    with pytest.warns(UserWarning, match="combines rows.*micro_batches=1"):
        split_in(DENSE_IN, dense(), DENSE, loss=compares_rows).fit(x, y, verbose=0)


def test_a_nested_model_over_two_stages():
    layers = keras.layers
    a, b = keras.Input((8,)), keras.Input((6,))
    x = layers.Dense(8, activation="tanh", name="one")(a)
    x = layers.Dense(8, activation="tanh", name="two")(layers.Concatenate(name="join")([x, b]))
    inner = keras.Model([a, b], [x, a * 2.0], name="inner")
    inputs = keras.Input((6,))
    up, side = inner([layers.Dense(8, name="low")(inputs), inputs])
    x = layers.Add(name="sum")([up, side])
    plain = keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))
    placement = {"inner/(join|two|mul.*)": stage(1), "sum": stage(1)}
    model = split_in(DENSE_IN, plain, placement, loss=CROSSENTROPY)
    assert_trains_alike(model, plain, *vectors())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"accumulate": 2}, 74),
        *seldom([({"steps_per_execution": 4}, 64), ({"local_steps": 1}, 64)]),
    ],
    ids=str,
)
def test_the_ways_of_training(arguments, rows):
    plain = dense(kernel_regularizer="l2")
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=3)
    model = split_in(layout, plain, DENSE, loss=CROSSENTROPY, metrics=["accuracy"], **arguments)
    assert_trains_alike(model, plain, *vectors(rows))


def test_mixed_precision_with_a_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plain = dense()
        model = split_in(DENSE_IN, plain, DENSE, loss=CROSSENTROPY)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert_trains_alike(model, plain, *vectors(), tolerance=3e-3)


@pytest.mark.slow
def test_evaluate_and_predict_take_any_batch():
    plain = dense()
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=4)
    model = split_in(layout, plain, DENSE, loss=CROSSENTROPY, metrics=["accuracy"])
    x, y = vectors(33)
    expected = plain.evaluate(x, y, batch_size=10, verbose=0)
    np.testing.assert_allclose(model.evaluate(x, y, batch_size=10, verbose=0), expected, atol=1e-5)
    predictions = model.predict(x, batch_size=10, verbose=0)
    np.testing.assert_allclose(predictions, plain.predict(x, verbose=0), atol=1e-6)


# What sees micro-batches.


@pytest.mark.parametrize("rows", [18, 3])
def test_batch_norm_sees_micro_batches(rows):
    """Statistics are updated after each micro-batch with rows, in order."""
    layers = keras.layers
    norm = layers.BatchNormalization(momentum=0.5, name="norm")
    plain = keras.Sequential(
        [keras.Input((6,)), norm, layers.Dense(8, name="high"), layers.Dense(4, name="head")]
    )
    layout = kdist.Layout(pipeline=2, micro_batches=4)
    model = split_in(layout, plain, DENSE, loss="mse")
    x, _ = vectors(rows)
    mean = np.zeros(6)
    for number in range(4):
        part = x[rows * number // 4 : rows * (number + 1) // 4]
        mean = 0.5 * mean + 0.5 * part.mean(0) if len(part) else mean
    model.fit(x, np.zeros((rows, 4)), batch_size=18, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_layer("norm").moving_mean, mean, atol=1e-6)


class CountsSteps(keras.layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(name="steps", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.steps.assign_add(1.0)
        return x


def test_a_layer_that_counts_steps_counts_micro_batches():
    plain = dense()
    plain = keras.Model(plain.inputs, CountsSteps(name="counts")(plain.outputs))
    model = split_in(DENSE_IN, plain, DENSE, loss=CROSSENTROPY, metrics=["accuracy"])
    with pytest.warns(UserWarning, match="counts/steps.*each of 3 micro-batches"):
        model.fit(*vectors(BATCH), batch_size=BATCH, verbose=0)
    assert model.get_layer("counts").steps.numpy() == 3


def test_dropout_draws_for_each_micro_batch():
    """Equal rows have different masks, and gradients match the masks."""
    layers = keras.layers
    plain = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dropout(0.5, seed=1, name="drop"),
            layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="high"),
        ]
    )
    layout = kdist.Layout(pipeline=2, micro_batches=4)
    loss = lambda y, y_pred: y_pred  # noqa: E731
    model = split_in(layout, plain, DENSE, loss=loss, optimizer=lambda: keras.optimizers.SGD(1.0))
    model.fit(np.ones((8, 6)), np.zeros((8, 1)), batch_size=8, verbose=0)
    dropped = -model.get_weights()[0][:, 0] * 8 / 2  # how often each input was kept
    np.testing.assert_allclose(dropped, np.round(dropped), atol=1e-5)
    assert len(set(np.round(dropped) % 2)) == 2  # two rows that were dropped alike count twice


# Placement.


def types_of_work(operations):
    """Returns {(replica, "forward" or "backward", stage): {device: types of operations}}."""
    found = {}
    for o in operations:
        match = re.search(r"(forward|backward)_\d+_on_stage_(\d)", o.name)
        if match and o.computes:
            key = int("replica_1/" in o.name), match[1], int(match[2])
            found.setdefault(key, {}).setdefault(o.device, set()).add((o.type, o.name))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_stage_is_on_its_device(schedule):
    plain = residual()
    layout = kdist.Layout(data=2, pipeline=2, micro_batches=2, schedule=schedule)
    model = split_in(layout, plain, TWO_STAGES, loss=CROSSENTROPY)
    x, y = images(16)
    with operations_that_run() as operations:
        model.fit(x, y, batch_size=16, verbose=0)
    assert_in_place(model, operations)
    groups = groups_of(model.distribute_strategy)
    work = types_of_work(operations)
    assert set(work) == {
        (replica, kind, number)
        for replica in (0, 1)
        for kind in ("forward", "backward")
        for number in (0, 1)
    }
    for (replica, kind, number), by_device in work.items():
        here = groups[replica][number]
        convolution = "Conv2DBackpropFilter" if kind == "backward" else "Conv2D"
        assert any(convolution in type_ for type_, _ in by_device[here]), (replica, kind, number)
        for device, types in by_device.items():
            heavy = {each for each in types if re.search("Conv2D|MatMul|Tanh|Add", each[0])}
            assert device == here or not heavy, (replica, kind, number, device, heavy)


# Order and overlap.


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_work_in_order_and_at_the_same_time(schedule):
    """Measured: each stage follows the schedule, and holds no more than it allows."""
    layers = keras.layers
    inputs = keras.Input((256,))
    x = inputs
    for name in ("low", "lower", "high", "higher"):
        x = layers.Dense(512, activation="tanh", name=name)(x)
    plain = keras.Model(inputs, layers.Dense(4, name="head")(x))
    layout = kdist.Layout(pipeline=2, micro_batches=4, schedule=schedule)
    with kdist.create_strategy(layout).scope():
        model = split(plain, {"high": stage(1)})
        model.compile("sgd", "mse")
    x = rng().normal(size=(512, 256)).astype("float32")
    y = np.zeros((512, 4), "float32")
    with recorded_timeline() as timeline:
        model.fit(x, y, batch_size=512, epochs=4, verbose=0)
    steps = timeline.steps()
    assert len(steps) == 4
    for step in steps:
        for number in range(2):
            own = [timed for timed in step if timed.work.stage == number]
            assert [timed.work for timed in own] == stage_order(schedule, 2, 4, number)
            for before, after in itertools.pairwise(own):
                assert before.end <= after.start
            assert peak_live([timed.work for timed in own]) == (
                4 if schedule == "gpipe" else 2 - number
            )
        assert 0.0 < waiting_share(step) < 1.0
    assert max(overlapped_share(step) for step in steps[1:]) > 0.05


def test_a_recorded_step_trains_as_any_other():
    plain = dense()
    model = split_in(DENSE_IN, plain, DENSE, loss=CROSSENTROPY)
    with recorded_timeline() as timeline:
        assert_trains_alike(model, plain, *vectors())
    assert len(timeline.steps()) == 10
    assert timeline.steps(replica=1) == []


# What is refused.


def test_layers_and_inputs_of_a_fixed_batch():
    layers = keras.layers
    inputs = keras.Input((7, 2), batch_size=6)
    with kdist.create_strategy(DENSE_IN).scope():
        x = layers.LSTM(4, stateful=True, name="low")(inputs)
        plain = keras.Model(inputs, layers.Dense(3, name="high")(x))
        with (
            pytest.warns(UserWarning, match="batch of 6 rows.*micro_batches=1"),
            pytest.raises(ValueError, match="low.*stateful.*micro_batches=1"),
        ):
            split(plain, DENSE)


def test_a_ragged_tensor_between_stages():
    class Ragged(keras.layers.Layer):
        def call(self, x):
            return tf.RaggedTensor.from_tensor(x)

        def compute_output_spec(self, x):
            return keras.KerasTensor((None, 6))

    class Dense(keras.layers.Layer):
        def call(self, x):
            return x.to_tensor() if isinstance(x, tf.RaggedTensor) else x

    inputs = keras.Input((6,))
    x = Dense(name="high")(Ragged(name="ragged")(inputs))
    plain = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    model = split_in(DENSE_IN, plain, DENSE, loss="mse")
    with pytest.raises(ValueError, match="crosses from stage to stage"):
        model.fit(np.zeros((8, 6)), np.zeros((8, 4)), verbose=0)
