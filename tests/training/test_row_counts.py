"""Values that a program computes from the number of rows, which may be a constant."""

import copy
import functools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from tests.caught import no_warnings

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


class CountsRows(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="rows")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return self.rows


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.rows = self.add_weight(initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(tf.cast(tf.shape(x)[0], "float32"))
        return x


class Counts(keras.Model):
    """Has a loss, logs, and Keras's metrics that are computed from the number of rows."""

    def __init__(self, loss):
        super().__init__()
        self.counting, self.dense = Counting(), keras.layers.Dense(1)
        self.loss_of = loss
        self.mean, self.sum = keras.metrics.Mean("mean"), keras.metrics.Sum("sum")
        self.steps, self.own = keras.metrics.Sum("steps"), CountsRows()

    def call(self, x):
        return self.dense(self.counting(x))

    def train_step(self, x):
        rows = tf.shape(x)[0]
        number = tf.cast(rows, "float32")
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - x[:, :1])
            loss = self.loss_of(errors, number, tf.reduce_sum(self.dense.kernel**2))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.update_state(rows)
        self.sum.update_state(tf.reduce_mean(errors))
        self.steps.update_state(1.0)
        self.own.update_state(x, x)
        metrics = {m.name: m.result() for m in (self.mean, self.sum, self.steps, self.own)}
        positive = tf.reduce_sum(tf.cast(x > 0, tf.int32))
        return {**metrics, "rows": rows, "positive": positive, "ones": tf.size(x[:, 0])}


# Functions of the errors of rows, of their number, and of weights.
LINEAR = {
    "a mean times the number": lambda errors, n, _: tf.reduce_mean(errors) * n,
    "a mean of products": lambda errors, n, _: tf.reduce_mean(errors * n),
    "a sum of quotients": lambda errors, n, _: tf.reduce_sum(errors / n),
}
NONLINEAR = {
    "a penalty by the number": lambda errors, n, p: tf.reduce_mean(errors) + p / n,
    "a root by the number": lambda errors, n, _: tf.reduce_mean(errors) / tf.sqrt(n),
}


