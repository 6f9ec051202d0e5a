"""Evaluator task: follows the checkpoints of a job and evaluates each one.

The evaluator runs the same program as the other tasks. Where they call `fit`, it waits for files of
the chief's checkpoint callback, and evaluates the newest one that it has not seen, until the chief
has ended.
"""

import time
import warnings

import keras
import tensorflow as tf

from kdist.cluster.heartbeat import LivenessProbe

_POLL_SECONDS = 0.5


def mark_evaluator(strategy: tf.distribute.Strategy, chief: str):
    """Marks the strategy of an evaluator task.

    Args:
        strategy: the strategy.
        chief: address that the chief listens on for as long as it runs.
    """
    strategy.extended._kdist_chief = chief


def mark_evaluated_elsewhere(strategy: tf.distribute.Strategy):
    """Marks the strategy of a training task in a job that has an evaluator."""
    strategy.extended._kdist_is_evaluated = True


def is_evaluator(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if this process only evaluates."""
    return hasattr(strategy.extended, "_kdist_chief")


def is_evaluated_elsewhere(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if another task evaluates what this one trains."""
    return hasattr(strategy.extended, "_kdist_is_evaluated")


def evaluate_checkpoints(model, callbacks, evaluate):
    """Evaluates each new checkpoint until the chief has ended.

    Args:
        model: a model built like the chief's. It loads the checkpoints' weights.
        callbacks: the callbacks of `fit`. One of them has a method `written()`, which returns
            (epoch, path) of each checkpoint, and `note_evaluation(epoch, results)`.
        evaluate: function that returns the evaluation results of the model.

    Returns:
        A Keras `History` of the `val_…` results, with the epoch of each checkpoint.

    Raises:
        ValueError: no callback writes checkpoints, or there is no validation data.
    """
    checkpoint = next((c for c in keras.tree.flatten(callbacks) if hasattr(c, "written")), None)
    if checkpoint is None or evaluate is None:
        raise ValueError(
            "the evaluator follows checkpoints: pass fit validation_data and "
            "callbacks=[kdist.callbacks.EpochCheckpoint(directory)], as on the other tasks"
        )
    history = keras.callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    chief = LivenessProbe(model.distribute_strategy.extended._kdist_chief)
    seen, has_ended = 0, False
    while not has_ended:
        has_ended = chief.is_gone()  # before the search, so that its last file is evaluated
        epoch, path = max(checkpoint.written(), default=(0, None))
        if epoch > seen and _load(model, path):
            seen = epoch
            results = {f"val_{name}": value for name, value in evaluate().items()}
            checkpoint.note_evaluation(epoch, results)
            history.on_epoch_end(epoch - 1, results)
        elif not has_ended:
            time.sleep(_POLL_SECONDS)
    return history


def _load(model, path):
    """Loads a file's weights; returns False if newer checkpoints have replaced the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the optimizer's state, which is not needed
            model.load_weights(path)
    except FileNotFoundError:
        return False
    return True
