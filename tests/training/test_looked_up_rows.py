"""Gradients of looked-up rows have the slices of one device, which optimizers square one by one."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.testing import assert_same_weights
from tests.tiers import seldom

WORDS, LENGTH = 7, 5
_draw = np.random.default_rng(0)
X = _draw.integers(0, WORDS, (22, LENGTH)).astype("int32")
Y = X.sum(1, keepdims=True) / 10 - 1
OPTIMIZERS = {
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.02),
    "AdamW": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01),
    "Adamax": lambda: keras.optimizers.Adamax(0.02),
    "AMSGrad": lambda: keras.optimizers.Adam(0.02, amsgrad=True),
    "EMA": lambda: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.02),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.02),
    "Nadam": lambda: keras.optimizers.Nadam(0.02),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.02, centered=True, momentum=0.5),
    "SGD": lambda: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
    "accumulation": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
    "clipnorm": lambda: keras.optimizers.Adam(0.02, clipnorm=0.05, epsilon=1e-3),
    "clipvalue": lambda: keras.optimizers.Adam(0.02, clipvalue=0.01, epsilon=1e-3),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.1, epsilon=1e-3),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02)),
}


class Looked(keras.layers.Layer):
    """Adds an embedding of words and one of positions; one table may serve as both."""

    def __init__(self, positions, is_shared=False):
        super().__init__()
        self.positions, self.is_shared = positions, is_shared
        self.words = keras.layers.Embedding(WORDS, 3)
        self.places = self.words if is_shared else keras.layers.Embedding(LENGTH, 3)

    def build(self, shape):
        self.words.build(None)
        self.places.build(None)
        self.built = True

    def call(self, x):
        return self.words(x) + self.places(self.positions(x))


POSITIONS = {
    "constant": lambda x: keras.ops.arange(LENGTH),
    "length": lambda x: tf.range(tf.shape(x)[1]),
    "one row": lambda x: tf.range(LENGTH)[None],
    "per row": lambda x: tf.tile(tf.range(LENGTH)[None], [tf.shape(x)[0], 1]),
    "counted": lambda x: tf.cumsum(tf.ones_like(x), axis=1) - 1,
    "zeros of words": lambda x: tf.zeros_like(x),
}


@pytest.fixture(autouse=True)
def _float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def trained(model_class, positions, optimizer, strategy=None, is_shared=False, rows=8, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = Looked(POSITIONS[positions], is_shared)(inputs)
        x = keras.layers.Flatten()(keras.layers.Dense(2, activation="tanh")(x))
        model = model_class(inputs, keras.layers.Dense(1)(x))
        model.compile(OPTIMIZERS[optimizer](), "mse", **options)
    model.fit(X[: 4 * rows], Y[: 4 * rows], batch_size=rows, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


def assert_equal(
    positions, optimizer, replicas=2, is_shared=False, tolerance=1e-6, rows=8, **options
):
    expected = trained(keras.Model, positions, optimizer, is_shared=is_shared, rows=rows)
    strategy = kdist.create_strategy("mirrored", replicas)
    weights = trained(kdist.Model, positions, optimizer, strategy, is_shared, rows, **options)
    assert_same_weights(weights, expected, tolerance)


SOME_POSITIONS = ["length", "per row", "counted"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "positions", [*SOME_POSITIONS, *seldom(POSITIONS, other_than=SOME_POSITIONS)]
)
def test_slices_are_those_of_one_device(positions):
    assert_equal(positions, "Adam")


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["constant", *seldom(["per row"])])
def test_micro_steps_keep_slices(positions):
    assert_equal(positions, "Adam", accumulate=2)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["one row", *seldom(["counted"])])
def test_replicas_of_one_row(positions):
    assert_equal(positions, "Adam", rows=2)
    assert_equal(positions, "Adam", rows=4, accumulate=2)


@pytest.mark.slow
def test_a_table_of_words_and_positions():
    assert_equal("constant", "Adam", is_shared=True)
    assert_equal("constant", "Adagrad", is_shared=True, accumulate=2)


@pytest.mark.parametrize(
    ("optimizer", "replicas"), seldom(zip(OPTIMIZERS, itertools.cycle([2, 3])))
)
def test_optimizers_see_the_slices_of_one_device(optimizer, replicas):
    assert_equal("length", optimizer, replicas, is_shared=True)
    assert_equal("constant", optimizer, replicas, accumulate=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 3}, *seldom([{"jit_compile": True}])], ids=str
)
def test_options_keep_slices(options):
    assert_equal("length", "Adam", **options)
    assert_equal("constant", "RMSprop", 3, accumulate=2, **options)
