"""Layers that depend on the whole batch or on randomness, or have sparse gradients."""

import keras
import numpy as np

from benchmarks.equivalence.examples import (
    GLOBAL_BATCH,
    NUM_CLASSES,
    STEPS,
    batched,
    compiled,
    uneven,
    whole,
)
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}
WORDS, TIME = 50, 5


def _normalised(model_class):
    """No bias before BatchNorm: its gradient would be nothing but rounding."""
    x = inputs = keras.Input((64,))
    for units in (32, 16):
        x = keras.layers.Dense(units, use_bias=False)(x)
        x = keras.layers.BatchNormalization(synchronized=True, momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
    return compiled(model_class(inputs, keras.layers.Dense(NUM_CLASSES, activation="softmax")(x)))


def _words():
    """(words `BT`, a label); a word appears on one replica, on several, or several times on one."""
    words = np.random.default_rng(3).integers(0, WORDS, (STEPS * GLOBAL_BATCH, TIME))
    return batched(words.astype("int32"), (words.sum(1) % NUM_CLASSES).astype("int32"))


def _embedding(optimizer):
    def build(model_class):
        inputs = keras.Input((TIME,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 8)(inputs))
        outputs = keras.layers.Dense(NUM_CLASSES, activation="softmax")(x)
        return compiled(model_class(inputs, outputs), optimizer())

    return build


FEATURES = {
    "synchronised BatchNorm": Feature(
        "statistics of the global batch", _normalised, whole, TWO_EPOCHS
    ),
    "synchronised BatchNorm, uneven batch": Feature(
        "the same with a last batch of 5", _normalised, uneven(5), TWO_EPOCHS
    ),
    "embedding, Adam": Feature(
        "sparse gradients (IndexedSlices)",
        _embedding(lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3)),
        _words,
        TWO_EPOCHS,
    ),
    "embedding, clipnorm": Feature(
        "sparse gradients, clipped",
        _embedding(lambda: keras.optimizers.SGD(0.5, clipnorm=0.02)),
        _words,
        TWO_EPOCHS,
    ),
    "embedding, global_clipnorm": Feature(
        "sparse and dense gradients, clipped together",
        _embedding(lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05)),
        _words,
        TWO_EPOCHS,
    ),
}
