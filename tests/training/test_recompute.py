"""Recomputed activations: `keras.RematScope`, `keras.remat`, and `tf.recompute_grad` in a step.

Keras on TensorFlow alone fails in most of these programs, or computes another gradient. Expected
are the numbers of the same model without recomputation.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.compat.tensorflow import collect_function_graphs
from kdist.testing import assert_same_weights
from tests.tiers import seldom

layers = keras.layers

WORDS, LENGTH, WIDTH = 20, 5, 8


class Block(layers.Layer):
    """A transformer's block, with the mask of its inputs, dropout, and moving statistics."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, WIDTH)
        self.norm = layers.BatchNormalization()
        self.dense = layers.Dense(WIDTH, "tanh")
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, inputs, training=None):
        x = inputs + self.attention(inputs, inputs)
        x = self.norm(x, training=training)
        return x + self.dropout(self.dense(x), training=training)


class OwnBlock(Block):
    """A block that recomputes a part of itself, which has keywords and several results."""

    decorate = staticmethod(keras.remat)

    def build(self, shape):
        self.part = self.decorate(self._part)
        super().build(shape)

    def _part(self, inputs, *, training, factor):
        return {"x": factor * super().call(inputs, training=training), "number": LENGTH}

    def call(self, inputs, training=None):
        found = self.part(inputs, training=training, factor=tf.constant(2.0))
        return found["x"] / found["number"]


class OwnBlockOfTensorFlow(OwnBlock):
    decorate = staticmethod(lambda function: tf.recompute_grad(function))


class NotRecomputed(OwnBlock):
    decorate = staticmethod(lambda function: function)


def network(block):
    keras.utils.set_random_seed(5)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    x = block(x)
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return kdist.Model(inputs, outputs)


def trained(strategy, block, **options):
    with strategy.scope():
        model = network(block)
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", **options)
    generator = np.random.default_rng(3)
    x, y = generator.integers(0, WORDS, (22, LENGTH)), generator.integers(0, 3, 22)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


def of_scope(*args):
    """Returns a block that was created in a `keras.RematScope`."""
    with keras.RematScope(mode="full"):
        block = Block()
    return block(*args)


def strategy(name):
    if name in ("optimizer", "weights"):
        return kdist.create_strategy(kdist.Layout(data=2, shard=name, min_shard_bytes=64))
    return kdist.create_strategy(name, 1 if name == "one_device" else 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one_device", {}),
        ("mirrored", {"run_eagerly": True}),
        ("mirrored", {}),
        ("one_device", {"accumulate": 2, "steps_per_execution": 2}),
        ("weights", {}),
        *seldom([("mirrored", {"accumulate": 2}), ("optimizer", {}), ("central_storage", {})]),
    ],
)
def test_a_recomputed_step_computes_the_same(name, options):
    recomputed = trained(strategy(name), of_scope, **options)
    expected = trained(strategy(name), lambda x: Block()(x), **options)
    for one, other in zip(recomputed.variables, expected.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-5, err_msg=one.path)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("mirrored", OwnBlockOfTensorFlow),
        ("weights", OwnBlock),
        *seldom([("mirrored", OwnBlock), ("weights", OwnBlockOfTensorFlow)]),
    ],
)
def test_a_part_of_a_layer_is_recomputed(name, block):
    recomputed = trained(strategy(name), lambda x: block()(x))
    expected = trained(strategy(name), lambda x: NotRecomputed()(x))
    assert_same_weights(recomputed.get_weights(), expected.get_weights(), 1e-5)


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_the_loss_of_recomputed_probabilities_is_computed_from_logits(name):
    """Of probabilities alone, Keras limits cross-entropies to 16, with gradients of 0."""
    generator = np.random.default_rng(3)
    x, y = generator.normal(size=(16, WIDTH)), generator.integers(0, 3, 16)
    results = []
    for scope in (contextlib.nullcontext(), keras.RematScope(mode="full")):
        keras.utils.set_random_seed(5)
        with strategy(name).scope():
            inputs = keras.Input((WIDTH,))
            large = keras.initializers.RandomNormal(0.0, 300.0)
            with scope:
                head = layers.Dense(3, "softmax", kernel_initializer=large)
            model = kdist.Model(inputs, head(layers.Dense(WIDTH)(inputs)))
            model.compile(keras.optimizers.SGD(1e-4), "sparse_categorical_crossentropy")
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        results.append([*model.get_weights(), history["loss"]])
    assert results[0][-1][0] > 17
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_graph", [False, True])
def test_arguments_may_be_variables_numbers_and_arrays(in_graph):
    """Also outside of a training, once there has been a strategy."""
    kdist.create_strategy("one_device")
    weight, factor = tf.Variable([1.0, 2.0]), keras.Variable(3.0)

    def function(x, weight, scale=1.0, *, factor):
        return x * weight * scale * factor

    def gradients(called):
        with tf.GradientTape() as tape:
            y = called(np.float32([5.0, 7.0]), weight, 2.0, factor=factor)
            y = called(y, weight, scale=weight, factor=factor)
        return tape.gradient(y, [weight, factor.value])

    compute = tf.function(gradients) if in_graph else gradients
    expected, found = (compute(f) for f in (function, tf.recompute_grad(function)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other)


def executed(recompute):
    """Returns the types of the operations in the executed graphs of a training step."""
    scope = keras.RematScope("full") if recompute else contextlib.nullcontext()
    with kdist.create_strategy("one_device").scope():
        inputs = x = keras.Input((WIDTH,))
        with scope:
            for _ in range(4):
                x = layers.Dense(WIDTH, keras.ops.exp, kernel_initializer="zeros")(x)
        model = kdist.Model(inputs, x)
        model.compile("sgd", "mse")
    data = np.ones((2, 4, WIDTH), "float32")
    with collect_function_graphs() as functions:
        model.fit(*data, batch_size=4, verbose=0)
    return [node.op for each in functions for node in each.post_optimization_graph.node]


def test_tensorflow_executes_the_forward_pass_twice():
    assert [executed(each).count("Exp") for each in (False, True)] == [4, 2 * 4]


class Refused(layers.Layer):
    """A layer whose call cannot be repeated."""

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind, self.calls = kind, tf.Variable(0.0, trainable=False)

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], WIDTH))

    def call(self, x):
        if self.kind == "loss":
            self.add_loss(tf.reduce_mean(tf.square(x @ self.kernel)))
        elif self.kind == "random":
            x += tf.random.normal(tf.shape(x))
        elif self.kind == "trained":
            self.kernel.assign(self.kernel * 0.9)
        else:
            self.calls.assign_add(1.0)
        return x @ self.kernel


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("loss", "adds a loss"),
        ("random", "random numbers"),
        ("trained", "is trained and written"),
        ("variable", "writes state"),
    ],
)
def test_what_cannot_be_repeated_is_refused(kind, message):
    with kdist.create_strategy("mirrored", 2).scope():
        inputs = keras.Input((WIDTH,))
        with keras.RematScope("full"):
            layer = Refused(kind)
        model = kdist.Model(inputs, layer(layers.Dense(WIDTH)(inputs)))
        model.compile("sgd", "mse")
    data = np.ones((2, 4, WIDTH), "float32")
    with pytest.raises(ValueError, match=message):
        model.fit(*data, batch_size=4, verbose=0)
