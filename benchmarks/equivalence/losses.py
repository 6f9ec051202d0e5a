"""Losses: weights and sums over examples, time steps, and outputs."""

import keras
import numpy as np

from benchmarks.equivalence.examples import (
    GLOBAL_BATCH,
    NUM_CLASSES,
    STEPS,
    batched,
    classifier,
    digits,
    uneven,
    weights_of,
    whole,
)
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}
ODD = STEPS * GLOBAL_BATCH + 5
WORDS, TIME = 20, 6


def _weighted(number):
    return lambda: batched(*digits(number), weights_of(number))


def _crossentropy(reduction, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    return classifier(loss=loss, **options)


def squared_surprise(y_true, y_pred):
    """A loss function as users write them: one number an example."""
    labels = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), NUM_CLASSES)
    return keras.ops.sum(keras.ops.square(labels - y_pred), axis=-1)


def sentences(number=STEPS * GLOBAL_BATCH):
    """(words `BT` with 0 for padding, a label for each word); lengths differ by replica's share."""
    generator = np.random.default_rng(2)
    words = generator.integers(1, WORDS, (number, TIME))
    # Long sentences in the first half of each batch, short ones in the second.
    in_first_half = np.arange(number) % GLOBAL_BATCH < GLOBAL_BATCH // 2
    lengths = np.where(in_first_half, TIME, generator.integers(1, 4, number))
    words[np.arange(TIME) >= lengths[:, None]] = 0
    return words.astype("int32"), (words % NUM_CLASSES).astype("int32")


def _tagger(model_class):
    """A label for each word: the loss is masked like the words."""
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    x = keras.layers.Dense(16, activation="tanh")(x)
    model = model_class(inputs, keras.layers.Dense(NUM_CLASSES, activation="softmax")(x))
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return model


def _two_outputs(model_class):
    inputs = keras.Input((64,))
    x = keras.layers.Dense(32, activation="relu")(inputs)
    outputs = {
        "digit": keras.layers.Dense(NUM_CLASSES, activation="softmax", name="digit")(x),
        "size": keras.layers.Dense(1, name="size")(x),
    }
    model = model_class(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.1),
        {"digit": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"digit": 0.7, "size": 0.3},
        metrics={"digit": ["accuracy"], "size": ["mae"]},
    )
    return model


def _two_targets(number):
    def data():
        images, labels = digits(number)
        return batched(images, {"digit": labels, "size": images.mean(1, keepdims=True)})

    return data


FEATURES = {
    "uneven batch, odd remainder": Feature(
        "a last batch of 5", classifier(), uneven(5), TWO_EPOCHS
    ),
    "uneven batch, remainder of 1": Feature(
        "a last batch of 1: some replicas get nothing", classifier(), uneven(1), TWO_EPOCHS
    ),
    "sample weights": Feature(
        "weights that come with the data",
        classifier(weighted_metrics=["accuracy"]),
        _weighted(STEPS * GLOBAL_BATCH),
        TWO_EPOCHS,
    ),
    "sample weights, uneven batch": Feature(
        "the same with a last batch of 5",
        classifier(weighted_metrics=["accuracy"]),
        _weighted(ODD),
        TWO_EPOCHS,
    ),
    "class weights": Feature(
        "class_weight of fit",
        classifier(),
        whole,
        {**TWO_EPOCHS, "class_weight": {label: 0.2 + 0.3 * label for label in range(NUM_CLASSES)}},
    ),
    "mean_with_sample_weight": Feature(
        "a loss divided by the sum of the weights",
        _crossentropy("mean_with_sample_weight"),
        _weighted(STEPS * GLOBAL_BATCH),
        TWO_EPOCHS,
    ),
    "mean_with_sample_weight, uneven batch": Feature(
        "the same with a last batch of 5",
        _crossentropy("mean_with_sample_weight"),
        _weighted(ODD),
        TWO_EPOCHS,
    ),
    "loss reduction sum": Feature(
        "a loss that is not divided by the examples",
        _crossentropy("sum", optimizer=lambda: keras.optimizers.SGD(0.1 / GLOBAL_BATCH)),
        whole,
        TWO_EPOCHS,
    ),
    "loss reduction sum, uneven batch": Feature(
        "the same with a last batch of 5",
        _crossentropy("sum", optimizer=lambda: keras.optimizers.SGD(0.1 / GLOBAL_BATCH)),
        uneven(5),
        TWO_EPOCHS,
    ),
    "masked loss": Feature(
        "padding in sentences; replicas have different shares of it",
        _tagger,
        lambda: batched(*sentences()),
        TWO_EPOCHS,
    ),
    "masked loss, uneven batch": Feature(
        "the same with a last batch of 5", _tagger, lambda: batched(*sentences(ODD)), TWO_EPOCHS
    ),
    "several outputs": Feature(
        "loss_weights, and each output's loss in the history",
        _two_outputs,
        _two_targets(STEPS * GLOBAL_BATCH),
        TWO_EPOCHS,
    ),
    "several outputs, uneven batch": Feature(
        "the same with a last batch of 5", _two_outputs, _two_targets(ODD), TWO_EPOCHS
    ),
    "custom loss function": Feature(
        "loss=function(y_true, y_pred)", classifier(loss=squared_surprise), whole, TWO_EPOCHS
    ),
}
