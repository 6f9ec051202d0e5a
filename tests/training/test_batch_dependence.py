"""The graph of a function tells whether it combines the rows of a batch with each other."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kdist.training.replica.batch_dependence import BatchDependence

ROWS = np.random.default_rng(0).normal(size=(14, 8)).astype("float32")


def of_pairs(x):
    return tf.reshape(x, (-1, 4, 2))


def class_of(x):
    return tf.cast(x[:, 0] > 0, tf.int32)


def number_of(x):
    return tf.shape(x)[0]


ACROSS = {
    "mean broadcast to rows": lambda x: tf.broadcast_to(tf.reduce_mean(x), tf.shape(x)) + 0 * x,
    "tiled mean": lambda x: tf.tile(tf.reduce_mean(x, 0, keepdims=True), [number_of(x), 1]),
    "repeated mean": lambda x: ops.repeat(ops.mean(x, 0, keepdims=True), ops.shape(x)[0], axis=0),
    "filled with a mean": lambda x: tf.fill(tf.shape(x), tf.reduce_mean(x)),
    "compared with a mean": lambda x: ops.where(x > ops.mean(x, 0), x, 0.1 * x),
    "chosen by a mean": lambda x: tf.where(tf.reduce_mean(x) > 0.02, x, 2 * x),
    "condition of a mean": lambda x: ops.cond(ops.mean(x) > 0.02, lambda: 2 * x, lambda: x),
    "joined with reversed rows": lambda x: ops.concatenate([x, ops.flip(x, 0)], -1),
    "chosen from reversed rows": lambda x: tf.where(tf.constant([True, False] * 4), x, x[::-1]),
    "stacked with reversed rows": lambda x: tf.stack([x, x[::-1]], 1),
    "times the next row": lambda x: tf.matmul(of_pairs(x), of_pairs(tf.roll(x, 1, 0)), False, True),
    "running sums": lambda x: ops.cumsum(x, 0),
    "running logarithms": lambda x: tf.math.cumulative_logsumexp(x, 0),
    "sorted": lambda x: ops.sort(x, axis=0),
    "in the order of a column": lambda x: ops.take(x, ops.argsort(x[:, 0]), axis=0),
    "largest rows": lambda x: tf.nn.top_k(tf.reduce_sum(x, 1), 3).values,
    "means of classes": lambda x: tf.gather(
        tf.math.unsorted_segment_mean(x, class_of(x), 2), class_of(x)
    ),
    "numbers of classes": lambda x: tf.gather(
        tf.math.bincount(class_of(x), minlength=2, maxlength=2), class_of(x)
    ),
    "singular values": lambda x: tf.linalg.svd(x, compute_uv=False),
}
BY_ROW = {
    "running sums": lambda x: ops.cumsum(x, 1),
    "sorted": lambda x: ops.sort(x, axis=1),
    "reversed": lambda x: ops.concatenate([x, ops.flip(x, 1)], 1),
    "a token for each": lambda x: tf.concat(
        [tf.tile(tf.ones((1, 1, 2)), (number_of(x), 1, 1)), of_pairs(x)], 1
    ),
    "ones for each": lambda x: tf.concat([x, tf.ones((number_of(x), 1))], 1),
    "matrices": lambda x: tf.linalg.svd(of_pairs(x), compute_uv=False),
    "two views": lambda x: tf.split(ops.concatenate([x, 0.5 * x], 0), 2)[1],
    "a slice of joined rows": lambda x: tf.concat(
        [tf.concat([x, 0.5 * x], 0)[: number_of(x)], x], 1
    ),
    "chosen columns": lambda x: tf.gather(x, tf.argmax(x, 1), axis=1, batch_dims=1),
}


def _mixes_rows(function):
    graph = tf.Graph()
    with graph.as_default():
        rows = tf.compat.v1.placeholder(tf.float32, (None, 8))
        return (
            BatchDependence([rows], None, None).of(tf.convert_to_tensor(function(rows))).mixes_rows
        )


@pytest.mark.parametrize("name", ACROSS)
def test_functions_of_all_rows(name):
    assert _mixes_rows(ACROSS[name])


@pytest.mark.parametrize("name", BY_ROW)
def test_functions_of_each_row(name):
    parts = [BY_ROW[name](tf.constant(part)) for part in (ROWS[:5], ROWS[5:])]
    np.testing.assert_allclose(BY_ROW[name](tf.constant(ROWS)), tf.concat(parts, 0), rtol=1e-5)
    assert not _mixes_rows(BY_ROW[name])
