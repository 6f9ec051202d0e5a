"""Metrics of a program's own: equal to one device, or refused."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist

_draw = np.random.default_rng(0)
X = _draw.normal(size=(22, 3)).astype("float32")
Y = X.sum(1, keepdims=True) + _draw.normal(size=(22, 1)).astype("float32")


class Own(keras.metrics.Metric):
    """A quotient of two numbers, which `update` changes."""

    def __init__(self, update, name="own", dtype="float32"):
        super().__init__(name=name)
        self.n = self.add_weight(name="n", initializer="zeros", dtype=dtype)
        self.d = self.add_weight(name="d", initializer="zeros", dtype=dtype)
        self.update = update

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.update(self, tf.reshape(tf.abs(y_true - y_pred), [-1]))

    def result(self):
        return tf.math.divide_no_nan(tf.cast(self.n, "float32"), tf.cast(self.d, "float32"))


class OfKeras(keras.metrics.Mean):
    """A subclass that changes what is averaged."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(tf.abs(y_true - y_pred) ** 3)


class Several(Own):
    """Returns several results."""

    def result(self):
        return {"total": self.n + 0.0, "count": self.d + 0.0}


class WithoutAddWeight(Own):
    """Creates its variables itself; each replica has its own copies, which are not added up."""

    def __init__(self, update):
        super().__init__(update)
        self.n = keras.Variable(0.0, trainable=False)
        self.d = keras.Variable(0.0, trainable=False)

    def reset_state(self):
        self.n.assign(0.0)
        self.d.assign(0.0)


def assigned_sums(metric, errors):
    metric.n.assign(metric.n + tf.reduce_sum(errors))
    metric.d.assign(metric.d + tf.cast(tf.size(errors), "float32"))


def means_of_batches(metric, errors):
    metric.n.assign_add(tf.reduce_mean(errors))
    metric.d.assign_add(1.0)


def ratios_of_batches(metric, errors):
    is_large = tf.cast(errors > 1, "float32")
    metric.n.assign_add(tf.reduce_sum(errors * is_large) / (tf.reduce_sum(is_large) + 1.0))
    metric.d.assign(metric.d + 1)


def counts(metric, errors):
    metric.n.assign_add(tf.reduce_sum(tf.cast(errors > 1, "int32")))
    metric.d.assign(metric.d + 1)


def largest_of_batches(metric, errors):
    (two,) = tf.unstack(tf.math.top_k(errors[None], 2).values)
    most = tf.math.top_k(errors, 1).values
    metric.n.assign_add(tf.reduce_sum(two) + tf.cast(tf.cast(8 * most[0], "int32"), "float32"))
    metric.d.assign_add(tf.cast(tf.cast(0.6 * number_of(errors), "int32"), "float32"))


def number_of(errors):
    return tf.cast(tf.shape(errors)[0], "float32")


class Largest(keras.metrics.Metric):
    """Adds up the two largest errors of each batch, in order."""

    def __init__(self):
        super().__init__(name="own")
        self.sums = self.add_weight(name="sums", shape=(2,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign_add(tf.math.top_k(tf.abs(y_true - y_pred)[:, 0], 2).values)

    def result(self):
        return self.sums[0] + 10 * self.sums[1]


METRICS = {
    "assigned sums": lambda: Own(assigned_sums),
    "means of batches": lambda: Own(means_of_batches),
    "integers": lambda: Own(counts, dtype="int32"),
    "of Keras": lambda: OfKeras(name="own"),
    "several": lambda: Several(means_of_batches),
    "without add_weight": lambda: WithoutAddWeight(means_of_batches),
    "ratios of batches": lambda: Own(ratios_of_batches),
    "largest and rounded": lambda: Own(largest_of_batches),
    "vector of the largest": Largest,
    "a function": lambda: lambda y_true, y_pred: tf.reduce_max(y_pred, -1),
}


def logs_of(model_class, metric, strategy=None, rows=22, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_class(*[keras.Input((3,))] * 2)
        outputs = keras.layers.Dense(1)(model.inputs[0])
        model = model_class(model.inputs, outputs)
        model.compile("sgd", "mse", metrics=["mae", metric()], **options)
    x, y = X[:rows], Y[:rows]
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    return {**history, **model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)}


LAYOUTS = [(3, {"rows": 16}), (2, {"rows": 17}), (2, {"rows": 16}), (2, {"accumulate": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [(name, 2, {}) for name in METRICS]
    + [
        pytest.param(name, *layout, marks=mark)
        for name, layout, mark in zip(
            METRICS,
            itertools.cycle(LAYOUTS),
            itertools.cycle([pytest.mark.slow, *2 * [pytest.mark.exhaustive]]),
            strict=False,
        )
    ],
)
def test_logs_are_those_of_one_device(name, replicas, options):
    rows = options.get("rows", 22)
    expected = logs_of(keras.Model, METRICS[name], rows=rows)
    logs = logs_of(
        kdist.Model, METRICS[name], kdist.create_strategy("mirrored", replicas), **options
    )
    # Keras sorts the results of one metric among themselves only.
    assert list(logs) == list(expected) if name != "several" else logs.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values, rtol=2e-5, err_msg=key)


def largest(metric, errors):
    metric.n.assign(tf.maximum(metric.n, tf.reduce_max(errors)))
    metric.d.assign(tf.ones_like(metric.d))


def test_a_metric_that_replicas_cannot_add_up_is_refused():
    with pytest.raises(ValueError, match="increment"):
        logs_of(kdist.Model, lambda: Own(largest), kdist.create_strategy("mirrored", 2))


def corrected_mean(metric, errors):
    metric.d.assign_add(number_of(errors))
    metric.n.assign_add(tf.reduce_sum(errors - metric.n) / metric.d)


def test_a_metric_that_computes_with_its_state_is_refused():
    with pytest.raises(ValueError, match="own state"):
        logs_of(kdist.Model, lambda: Own(corrected_mean), kdist.create_strategy("mirrored", 2))


class WithVariable(OfKeras):
    def __init__(self):
        super().__init__()
        self.kept = tf.Variable(0.0)


def test_a_metric_with_a_variable_of_tensorflow_is_refused():
    with pytest.raises(ValueError, match="add_weight"):
        logs_of(kdist.Model, WithVariable, kdist.create_strategy("mirrored", 2))


def tracked(model_class):
    """Returns a class whose logs are no metrics of the model by name, and values of a batch."""

    class Tracked(model_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean(name="tracker")

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                errors = tf.abs(self(x) - y)
                loss = tf.reduce_mean(errors)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.tracker.update_state(errors)
            return {
                "z": self.tracker.result(),
                "loss": loss,
                "total": tf.reduce_sum(errors),
                "rate": self.optimizer.learning_rate + 0.0,
            }

    return Tracked


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=str)
def test_logs_of_a_custom_step(options):
    def logs_of(strategy, **options):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            inputs = keras.Input((3,))
            own = tracked(kdist.Model if strategy else keras.Model)
            model = own(inputs, keras.layers.Dense(1)(inputs))
            model.compile("sgd", **options)
        return model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history

    expected, logs = logs_of(None), logs_of(kdist.create_strategy("mirrored", 2), **options)
    assert list(logs) == list(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values, rtol=1e-5, err_msg=key)
