"""Small data and models that the features share.

They do not amplify rounding: no bias before BatchNorm, Adam with a large epsilon, about 20 steps.
Differences by rounding are about 1e-7, so a tolerance of 1e-5 separates right from wrong.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from kdist.data.arrays import read_digits

GLOBAL_BATCH = 32
STEPS = 10
NUM_CLASSES = 10


@functools.cache
def digits(number: int = STEPS * GLOBAL_BATCH):
    """(images as rows of 64 floats, labels) of scikit-learn's handwritten digits."""
    images, labels = read_digits()
    rows = images[:number].reshape(-1, 64) / 16
    return rows.astype("float32"), labels[:number].astype("int32")


def weights_of(number: int):
    """Sample weights from 0.1 to 3 that have nothing to do with the examples."""
    return np.random.default_rng(1).uniform(0.1, 3.0, number).astype("float32")


def batched(*tensors, batch: int = GLOBAL_BATCH):
    """Returns a `tf.data.Dataset` of (x, y, ...) in global batches, the last one partial."""
    return {"x": tf.data.Dataset.from_tensor_slices(tensors).batch(batch)}


def whole():
    """Ten whole batches of digits."""
    return batched(*digits())


def uneven(remainder: int):
    """Ten whole batches and a last one of `remainder` digits."""
    return lambda: batched(*digits(STEPS * GLOBAL_BATCH + remainder))


def hidden_layers(inputs, *, units=32, **options):
    """One hidden layer and the classes' probabilities."""
    x = keras.layers.Dense(units, activation="relu", name="hidden", **options)(inputs)
    return keras.layers.Dense(NUM_CLASSES, activation="softmax", name="classes", **options)(x)


def compiled(model, optimizer=None, loss="sparse_categorical_crossentropy", **options):
    """The model, compiled for digits unless told otherwise."""
    options = {"metrics": ["accuracy"], **options}
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **options)
    return model


def classifier(optimizer=None, loss="sparse_categorical_crossentropy", layer=None, **options):
    """A `build` for a perceptron on digits.

    Args:
        optimizer: makes the optimizer, in the strategy's scope. Defaults to SGD.
        loss: as `compile` takes it; a function without parameters is called for one.
        layer: a function that gives further arguments of both layers.
        **options: of `compile`.
    """

    def build(model_class):
        inputs = keras.Input((64,))
        model = model_class(inputs, hidden_layers(inputs, **(layer() if layer else {})))
        return compiled(model, optimizer() if optimizer else None, loss, **options)

    return build
