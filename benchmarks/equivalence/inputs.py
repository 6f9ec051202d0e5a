"""Kinds and shapes of input data."""

import keras
import numpy as np
import tensorflow as tf

from benchmarks.equivalence.examples import (
    GLOBAL_BATCH,
    STEPS,
    batched,
    classifier,
    compiled,
    digits,
    hidden_layers,
)
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}
WHOLE = STEPS * GLOBAL_BATCH
ODD = WHOLE + 5


@keras.saving.register_keras_serializable("kdist_equivalence")
class MeanOverRows(keras.layers.Layer):
    """`B?F`, ragged, to `BF`: the mean of each example's rows."""

    def call(self, inputs):
        return tf.reduce_mean(inputs, axis=1)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[-1])


def _on_ragged(model_class):
    inputs = keras.Input((None, 16), ragged=True)
    return compiled(model_class(inputs, hidden_layers(MeanOverRows()(inputs))))


def _ragged():
    """Digits cut into rows of 16 numbers; each keeps its first 1 to 4."""
    images, labels = digits()
    lengths = 1 + np.arange(len(images)) % 4
    rows = [image.reshape(4, 16)[:n] for image, n in zip(images, lengths, strict=True)]
    ragged = tf.RaggedTensor.from_row_lengths(np.concatenate(rows), lengths)
    return batched(ragged, labels)


def _on_sparse(model_class):
    inputs = keras.Input((64,), sparse=True)
    adam = keras.optimizers.Adam(1e-2, epsilon=1e-3)  # squares the slices of a gradient
    return compiled(model_class(inputs, hidden_layers(inputs)), adam)


def _sparse():
    images, labels = digits()
    return batched(tf.sparse.from_dense(np.where(images > 0.5, images, 0)), labels)


def _on_dict(model_class):
    inputs = {"left": keras.Input((32,), name="left"), "right": keras.Input((32,), name="right")}
    x = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
    return compiled(model_class(inputs, hidden_layers(x)))


def _dict():
    images, labels = digits()
    return batched({"left": images[:, :32], "right": images[:, 32:]}, labels)


def _slices(number):
    """The batches, one after the other, as NumPy arrays."""
    images, labels = digits(number)
    for start in range(0, number, GLOBAL_BATCH):
        yield images[start : start + GLOBAL_BATCH], labels[start : start + GLOBAL_BATCH]


def _generator(number):
    def batches():
        while True:
            yield from _slices(number)

    return lambda: {"x": batches(), "steps_per_epoch": -(-number // GLOBAL_BATCH)}


class Batches(keras.utils.PyDataset):
    """The same batches by number."""

    def __init__(self, number):
        super().__init__()
        self._batches = list(_slices(number))

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def _arrays(number):
    images, labels = digits(number)
    return lambda: {"x": images, "y": labels, "batch_size": GLOBAL_BATCH}


def _endless():
    return {"x": batched(*digits())["x"].repeat(), "steps_per_epoch": STEPS}


FEATURES = {
    "NumPy arrays": Feature("fit(x, y, batch_size)", classifier(), _arrays(WHOLE), TWO_EPOCHS),
    "NumPy arrays, uneven batch": Feature(
        "the same with a last batch of 5", classifier(), _arrays(ODD), TWO_EPOCHS
    ),
    "Python generator": Feature(
        "an endless one and steps_per_epoch", classifier(), _generator(WHOLE), TWO_EPOCHS
    ),
    "Python generator, uneven batch": Feature(
        "the same, each epoch with a last batch of 5", classifier(), _generator(ODD), TWO_EPOCHS
    ),
    "PyDataset": Feature(
        "keras.utils.PyDataset", classifier(), lambda: {"x": Batches(WHOLE)}, TWO_EPOCHS
    ),
    "PyDataset, uneven batch": Feature(
        "the same with a last batch of 5", classifier(), lambda: {"x": Batches(ODD)}, TWO_EPOCHS
    ),
    "endless tf.data": Feature("repeat() and steps_per_epoch", classifier(), _endless, TWO_EPOCHS),
    "dict inputs": Feature("inputs by name", _on_dict, _dict, TWO_EPOCHS),
    "ragged input": Feature("examples of different lengths", _on_ragged, _ragged, TWO_EPOCHS),
    "sparse input": Feature("tf.SparseTensor", _on_sparse, _sparse, TWO_EPOCHS),
}
