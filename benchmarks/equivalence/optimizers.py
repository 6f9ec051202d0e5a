"""Optimizers and what they do to gradients and weights."""

import keras

from benchmarks.equivalence.examples import GLOBAL_BATCH, STEPS, batched, classifier, digits, whole
from benchmarks.equivalence.feature import Feature
from kdist.compat.keras import MULTI_OPTIMIZERS

TWO_EPOCHS = {"epochs": 2}
# Adam divides by the gradient's own size; with the usual 1e-7 it makes full steps of rounding.
EPSILON = 1e-3


def _row(description, optimizer, **options):
    return Feature(description, classifier(optimizer), whole, fit=TWO_EPOCHS, **options)


def _sgd(**options):
    return lambda: keras.optimizers.SGD(0.1, **options)


def _adamw():
    """The decay leaves out biases and a layer, both found by parts of variables' names."""
    adam = keras.optimizers.AdamW(1e-3, weight_decay=0.5, epsilon=EPSILON)
    adam.exclude_from_weight_decay(var_names=["bias", "classes/"])
    return adam


def _decay():
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=4, decay_rate=0.7)
    return keras.optimizers.SGD(rate, momentum=0.5)


def _several():
    """Adam for what takes the 64 pixels, SGD for the rest."""
    adam, sgd = keras.optimizers.Adam(1e-3, epsilon=EPSILON), keras.optimizers.SGD(0.1)
    return keras.optimizers.MultiOptimizer(lambda v: adam if v.shape[0] == 64 else sgd)


def _frozen(model_class):
    inputs = keras.Input((64,))
    x = keras.layers.Dense(32, activation="relu")(inputs)
    frozen = keras.layers.Dense(24, activation="relu", trainable=False)
    outputs = keras.layers.Dense(10, activation="softmax")(frozen(x))
    model = model_class(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


FEATURES = {
    "SGD": _row("plain gradient descent", _sgd()),
    "momentum": _row("SGD with Nesterov momentum", _sgd(momentum=0.9, nesterov=True)),
    "Adam": _row("Adam", lambda: keras.optimizers.Adam(1e-3, epsilon=EPSILON)),
    "AdamW": _row("Adam with decoupled weight decay, which leaves out some weights", _adamw),
    "clipnorm": _row("each gradient's norm clipped", _sgd(clipnorm=0.05)),
    "clipvalue": _row("each gradient's elements clipped", _sgd(clipvalue=0.005)),
    "global_clipnorm": _row("the norm of all gradients clipped", _sgd(global_clipnorm=0.1)),
    "EMA": _row("moving average of the weights", _sgd(use_ema=True, ema_momentum=0.9)),
    "EMA overwrite": _row(
        "weights overwritten by their moving average every third step",
        _sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    ),
    "learning-rate schedule": _row("exponential decay by steps", _decay),
    "gradient_accumulation_steps": _row(
        "the optimizer updates at every second step", _sgd(gradient_accumulation_steps=2)
    ),
    "MultiOptimizer": _row("an optimizer for the first layer, another for the rest", _several),
    "frozen layer": Feature("a layer with trainable=False", _frozen, whole, fit=TWO_EPOCHS),
    "clipnorm, uneven batch": Feature(
        "clipping when the last batch is odd",
        classifier(_sgd(clipnorm=0.05)),
        lambda: batched(*digits(STEPS * GLOBAL_BATCH + 5)),
        fit=TWO_EPOCHS,
    ),
}
if not MULTI_OPTIMIZERS:  # Keras 3.14
    del FEATURES["MultiOptimizer"]
