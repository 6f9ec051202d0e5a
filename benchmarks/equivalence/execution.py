"""Execution of steps: compiled, eager, several per call, several micro-batches, 16 bits."""

import keras
import numpy as np

from benchmarks.equivalence.examples import (
    GLOBAL_BATCH,
    batched,
    classifier,
    compiled,
    digits,
    hidden_layers,
    uneven,
    whole,
)
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}
BATCH_WITH_OVERFLOW = 3


def _25_steps():
    return batched(*digits(25 * GLOBAL_BATCH))


def accumulating(micro_batches):
    """The model that `kdist` trains in micro-batches, and the reference in whole batches."""

    def build(model_class):
        is_keras = model_class is keras.Model
        return classifier(**({} if is_keras else {"accumulate": micro_batches}))(model_class)

    return build


def _mixed(precision, optimizer):
    """A perceptron that computes in 16 bits and keeps its weights and its loss in 32."""

    def build(model_class):
        inputs = keras.Input((64,))
        model = model_class(inputs, hidden_layers(inputs, dtype=f"mixed_{precision}"))
        return compiled(model, optimizer())

    return build


def _regression(model_class):
    """Squared errors, whose gradients grow with the input: a large one overflows float16."""
    inputs = keras.Input((64,))
    outputs = keras.layers.Dense(10, dtype="mixed_float16")(inputs)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=2.0**15
    )
    model = model_class(inputs, outputs)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def _one_overflow():
    """Returns batches with one example, on one replica, whose gradient overflows."""
    images, labels = digits()
    images = images.copy()
    images[BATCH_WITH_OVERFLOW * GLOBAL_BATCH + GLOBAL_BATCH // 2, 20] = 1e4
    return batched(images, np.eye(10, dtype="float32")[labels])


def _loss_scale(model):
    return {
        "loss scale": float(model.optimizer.dynamic_scale.numpy()),
        "updates": int(model.optimizer.inner_optimizer.iterations.numpy()),
    }


FEATURES = {
    "steps_per_execution": Feature(
        "4 steps a call, 25 steps an epoch",
        classifier(steps_per_execution=4),
        _25_steps,
        TWO_EPOCHS,
    ),
    "steps_per_execution, uneven batch": Feature(
        "the same with a last batch of 5", classifier(steps_per_execution=4), uneven(5), TWO_EPOCHS
    ),
    "jit_compile": Feature("XLA", classifier(jit_compile=True), whole, TWO_EPOCHS),
    "run_eagerly": Feature("no graph", classifier(run_eagerly=True), whole),
    "accumulate": Feature(
        "two micro-batches of the same global batch, one update",
        accumulating(2),
        whole,
        TWO_EPOCHS,
        in_keras=False,
    ),
    "accumulate, uneven batch": Feature(
        "the same with a last batch of 5", accumulating(2), uneven(5), TWO_EPOCHS, in_keras=False
    ),
    "mixed_bfloat16": Feature(
        "computes in bfloat16",
        _mixed("bfloat16", lambda: keras.optimizers.SGD(0.01)),
        whole,
        TWO_EPOCHS,
        tolerance=1e-3,
        compares_history=False,
    ),
    "mixed_float16": Feature(
        "computes in float16, the loss scaled",
        _mixed("float16", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))),
        whole,
        TWO_EPOCHS,
        results=_loss_scale,
        tolerance=1e-3,
        compares_history=False,
    ),
    "mixed_float16, overflow": Feature(
        "an infinite gradient on one replica: no update, half the scale",
        _regression,
        _one_overflow,
        results=_loss_scale,
        tolerance=1e-3,
        compares_history=False,
    ),
}
