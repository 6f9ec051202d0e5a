"""The graph of a function tells whether it combines the rows of a batch with each other."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kdist.training.replica.dependence.walk import BatchDependence

ROWS = np.random.default_rng(0).normal(size=(14, 8)).astype("float32")


def of_pairs(x):
    return tf.reshape(x, (-1, 4, 2))


def class_of(x):
    return tf.cast(x[:, 0] > 0, tf.int32)


def number_of(x):
    return tf.shape(x)[0]


def in_a_loop(x):
    """Returns a sum that a loop takes over rows by their positions."""
    return tf.while_loop(
        lambda n, _: n < number_of(x),
        lambda n, total: (n + 1, 0.5 * total + x[n]),
        (0, tf.zeros(8)),
    )[1]


def written_in_turn(x):
    """Returns running sums that a loop writes to an array."""
    rows = tf.TensorArray(x.dtype, size=number_of(x))

    def step(n, total, rows):
        total = 0.5 * total + x[n]
        return n + 1, total, rows.write(n, total)

    state = tf.while_loop(lambda n, *_: n < number_of(x), step, (0, tf.zeros(8), rows))
    return tf.ensure_shape(state[-1].stack(), x.shape)


def halved_until_small(x):
    """Returns what a loop computes whose end depends on the norm of all rows."""
    return tf.while_loop(lambda y: tf.norm(y) > 1.0, lambda y: (0.5 * y,), (x,))[0]


def three_times(x):
    """Returns what a loop computes that does not run over rows."""
    return tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, 0.5 * y + x), (0, x))[1]


def deviations_of_groups(x):
    """Returns the standard deviations in groups of four rows, as StyleGAN's discriminator does."""
    groups = tf.math.reduce_std(tf.reshape(x, (4, -1, 8)), 0)
    return tf.concat([x, tf.tile(tf.reduce_mean(groups, 1, keepdims=True), (4, 1))], 1)


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
    "scanned rows": lambda x: tf.scan(lambda before, row: 0.5 * before + row, x),
    "folded rows": lambda x: x * tf.foldl(lambda before, row: 0.5 * before + row, x),
    "scanned rows by Keras": lambda x: ops.scan(lambda before, row: (before + row,) * 2, x[0], x)[
        1
    ],
    "running averages by Keras": lambda x: ops.scan(
        lambda before, row: (0.5 * before + row,) * 2, ops.zeros(8), x, reverse=True
    )[1],
    "rows in a loop": lambda x: x * in_a_loop(x),
    "a loop with a step per row": lambda x: tf.while_loop(
        lambda n, _: n < number_of(x), lambda n, y: (n + 1, 0.9 * y), (0, x)
    )[1],
    "standard deviations of groups": deviations_of_groups,
    "two halves of the batch": lambda x: tf.concat(
        [tf.subtract(*tf.unstack(tf.reshape(x, (2, -1, 8))))] * 2, 0
    ),
    "elements of several rows": lambda x: tf.transpose(tf.reshape(x, (4, -1))),
    "weights by position": lambda x: x * tf.cast(tf.range(number_of(x)), "float32")[:, None],
    "codes of positions": lambda x: (
        x + tf.gather(tf.sin(tf.range(64.0))[:, None], tf.range(number_of(x)))
    ),
    "position of each row": lambda x: tf.concat(
        [x, tf.cast(tf.range(number_of(x)), "float32")[:, None]], 1
    ),
    "Fourier transform": lambda x: tf.math.real(
        tf.transpose(tf.signal.fft(tf.transpose(tf.cast(x, "complex64"))))
    ),
    "real Fourier transform": lambda x: tf.abs(tf.signal.rfft(tf.transpose(x))),
    "Fourier transform of two axes": lambda x: tf.math.real(
        tf.signal.fft2d(tf.cast(x, "complex64"))
    ),
    "next row": lambda x: tf.pad(x, [[0, 1], [0, 0]])[1:] - x,
    "row before": lambda x: ops.pad(x, [[1, 0], [0, 0]])[:-1] - x,
    "one-hot codes of the largest row": lambda x: (
        x * tf.one_hot(tf.argmax(x, 0), number_of(x), axis=0)
    ),
    "equal to the largest row": lambda x: (
        x
        * tf.cast(
            tf.equal(tf.argmax(x, 0)[None], tf.range(tf.shape(x, tf.int64)[0])[:, None]), "float32"
        )
    ),
    "scattered by class": lambda x: tf.gather(
        tf.scatter_nd(class_of(x)[:, None], x, [2, 8]), class_of(x)
    ),
    "added at classes": lambda x: tf.gather(
        tf.tensor_scatter_nd_add(tf.zeros((2, 8)), class_of(x)[:, None], x), class_of(x)
    ),
    "size of each class": lambda x: (
        x
        / tf.cast(
            tf.gather(tf.unique_with_counts(class_of(x)).count, tf.unique(class_of(x)).idx)[
                :, None
            ],
            "float32",
        )
    ),
    "quantized in the range of the batch": lambda x: tf.quantization.fake_quant_with_min_max_vars(
        x, tf.reduce_min(x), tf.reduce_max(x)
    ),
    "quantized in the range of columns": (
        lambda x: tf.quantization.fake_quant_with_min_max_vars_per_channel(
            x, tf.reduce_min(x, 0), tf.reduce_max(x, 0)
        )
    ),
    "quantized in the range of the batch's values": lambda x: (
        tf.quantization.quantize_and_dequantize_v2(x, 0.0, 0.0, range_given=False)
    ),
    "a function of Python": lambda x: tf.numpy_function(
        lambda rows: rows - rows.mean(), [x], x.dtype
    ),
    "clipped to the mean": lambda x: tf.clip_by_value(x, -1e9, tf.reduce_mean(x)),
    "between neighbors": lambda x: tf.nn.conv1d(
        tf.transpose(x)[..., None], tf.ones((3, 1, 1)), 1, "SAME"
    ),
    "attention over rows": lambda x: tf.nn.softmax(x, axis=0) * x,
    "sorted by bucket": lambda x: tf.cast(tf.searchsorted(tf.sort(x[:, 0]), x[:, 0]), "float32"),
    "median": lambda x: x - ops.median(x, axis=0),
    "quantile": lambda x: x - ops.quantile(x, 0.3, axis=0),
    "differences": lambda x: ops.diff(x, axis=0),
    "rolled": lambda x: x - ops.roll(x, 1, axis=0),
    "band of all pairs": lambda x: tf.linalg.band_part(tf.matmul(x, x, transpose_b=True), 0, -1),
    "in segments": lambda x: tf.math.segment_sum(x, tf.range(number_of(x)) // 2),
    "trace": lambda x: x * tf.linalg.trace(x),
    "positions from 1": lambda x: x * tf.cast(tf.range(1, number_of(x) + 1), "float32")[:, None],
    "positions between 0 and 1": lambda x: x * tf.linspace(0.0, 1.0, number_of(x))[:, None],
    "counted ones": lambda x: x * tf.cumsum(tf.ones(number_of(x)))[:, None],
    "parity of positions": lambda x: x * tf.cast(tf.range(number_of(x)) % 2, "float32")[:, None],
    "rows of a table": lambda x: x + tf.reshape(tf.range(160.0), (20, 8))[: number_of(x)],
    "a slice of a table": lambda x: (
        x + tf.slice(tf.reshape(tf.range(160.0), (20, 8)), [0, 0], [number_of(x), 8])
    ),
    "identity matrix": lambda x: x + tf.eye(number_of(x), 8),
    "code of the first row": lambda x: x * tf.one_hot(0, number_of(x), axis=0)[:, tf.newaxis],
    "triangle": lambda x: (
        x
        * tf.reduce_sum(
            tf.linalg.band_part(tf.ones((number_of(x), number_of(x))), -1, 0), 1, keepdims=True
        )
    ),
    "columns by positions": lambda x: (
        x * tf.gather(x, tf.range(number_of(x))[:, None] % 8, batch_dims=1)
    ),
    "the next row by its number": lambda x: (
        x - tf.gather(x, (tf.range(number_of(x)) + 1) % number_of(x))
    ),
    "the last row": lambda x: x - tf.gather(x, number_of(x) - 1),
    "the first row": lambda x: x - ops.take(x, [0], axis=0),
    "an element of the first row": lambda x: x - tf.gather_nd(x, [[0, 1]]),
    "written to the first row": lambda x: tf.tensor_scatter_nd_update(x, [[0]], tf.ones((1, 8))),
    "added to the first row": lambda x: ops.scatter_update(x, [[0]], ops.ones((1, 8))),
    "chosen by the number of rows": lambda x: tf.cond(number_of(x) > 7, lambda: 2 * x, lambda: x),
    "logarithm of the number of rows": lambda x: x * tf.math.log(tf.cast(number_of(x), "float32")),
    "a bias after the number of rows": lambda x: x / tf.cast(number_of(x), "float32") + 1.0,
    "mean of chosen rows": lambda x: x - tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0), 0),
    "number of distinct classes": lambda x: (
        x * tf.cast(tf.size(tf.unique(class_of(x)).y), "float32")
    ),
    "order of distinct classes": lambda x: (
        x * tf.cast(tf.unique(class_of(x)).idx, "float32")[:, None]
    ),
    "sums of pairs of rows": lambda x: tf.math.unsorted_segment_sum(
        x, tf.range(number_of(x)) // 2, number_of(x)
    ),
    "sums by an equation": lambda x: tf.einsum("ij,kj->ij", x, x),
    "repeated rows": lambda x: tf.reshape(
        tf.repeat(x, number_of(x), 0) * tf.tile(x, [number_of(x), 1]), (number_of(x), -1, 8)
    ),
    "a row and the mean, mapped": lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(x, 0), x),
    "a row and the reversed ones, mapped": lambda x: tf.map_fn(
        lambda rows: rows[0] - rows[1], (x, x[::-1]), fn_output_signature=tf.float32
    ),
    "a row and its number, mapped": lambda x: tf.map_fn(
        lambda n: x[n] * tf.cast(n, "float32"),
        tf.range(number_of(x)),
        fn_output_signature=tf.float32,
    ),
    "a row and all rows, mapped": lambda x: tf.map_fn(
        lambda row: row * tf.reduce_sum(tf.map_fn(lambda other: other * row, x), 0), x
    ),
    "written in turn": written_in_turn,
    "until all are small": halved_until_small,
    "a mean in a branch": lambda x: tf.cond(
        tf.random.uniform([]) > 0.5, lambda: x - tf.reduce_mean(x, 0), lambda: x
    ),
    "a fraction of zeros": lambda x: x * tf.nn.zero_fraction(tf.nn.relu(x)),
    "normalized by an operation": lambda x: tf.compat.v1.nn.fused_batch_norm(
        x[:, None, None, :], tf.ones(8), tf.zeros(8)
    )[0],
    "reversed as a sequence": lambda x: (
        tf.reverse_sequence(tf.transpose(x), tf.fill([8], number_of(x)), 1, 0) - tf.transpose(x)
    ),
    "sums of a sparse tensor": lambda x: x * tf.sparse.reduce_sum(tf.sparse.from_dense(x), 0),
    "columns put side by side": lambda x: tf.reshape(tf.transpose(x), (-1, 8)),
    "joined texts": lambda x: (
        x * tf.cast(tf.strings.length(tf.strings.reduce_join(tf.as_string(class_of(x)))), "float32")
    ),
    "diagonal": lambda x: x * tf.reduce_sum(tf.linalg.diag_part(x)),
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
    "columns at positions": lambda x: tf.gather_nd(
        x, tf.stack([tf.range(number_of(x)), class_of(x)], 1)
    ),
    "columns in a flat tensor": lambda x: tf.gather(
        tf.reshape(x, [-1]), 8 * tf.range(number_of(x)) + class_of(x)
    ),
    "scattered in each row": lambda x: tf.scatter_nd(
        tf.stack([tf.range(number_of(x)), class_of(x)], 1), x[:, 0], [number_of(x), 2]
    ),
    "a function of each row": lambda x: tf.map_fn(lambda row: tf.cumsum(row), x),
    "a loop over columns": lambda x: tf.transpose(
        tf.scan(lambda before, column: 0.5 * before + column, tf.transpose(x))
    ),
    "weights of columns": lambda x: x * tf.range(8.0),
    "positions of words": lambda x: of_pairs(x) + tf.gather(tf.ones((9, 2)), tf.range(4)),
    "Fourier transform": lambda x: tf.math.real(tf.signal.fft(tf.cast(x, "complex64"))),
    "real Fourier transform": lambda x: tf.abs(tf.signal.rfft(x)),
    "Fourier transform of two axes": lambda x: tf.math.real(
        tf.signal.fft2d(tf.cast(of_pairs(x), "complex64"))
    ),
    "padded columns": lambda x: tf.pad(x, [[0, 0], [0, 1]])[:, 1:] - x,
    "padded to a length": lambda x: tf.pad(
        of_pairs(x), [[0, 0], [0, 7 - tf.shape(of_pairs(x))[1]], [0, 0]]
    ),
    "written in each row": lambda x: tf.tensor_scatter_nd_update(
        x, tf.stack([tf.range(number_of(x)), class_of(x)], 1), x[:, 3]
    ),
    "one-hot codes": lambda x: x * tf.one_hot(tf.argmax(x, 1), 8),
    "one-hot codes along another axis": lambda x: tf.one_hot(tf.argmax(of_pairs(x), 2), 2, axis=1),
    "quantized": lambda x: tf.quantization.fake_quant_with_min_max_args(x),
    "quantized in a range": lambda x: tf.quantization.quantize_and_dequantize_v2(
        x, -1.0, 1.0, range_given=True
    ),
    "clipped": lambda x: tf.clip_by_value(x, -1.0, tf.constant(0.5)),
    "neighbors of columns": lambda x: tf.nn.conv1d(x[..., None], tf.ones((3, 1, 1)), 1, "SAME"),
    "median": lambda x: x - ops.median(x, axis=1, keepdims=True),
    "differences": lambda x: ops.diff(x, axis=1),
    "a loop with a fixed number of steps": lambda x: three_times(x),
    "triangles": lambda x: tf.linalg.band_part(of_pairs(x), 0, -1),
    "times the number of rows, and divided by it": lambda x: (
        x * tf.cast(number_of(x), "float32") / tf.cast(number_of(x), "float32")
    ),
    "each row, mapped with others": lambda x: tf.map_fn(
        lambda rows: rows[0] - rows[1], (x, 2 * x), fn_output_signature=tf.float32
    ),
    "vectorized": lambda x: tf.vectorized_map(lambda row: 2 * row, x),
    "sums by an equation": lambda x: tf.einsum("ij,kj->ik", x, tf.reshape(tf.range(16.0), (2, 8))),
    "sums of each row of a sparse tensor": lambda x: tf.sparse.reduce_sum(
        tf.sparse.from_dense(x), 1
    ),
    "tiled rows that are divided again": lambda x: tf.reshape(tf.tile(x, [3, 1]), (3, -1, 8))[1],
    "all in one": lambda x: tf.reshape(tf.reshape(x, (1, -1, 8)) * 2.0, (-1, 8)),
    "steps of a sequence": lambda x: tf.reshape(
        tf.reshape(tf.transpose(of_pairs(x), (1, 0, 2)), (-1, 2)) * 2.0, (4, -1, 2)
    )[0],
    "repeated columns": lambda x: tf.repeat(x, 2, 1),
    "in a branch": lambda x: tf.cond(tf.constant(1.0) > 0.5, lambda: 2 * x, lambda: x),
    "buckets": lambda x: tf.cast(tf.searchsorted([-1.0, 0.0, 1.0], x[:, 0]), "float32"),
}


