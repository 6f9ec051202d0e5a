"""One trace of a step for all replicas, next to a trace per replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.compat.tensorflow import collect_function_graphs
from kdist.training.replica import shared_trace
from tests.tiers import seldom

layers = keras.layers


class Unseeded(layers.Layer):
    """A layer whose random numbers are not Keras's."""

    def call(self, x):
        return x + 0.0 * tf.random.uniform(tf.shape(x))


class Failing(layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), 5.0)]):
            return tf.identity(x)


def dense(*others):
    return [keras.Input((6,)), layers.Dense(16, "relu"), *others, layers.Dense(3)]


def convolutions():
    convolution = layers.Conv2D(8, 3, use_bias=False)
    rest = [layers.BatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D()]
    return [keras.Input((6, 6, 2)), convolution, *rest, layers.Dropout(0.2), layers.Dense(3)]


def words():
    return [keras.Input((5,), dtype="int32"), layers.Embedding(9, 8), layers.LSTM(8), *dense()[1:]]


def rows(shape, dtype, number=22):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (number, *shape)) if dtype == "int32" else rng.random((number, *shape))
    return x.astype(dtype), rng.integers(0, 3, number)


def train(strategy, make_layers, share_trace, optimizer=None, **options):
    """Returns the losses of two epochs with uneven last batches, and the weights."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        built = keras.Sequential(make_layers())
        model = kdist.Model(built.inputs, built.outputs[0])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or "adam", loss, share_trace=share_trace, **options)
    x, y = rows(model.input_shape[1:], model.inputs[0].dtype)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


@pytest.fixture
def traced(monkeypatch):
    """Names of the parts of a step that were traced for several replicas."""
    names, call = [], shared_trace.SharedTrace.call

    def noted(self, step, part, *args):
        outputs = call(self, step, part, *args)
        names.append((part if isinstance(part, str) else part[0], step.replica))
        return outputs

    monkeypatch.setattr(shared_trace.SharedTrace, "call", noted)
    return names


CLIPPED = {"optimizer": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1)}
CASES = [
    (lambda: dense(layers.Dropout(0.3)), CLIPPED),
    (convolutions, {}),
    *seldom([(words, {}), (convolutions, {"accumulate": 2}), (words, {"steps_per_execution": 2})]),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("make_layers", "options"), CASES)
def test_training_is_that_of_own_traces(mirrored, traced, make_layers, options):
    make_optimizer = options.get("optimizer", lambda: None)
    both = [
        train(mirrored, make_layers, shares, **{**options, "optimizer": make_optimizer()})
        for shares in (False, True)
    ]
    parts = ["passes", "update", *(["state", "average"] if make_layers is convolutions else [])]
    assert set(traced) == {(part, replica) for part in parts for replica in (0, 1)}
    assert both[0][0] == both[1][0]
    for own, shared in zip(both[0][1], both[1][1], strict=True):
        np.testing.assert_array_equal(own, shared)


@pytest.mark.slow
def test_replicas_trace_their_own_where_they_meet_or_draw(mirrored, traced):
    for layer in (lambda: layers.BatchNormalization(synchronized=True), Unseeded):
        own, shared = (
            train(mirrored, lambda layer=layer: dense(layer()), shares) for shares in (False, True)
        )
        assert own[0] == shared[0]
    assert {part for part, _ in traced} == {"update"}


class Twice(kdist.Model):
    """A step of two updates, which differ in an attribute that is no tensor."""

    def train_step(self, data):
        self.factor = 3.0
        super().train_step(data)
        self.factor = 1.0
        return super().train_step(data)

    def compute_loss(self, *args, **kwargs):
        return self.factor * super().compute_loss(*args, **kwargs)


class TwoLosses(kdist.Model):
    """One optimizer updates the same weights twice, and other gradients are None."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        for part in (0, 1):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True)[part] - y))
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


class MeanAndSum(kdist.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return super().compute_loss(x, y, y_pred, *args, **kwargs) + tf.reduce_sum(y_pred**2)


class ReadsLosses(kdist.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "added": sum(self.losses)}


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


def two_heads(inputs):
    return [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)]


def masked(inputs):
    return layers.Dense(3)(layers.Embedding(9, 4, mask_zero=True)(inputs))


SUM = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
PROGRAMS = [
    (Twice, lambda x: layers.Dense(1)(x), "mse", []),
    (TwoLosses, two_heads, None, []),
    *seldom(
        [
            (MeanAndSum, lambda x: layers.Dense(1)(x), "mse", []),
            (ReadsLosses, lambda x: layers.Dense(1)(AddsLoss()(x)), "mse", []),
            (kdist.Model, masked, SUM, ["accuracy"]),
        ]
    ),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model_class", "build", "loss", "metrics"), PROGRAMS)
def test_what_a_program_can_tell_apart(mirrored, model_class, build, loss, metrics):
    dtype = "int32" if build is masked else "float32"
    x, y = rows((6,), dtype, 22)
    y = np.tile(y[:, None] % 3, 6) if build is masked else y[:, None].astype("float32")
    results = []
    for shares in (False, True):
        keras.utils.set_random_seed(0)
        with mirrored.scope():
            inputs = keras.Input((6,), dtype=dtype)
            model = model_class(inputs, build(inputs))
            model.compile(
                keras.optimizers.SGD(0.01), loss, metrics=metrics or None, share_trace=shares
            )
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append((history, model.get_weights()))
    (own, own_weights), (shared, shared_weights) = results
    assert own == shared
    for one, other in zip(own_weights, shared_weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_trace_for_four_replicas_is_smaller():
    sizes = {}
    for shares in (False, True):
        with collect_function_graphs() as functions:
            train(kdist.create_strategy("mirrored", 4), convolutions, shares)
        sizes[shares] = max(len(function.post_optimization_graph.node) for function in functions)
    assert sizes[True] < 0.6 * sizes[False]


def test_a_hidden_error_says_how_to_see_it(mirrored):
    with mirrored.scope():
        built = keras.Sequential(dense(Failing()))
        model = kdist.Model(built.inputs, built.outputs[0])
        model.compile("adam", "mse", share_trace=True)
    x, y = 100.0 * np.ones((8, 6)), np.ones((8, 3))
    with pytest.raises(tf.errors.OpError) as raised:
        model.fit(x, y, batch_size=8, verbose=0)
    is_cancelled = isinstance(raised.value, tf.errors.CancelledError)
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert is_cancelled == ("share_trace=False" in notes)