def trained(strategy, function, drop_remainder, new=Counts, **options):
    """Returns the weights after two epochs, and the logs."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = kdist.Model.of(new(function))
        model.compile(keras.optimizers.SGD(0.05), **options)
    data = tf.data.Dataset.from_tensor_slices(X).batch(8, drop_remainder=drop_remainder)
    history = model.fit(data, epochs=2, verbose=0).history
    return {**history, **dict(enumerate(model.get_weights()))}


def check(function, strategy, drop_remainder, new=Counts, loss=None, **options):
    one_device = kdist.create_strategy("one_device")
    expected = trained(one_device, function, drop_remainder, new, loss=loss)
    found = trained(strategy, function, drop_remainder, new, loss=loss, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=str(name))


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("loss", [*LINEAR, *NONLINEAR])
def test_two_replicas_count_the_rows_of_the_batch(mirrored, loss, drop_remainder):
    check({**LINEAR, **NONLINEAR}[loss], mirrored, drop_remainder)


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
@pytest.mark.parametrize("loss", LINEAR)
def test_micro_batches_count_the_rows_of_the_batch(mirrored, name, loss):
    strategy = mirrored if name == "mirrored" else kdist.create_strategy(name)
    with no_warnings(message="micro-"):
        check(LINEAR[loss], strategy, drop_remainder=True, accumulate=2)


@pytest.mark.parametrize("loss", NONLINEAR)
def test_functions_of_the_number_of_rows_warn_of_micro_batches(loss):
    with pytest.warns(UserWarning, match="accumulate=1"):
        trained(kdist.create_strategy("one_device"), NONLINEAR[loss], True, accumulate=2)


def test_constants_of_dropout_and_penalties_are_no_numbers_of_rows(mirrored):
    """The step is traced once, and not again with an unknown number of rows."""
    penalty = keras.regularizers.L1L2(1e-4, 1e-4)
    layers = [keras.layers.Dense(8, kernel_regularizer=penalty), keras.layers.Dropout(0.5)]
    with mirrored.scope():
        inputs = keras.Input((4,))
        model = kdist.Model(inputs, keras.layers.Dense(1)(layers[1](layers[0](inputs))))
        model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8, drop_remainder=True)
    model.fit(data, verbose=0)
    assert model.training_state.hides_rows is None


class Scales(keras.Model):
    """Changes its gradients by a function of the number of rows."""

    def __init__(self, change, loss=tf.reduce_mean):
        super().__init__()
        self.dense, self.change, self.loss_of = keras.layers.Dense(1), change, loss

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        number = tf.cast(tf.shape(x)[0], "float32")
        with tf.GradientTape() as tape:
            loss = self.loss_of(tf.square(self(x, training=True) - x[:, :1]))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        changed = [self.change(g, number, w) for g, w in zip(gradients, weights, strict=True)]
        self.optimizer.apply(changed, weights)
        return {"loss": loss}


SCALES = {
    "quotient": lambda g, n, w: g / n,
    "root": lambda g, n, w: g * tf.sqrt(n) / 4.0,
    "clipped": lambda g, n, w: tf.clip_by_norm(g, 1.0 / n),
    "with a penalty": lambda g, n, w: g + w / n,
}


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("change", SCALES)
def test_gradients_are_changed_by_the_number_of_rows_of_the_batch(mirrored, change, drop_remainder):
    reduced = tf.reduce_sum if drop_remainder else tf.reduce_mean
    new = functools.partial(Scales, loss=reduced)
    check(SCALES[change], mirrored, drop_remainder, new)


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_micro_batches_multiply_gradients_by_the_number_of_rows(mirrored, name):
    def product(g, n, w):
        return 0.1 * g * n

    strategy = mirrored if name == "mirrored" else kdist.create_strategy(name)
    with no_warnings(message="micro-"):
        check(product, strategy, True, Scales, accumulate=2)


def test_other_functions_of_the_number_of_rows_warn_of_micro_batches():
    with pytest.warns(UserWarning, match="accumulate=1"):
        trained(kdist.create_strategy("one_device"), SCALES["root"], True, Scales, accumulate=2)


class ScaledRows(keras.Model):
    """Divides weights and values of rows by the number of rows."""

    def __init__(self, scale):
        super().__init__()
        self.dense, self.scale = keras.layers.Dense(1), scale
        self.mean, self.sum = keras.metrics.Mean("mean"), keras.metrics.Sum("sum")

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        ones = tf.ones([tf.shape(x)[0]])
        number = tf.cast(tf.shape(x)[0], "float32")
        with tf.GradientTape() as tape:
            y = self(x, training=True)
            loss = self.compute_loss(x, x[:, :1], y, self.scale(ones, number))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.update_state(y[:, 0], self.scale(ones, number))
        self.sum.update_state(self.scale(tf.square(y[:, 0]), number))
        return {"value": loss, "mean": self.mean.result(), "sum": self.sum.result()}


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_weights_and_values_of_rows_are_divided_by_the_rows_of_the_batch(
    mirrored, drop_remainder, options
):
    def scale(values, number):
        return values / number

    check(scale, mirrored, drop_remainder, ScaledRows, loss="mse", **options)


class AddsPenalty(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(initializer="ones")

    def call(self, x):
        self.add_loss(self.scale**2 / tf.cast(tf.shape(x)[0], "float32"))
        return self.scale * x


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_losses_of_layers_by_the_number_of_rows_warn_of_micro_batches(mirrored, name):
    strategy = mirrored if name == "mirrored" else kdist.create_strategy(name)
    with strategy.scope():
        model = kdist.Model.of(keras.Sequential([keras.Input((4,)), AddsPenalty()]))
        model.compile("sgd", "mse", accumulate=2)
    with pytest.warns(UserWarning, match="accumulate=1"):
        model.fit(X, X, batch_size=8, verbose=0)


class SumOfRoots(keras.metrics.Metric):
    """Adds the root of each batch's mean, once per row."""

    def __init__(self):
        super().__init__(name="roots")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = tf.cast(tf.shape(y_pred)[0], "float32")
        self.total.assign_add(tf.sqrt(tf.reduce_mean(y_pred**2)) * rows)

    def result(self):
        return self.total


