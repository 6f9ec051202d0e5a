"""Batches of ragged and sparse tensors, whose rows have different numbers of values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from tests.caught import no_warnings

LENGTHS = [3, 1, 5, 4, 2, 6, 1, 4, 5, 7, 3]
_RANDOM = np.random.default_rng(0)
RAGGED = tf.RaggedTensor.from_row_lengths(
    _RANDOM.normal(size=(sum(LENGTHS), 3)).astype("float32"), LENGTHS
)
_DENSE = (_RANDOM.random((11, 3)) < 0.4) * _RANDOM.normal(size=(11, 3)) + np.eye(11, 3)
SPARSE = tf.sparse.from_dense(_DENSE.astype("float32"))
Y = _RANDOM.normal(size=(11, 1)).astype("float32")


class Net(keras.Model):
    """Adds up the values of each row, and computes a loss of its own."""

    def __init__(self, loss_of):
        super().__init__()
        self.hidden, self.dense = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        self.loss_of = loss_of

    def call(self, x):
        is_ragged = isinstance(x, tf.RaggedTensor)
        rows = tf.reduce_sum(x, 1) if is_ragged else tf.reshape(tf.sparse.to_dense(x), (-1, 3))
        return self.dense(self.hidden(rows))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_of(self, x, (y - y_pred) ** 2)


class Padded(Net):
    """Returns a value for each step of rows that are padded to the longest one."""

    def call(self, x):
        return self.dense(self.hidden(x.to_tensor()))


def divided(total, number):
    return tf.reduce_sum(total) / tf.cast(number, "float32")


def of_ragged(model, x):
    return x.with_flat_values(model.hidden(x.flat_values))


OF_RAGGED = {
    "mean of values": lambda m, x, e: tf.reduce_mean(m.hidden(x.flat_values) ** 2),
    "number of values": lambda m, x, e: divided(e, tf.shape(x.values)[0]),
    "last split": lambda m, x, e: divided(e, x.row_splits[-1]),
    "number of rows": lambda m, x, e: divided(e, x.nrows()),
    "means of rows": lambda m, x, e: tf.reduce_mean(tf.reduce_mean(of_ragged(m, x), 1) ** 2),
    "padded mean": lambda m, x, e: tf.reduce_mean(m.hidden(x.to_tensor()) ** 2),
    "padded sum": lambda m, x, e: tf.reduce_sum((1 + m.hidden(x.to_tensor())) ** 2) / 10,
    "first values": lambda m, x, e: tf.reduce_mean(
        m.hidden(tf.gather(x.values, x.row_starts())) ** 2
    ),
}
OF_SPARSE = {
    "mean of values": lambda m, x, e: tf.reduce_mean(e) * tf.reduce_mean(x.values**2),
    "size of values": lambda m, x, e: divided(e, tf.size(x.values)),
    "number of indices": lambda m, x, e: divided(e, tf.shape(x.indices)[0]),
    "number of rows": lambda m, x, e: divided(e, x.dense_shape[0]),
    "reconstruction": lambda m, x, e: tf.reduce_mean(
        (tf.gather(e[:, 0], x.indices[:, 0]) - x.values) ** 2
    ),
}
CASES = [(RAGGED, name) for name in OF_RAGGED] + [(SPARSE, name) for name in OF_SPARSE]


def _trained(strategy, new, x, drop_remainder):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = kdist.Model.of(new())
        model.compile(keras.optimizers.SGD(0.05))
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4, drop_remainder=drop_remainder)
    logs = model.fit(data, epochs=2, verbose=0).history
    return [logs["loss"], *model.get_weights()]


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize(("x", "name"), CASES, ids=[f"{type(x).__name__}-{n}" for x, n in CASES])
@pytest.mark.filterwarnings("ignore:.*whole batch")
def test_losses_of_values_are_those_of_one_device(mirrored, x, name, drop_remainder):
    losses = OF_RAGGED if x is RAGGED else OF_SPARSE
    expected, found = (
        _trained(strategy, lambda: Net(losses[name]), x, drop_remainder)
        for strategy in (kdist.create_strategy("one_device"), mirrored)
    )
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_the_number_of_values_needs_no_whole_batch(mirrored):
    with no_warnings(message="whole batch"):
        _trained(mirrored, lambda: Net(OF_SPARSE["size of values"]), SPARSE, True)


@pytest.mark.filterwarnings("ignore:.*whole batch")
def test_predictions_of_padded_rows_have_the_length_of_the_longest(mirrored):
    predictions = []
    for strategy in (kdist.create_strategy("one_device"), mirrored):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = kdist.Model.of(Padded(None))
            model.compile()
        data = tf.data.Dataset.from_tensor_slices(RAGGED).batch(11)
        predictions.append(model.predict(data, verbose=0))
    np.testing.assert_allclose(predictions[1], predictions[0], rtol=1e-5, atol=1e-6)
