"""Trains a feature once, under a strategy or without one."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from benchmarks.equivalence.feature import Feature, ModelClass, Outcome

SEED = 7


def run(
    feature: Feature, model_class: ModelClass, strategy: tf.distribute.Strategy | None = None
) -> Outcome:
    """Builds the model in the strategy's scope, trains it, and returns its weights and results.

    Args:
        feature: what to train.
        model_class: `keras.Model` or `kdist.Model`.
        strategy: None trains on one device without a strategy, as references do.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = feature.build(model_class)
    fit = {"verbose": 0, "shuffle": False, **feature.data(), **feature.fit}
    history = model.fit(callbacks=feature.callbacks(), **fit).history
    results = {"optimizer steps": _optimizer_steps(model), **feature.results(model)}
    return Outcome(
        weights=[np.asarray(weight) for weight in model.get_weights()],
        history={name: [float(value) for value in values] for name, values in history.items()},
        results={name: np.asarray(value) for name, value in results.items()},
    )


def _optimizer_steps(model):
    """Updates made; the step counter of a mirrored optimizer is read as its first copy."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(optimizer.iterations.numpy())