def divided(y_true, y_pred):
    return y_pred[:, 0] / tf.cast(tf.shape(y_pred)[0], "float32")


def compared(y_true, y_pred):
    return tf.abs(y_pred[:, 0] - tf.reduce_max(y_pred[:, 0]))


def results(strategy, x, size, metrics, **options):
    with strategy.scope():
        model = kdist.Model.of(keras.Sequential([keras.Input((4,)), keras.layers.Identity()]))
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics(), **options)
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(size)
    return {name: value[-1] for name, value in model.fit(data, verbose=0).history.items()}


def test_metrics_of_batches_of_other_sizes_count_their_rows(mirrored):
    """7 rows are 4 and 3, and the last replica has all of one row."""
    one_device = kdist.create_strategy("one_device")
    expected, found = (
        results(s, X[:15], 7, lambda: [divided, compared]) for s in (one_device, mirrored)
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_micro_batches_of_replicas_add_up_functions_once_per_row(mirrored):
    """All rows are equal, so that micro-batches have the root of the batch."""
    x, one_device = np.ones_like(X), kdist.create_strategy("one_device")
    expected, found = (
        results(s, x, 8, lambda: [SumOfRoots()], accumulate=2) for s in (one_device, mirrored)
    )
    assert found == pytest.approx(expected, rel=1e-5)


class ReadsShapes(keras.Model):
    """Has a loss that Python computes from the static number of rows."""

    def __init__(self, loss):
        super().__init__()
        self.dense, self.loss_of = keras.layers.Dense(1), loss

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - x[:, :1])
            loss = self.loss_of(errors, tf.reduce_sum(self.dense.kernel**2), x)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"value": loss}


