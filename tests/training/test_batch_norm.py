"""Fused BatchNorm: the results of Keras's own, and the layers that are not fused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.training.replica import batch_norm, hooks
from kdist.training.replica.row_shares import RowShare
from kdist.training.replica.step import ReplicaStep

hooks.install()


def in_a_step(function, replicas=1):
    def run(*args):
        share = RowShare(8, 8, 8, may_be_empty=False)
        with ReplicaStep(share, 0, 0, replicas, False, None, True).running():
            return function(*args)

    return run


def trained(layer, x, around=lambda function: function):
    """(outputs, gradients, moving statistics, types of the operations) of one step of training."""
    layer.build(x.shape)
    rng = np.random.default_rng(1)
    for variable in layer.weights:
        variable.assign(rng.uniform(0.5, 2.0, variable.shape))
    directions = tf.constant(rng.normal(size=x.shape), "float32")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * directions)
        return y, tape.gradient(loss, [x, *(v.value for v in layer.trainable_weights)])

    step = tf.function(around(step.python_function))
    y, gradients = step(x)
    state = [v.numpy() for v in layer.non_trainable_weights]
    graph = step.get_concrete_function(x).graph
    return y, gradients, state, {operation.type for operation in graph.get_operations()}


def check_equal(new_layer, x, tolerance):
    expected = trained(new_layer(), x)
    found = trained(new_layer(), x, in_a_step)
    assert "FusedBatchNormV3" not in expected[-1]
    for a, b in zip(*(tf.nest.flatten(x[:-1]) for x in (expected, found)), strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * np.abs(a).max())
    return found[-1]


def images(shape=(8, 5, 5, 3), dtype="float32", mean=1.0):
    values = np.random.default_rng(0).normal(mean, 2.0, shape)
    return tf.cast(tf.constant(values), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": False},
        {"center": False},
        {"momentum": 0.5, "epsilon": 0.1},
        {"epsilon": 1e-7},
        {"axis": 3},
        {"synchronized": True},  # of one replica
    ],
    ids=str,
)
def test_fused_matches_keras(options):
    types = check_equal(lambda: keras.layers.BatchNormalization(**options), images(), 2e-6)
    assert "FusedBatchNormV3" in types


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_low_precision_rounds_like_keras(policy):
    x = images(dtype=policy.removeprefix("mixed_"))
    types = check_equal(lambda: keras.layers.BatchNormalization(dtype=policy), x, 1e-2)
    assert "FusedBatchNormV3" in types


def test_a_large_mean_loses_no_more_precision_than_in_keras():
    x = images(mean=1000.0)
    new_layer = keras.layers.BatchNormalization
    reference = trained(new_layer(dtype="float64"), tf.cast(x, "float64"))
    errors = {}
    for name, around in {"keras": lambda f: f, "fused": in_a_step}.items():
        y = trained(new_layer(), x, around)[0]
        errors[name] = np.abs(np.asarray(y, "float64") - reference[0].numpy()).max()
    assert errors["fused"] <= 2 * errors["keras"]


def test_a_single_pixel():
    check_equal(keras.layers.BatchNormalization, images((1, 1, 1, 3)), 2e-6)


class OtherMoments(keras.layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, variance + 1.0


@pytest.mark.parametrize(
    ("new_layer", "x"),
    [
        (lambda: keras.layers.BatchNormalization(axis=1), images()),
        (lambda: keras.layers.BatchNormalization(renorm=True), images()),
        (lambda: keras.layers.BatchNormalization(), images((8, 3))),
        (lambda: keras.layers.BatchNormalization(dtype="float64"), images(dtype="float64")),
        (lambda: keras.layers.BatchNormalization(trainable=False), images()),
        (OtherMoments, images()),
    ],
    ids=["channels first", "renorm", "rows", "float64", "frozen", "other moments"],
)
def test_other_layers_are_not_fused(new_layer, x):
    assert "FusedBatchNormV3" not in check_equal(new_layer, x, 1e-7)


def test_neither_masks_nor_statistics_over_replicas_are_fused():
    layer, x = keras.layers.BatchNormalization(synchronized=True), images()
    layer.build(x.shape)
    assert batch_norm.can_fuse(layer, x, training=True, mask=None, replicas=1)
    assert not batch_norm.can_fuse(layer, x, training=True, mask=None, replicas=2)
    assert not batch_norm.can_fuse(layer, x, training=True, mask=x[..., 0] > 0, replicas=1)
    assert not batch_norm.can_fuse(layer, x, training=False, mask=None, replicas=1)