def _mixes_rows(function, rows=None):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (rows, 8))
        dependence = BatchDependence([x], rows, rows and 2 * rows)
        return dependence.of(tf.convert_to_tensor(function(x))).mixes_rows


POSITIONS = [
    "weights by position",
    "codes of positions",
    "positions from 1",
    "positions between 0 and 1",
    "counted ones",
    "parity of positions",
    "rows of a table",
    "identity matrix",
    "columns by positions",
    "sums of pairs of rows",
    "chosen by the number of rows",
    "repeated rows",
    "a loop with a step per row",
]


@pytest.mark.parametrize("name", ACROSS)
def test_functions_of_all_rows(name):
    assert _mixes_rows(ACROSS[name])


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_constants_if_the_number_of_rows_is_known(name):
    assert _mixes_rows(ACROSS[name], rows=7)


@pytest.mark.parametrize("name", BY_ROW)
def test_functions_of_each_row(name):
    parts = [BY_ROW[name](tf.constant(part)) for part in (ROWS[:5], ROWS[5:])]
    np.testing.assert_allclose(BY_ROW[name](tf.constant(ROWS)), tf.concat(parts, 0), rtol=1e-5)
    assert not _mixes_rows(BY_ROW[name])


@pytest.mark.parametrize("factor", [1e-39, float("inf")])
def test_factors_without_a_finite_inverse_are_no_numbers_of_rows(factor):
    graph = tf.Graph()
    with graph.as_default():
        rows = tf.compat.v1.placeholder(tf.float32, (4, 8))
        dependence = BatchDependence([rows], 4, 8)
        assert dependence.of(tf.reduce_sum(rows) * factor).degree == 1
        assert dependence.of(tf.reduce_sum(rows) / factor).degree == 1


@pytest.mark.parametrize("axis", [1, -1])
def test_elements_that_are_taken_along_the_last_axis(axis):
    """Columns of rows keep the axis of rows; columns of a table are along an axis of rows."""
    with tf.Graph().as_default():
        rows = tf.compat.v1.placeholder(tf.float32, (None, 8))
        dependence = BatchDependence([rows], None, None)
        assert dependence.of(ops.take(rows, tf.constant([2, 0]), axis=axis)).axis == 0
        assert dependence.of(ops.take(tf.ones((2, 5)), class_of(rows), axis=axis)).axis == 1


def test_a_fixed_vector_that_is_repeated_belongs_to_each_row():
    with tf.Graph().as_default():
        rows = tf.compat.v1.placeholder(tf.float32, (None, 8))
        dependence = BatchDependence([rows], None, None)
        vector = tf.Variable(tf.ones(8))
        repeated = tf.broadcast_to(vector.read_value(), tf.shape(rows))
        assert dependence.of(repeated * rows).is_by_row