# Functions of the errors of rows, of a penalty, and of the batch.
OF_SHAPES = {
    "a quotient": lambda errors, p, x: tf.reduce_mean(errors) + p / x.shape[0],
    "a difference": lambda errors, p, x: tf.reduce_sum(errors) / (x.shape[0] - 1),
    "a root": lambda errors, p, x: tf.reduce_mean(errors) + p * x.shape[0] ** -0.5,
    "a ratio": lambda errors, p, x: tf.reduce_mean(errors) * (x.shape[0] / (x.shape[0] - 1)),
    "a list": lambda errors, p, x: tf.reduce_mean(errors) + p / sum(x.shape.as_list()),
    "get_shape": lambda errors, p, x: tf.reduce_mean(errors) + p / (1 + x.get_shape()[0]),
    "keras.ops": lambda errors, p, x: tf.reduce_mean(errors) + p / keras.ops.shape(errors)[0],
    "a transposed batch": lambda errors, p, x: (
        tf.reduce_mean(errors) + p / tf.transpose(x).shape[1]
    ),
    "a constant": lambda errors, p, x: (
        tf.reduce_mean(errors) + p / tf.constant(x.shape[0], p.dtype)
    ),
    "a list of constants": lambda errors, p, x: (
        tf.reduce_mean(errors) + p / tf.constant([2.0, x.shape[0]])[1]
    ),
    "a list of tensors": lambda errors, p, x: (
        tf.reduce_mean(errors) + p / tf.convert_to_tensor([p, 1 / x.shape[0]])[1]
    ),
    "a stack": lambda errors, p, x: (
        tf.reduce_mean(errors) + p / tf.cast(tf.stack([x.shape[0], 2])[0], p.dtype)
    ),
    "a cast": lambda errors, p, x: tf.reduce_mean(errors) + p / tf.cast(7 * x.shape[0], p.dtype),
    "an operation of Keras": lambda errors, p, x: (
        tf.reduce_mean(errors) + keras.ops.divide(p, x.shape[0] + 2)
    ),
    "a large number": lambda errors, p, x: tf.reduce_mean(errors) * x.shape[0] * 2**40 / 2**43,
    "a sign": lambda errors, p, x: tf.reduce_mean(errors) - 0.1 * p * -x.shape[0],
    "an absolute value": lambda errors, p, x: tf.reduce_mean(errors) + p / abs(1 - x.shape[0]),
    "rounding": lambda errors, p, x: tf.reduce_mean(errors) + p / round(x.shape[0] / 3),
    "rounding up": lambda errors, p, x: tf.reduce_mean(errors) + p / math.ceil(x.shape[0] / 3),
    "a remainder": lambda errors, p, x: tf.reduce_mean(errors) + p / sum(divmod(x.shape[0], 3)),
    "at least one": lambda errors, p, x: tf.reduce_mean(errors) + p / max(x.shape[0] - 1, 1),
    "a decision": lambda errors, p, x: tf.reduce_mean(errors) if x.shape[0] > 1 else p,
    "reshape": lambda errors, p, x: tf.reduce_mean(tf.reshape(errors, (x.shape[0] * 1,))),
    "a half": lambda errors, p, x: tf.reduce_mean(
        errors[: x.shape[0] // 2] * errors[x.shape[0] // 2 :]
    ),
    "zeros": lambda errors, p, x: tf.reduce_mean(errors + tf.zeros([x.shape[0], 1])),
    "another axis": lambda errors, p, x: tf.reduce_mean(errors) + p / (x.shape[1] + 1),
    "another tensor": lambda errors, p, x: (
        tf.reduce_mean(errors) + p / len(np.ones(x.shape[1] + 4))
    ),
}


@pytest.mark.parametrize("loss", OF_SHAPES)
def test_python_computes_with_the_static_number_of_rows_of_the_batch(mirrored, loss):
    with no_warnings(message="whole batch"):
        check(OF_SHAPES[loss], mirrored, True, ReadsShapes)


def off_diagonal(x, rows):
    return tf.reduce_mean((1 - tf.eye(rows)) * tf.matmul(x, x, transpose_b=True))


# The step is traced again with an unknown number of rows, which the program does not expect.
WITH_HIDDEN_ROWS = {
    "a question": lambda errors, p, x: (
        p * tf.reduce_mean(errors)
        if x.shape[0] is None
        else p * off_diagonal(errors, x.shape[0]) + tf.reduce_mean(errors)
    ),
    "a replacement": lambda errors, p, x: p * off_diagonal(errors, next(iter(x.shape)) or 1),
    "a mask": lambda errors, p, x: tf.reduce_mean(
        tf.sequence_mask([3], x.shape.as_list()[0], dtype="float32") @ errors
    ),
    "equal shapes": lambda errors, p, x: (
        p * off_diagonal(errors, x.shape[0])
        if x.shape[:1] == errors.shape[:1] and x.shape[0] == errors.shape[0]
        else p
    ),
    "other axes": lambda errors, p, x: (
        p * off_diagonal(errors, tf.shape(x)[0]) * x.shape[1] * len(x.shape) * x.shape[1:][0]
    ),
}


@pytest.mark.parametrize("loss", WITH_HIDDEN_ROWS)
@pytest.mark.filterwarnings("ignore:.*whole batch")
def test_programs_read_no_none_as_the_static_number_of_rows(mirrored, loss):
    check(WITH_HIDDEN_ROWS[loss], mirrored, True, ReadsShapes)


# By what knows no tensors, or for positions of rows.
AS_NUMBERS = {
    "NumPy": lambda errors, p, x: tf.reduce_mean(errors) + p / np.sqrt(x.shape[0]),
    "math": lambda errors, p, x: tf.reduce_mean(errors) + p / math.sqrt(x.shape[0] - 1),
    "int": lambda errors, p, x: tf.reduce_mean(errors) + p / int(x.shape[0] / 2),
    "a decision": lambda errors, p, x: tf.reduce_mean(errors) + (p if x.shape[0] > 6 else 0),
    "a table": lambda errors, p, x: tf.reduce_mean(errors) + p / {4: 5, 8: 3}[x.shape[0]],
    "at most six": lambda errors, p, x: tf.reduce_mean(errors) + p / min(x.shape[0], 6),
    "a shift": lambda errors, p, x: tf.reduce_mean(errors) + p / (x.shape[0] << 1),
    "a loop": lambda errors, p, x: sum(errors[i, 0] for i in range(x.shape[0])) / x.shape[0],
}


@pytest.mark.parametrize("loss", AS_NUMBERS)
def test_the_static_number_of_rows_is_a_number_of_python(mirrored, loss):
    with pytest.warns(UserWarning, match="whole batch"):
        check(AS_NUMBERS[loss], mirrored, True, ReadsShapes)


def test_what_numpy_computes_from_the_number_of_rows_warns_of_micro_batches():
    one_device = kdist.create_strategy("one_device")
    with pytest.warns(UserWarning, match="NumPy"):
        trained(one_device, AS_NUMBERS["NumPy"], True, ReadsShapes, accumulate=2)


def more_than_rows(x):
    return tf.cast(tf.shape(x)[0] + 1, "float32")


class AddsToRows(keras.layers.Layer):
    """Adds a number to all rows that is computed from theirs."""

    def build(self, shape):
        self.offset = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x + self.offset / more_than_rows(x)


# Losses and layers whose values of each row depend on the number of rows.
OF_ROWS = {
    "quotient": lambda y, p: tf.reduce_sum((y - p) ** 2, 1) / more_than_rows(y),
    "sum": lambda y, p: tf.reduce_mean((y - p) ** 2, 1) + 1 / more_than_rows(y),
    "size": lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.cast(tf.size(y) + 2, "float32"),
    "layer": "mse",
}


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.filterwarnings("ignore:.*whole batch")
def test_values_of_rows_depend_on_the_number_of_rows_of_the_batch(mirrored, name, drop_remainder):
    data = tf.data.Dataset.from_tensor_slices((X, X[::-1])).batch(8, drop_remainder=drop_remainder)
    results = []
    for strategy in (kdist.create_strategy("one_device"), mirrored):
        keras.utils.set_random_seed(0)
        layers = [AddsToRows()] if name == "layer" else []
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(4)])
            model = kdist.Model.of(model)
            model.compile(keras.optimizers.SGD(0.05), OF_ROWS[name])
        history = model.fit(data, epochs=2, verbose=0).history["loss"]
        results.append([*model.get_weights(), history, model.predict(data, verbose=0)])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_replicas_with_the_whole_batch_read_an_unknown_number_of_rows_as_none(mirrored):
    """The second replica has no rows of its own, which is no number that is hidden from it."""

    def loss(errors, penalty, x):
        if x.shape[0] is not None and x.shape[0] != 8:
            raise ValueError(x.shape[0])
        return tf.reduce_mean(errors) + penalty

    check(loss, mirrored, False, ReadsShapes, gather_batch="step")


def test_a_number_of_rows_outside_of_its_step_is_a_plain_number(mirrored):
    """A program may keep it, and use it between steps, or copy it into a configuration."""
    kept = []

    def loss(errors, penalty, x):
        kept.append(x.shape[0])
        return tf.reduce_mean(errors)

    trained(mirrored, loss, True, ReadsShapes)
    assert set(kept) == {4}
    assert tf.reduce_sum(tf.ones(()) / (kept[0] - 1)).numpy() == pytest.approx(1 / 3)
    assert type(copy.copy(kept[0])) is int
    assert json.dumps(kept[:1]) == "[4]"
