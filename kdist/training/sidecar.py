"""A task that does not train: it follows the checkpoints of the job and evaluates each.

The evaluator runs the same program as the others. Where they call `fit`, it waits for the files
that the chief's checkpoint callback writes, and evaluates the newest one it has not seen, until the
chief has ended.
"""

import time
import warnings

import keras
import tensorflow as tf

from kdist.presence import Presence

_SECONDS_BETWEEN_LOOKS = 0.5


def make_evaluator(strategy: tf.distribute.Strategy, chief: str):
    """Marks the strategy of a task that evaluates, while somebody listens at `chief`'s address."""
    strategy.extended._kdist_chief = chief


def note_evaluator(strategy: tf.distribute.Strategy):
    """Marks the strategy of a task that trains: another one evaluates."""
    strategy.extended._kdist_is_evaluated = True


def is_evaluator(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process only evaluates."""
    return hasattr(strategy.extended, "_kdist_chief")


def is_evaluated_elsewhere(strategy: tf.distribute.Strategy) -> bool:
    """Whether another task evaluates what this one trains."""
    return hasattr(strategy.extended, "_kdist_is_evaluated")


def follow(model, callbacks, evaluate):
    """Evaluates each checkpoint that comes, until the chief has ended.

    Args:
        model: built as the chief's is; it gets the checkpoints' weights.
        callbacks: those of `fit`; one of them has `written()`, the (epoch, path) that there are,
            and `note_evaluation(epoch, results)`.
        evaluate: gives the results of the model as it is.

    Returns:
        A Keras `History` of `val_…`, with the number of the epoch of each.

    Raises:
        ValueError: no callback says where checkpoints are, or there is nothing to evaluate on.
    """
    checkpoint = next((c for c in keras.tree.flatten(callbacks) if hasattr(c, "written")), None)
    if checkpoint is None or evaluate is None:
        raise ValueError(
            "the evaluator follows checkpoints: give fit the validation_data and "
            "callbacks=[kdist.callbacks.EpochCheckpoint(directory)], as on the other tasks"
        )
    history = keras.callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    chief = Presence(model.distribute_strategy.extended._kdist_chief)
    seen, has_gone = 0, False
    while not has_gone:
        has_gone = chief.has_gone()  # before looking: what it wrote last is still evaluated
        epoch, path = max(checkpoint.written(), default=(0, None))
        if epoch > seen and _load(model, path):
            seen = epoch
            results = {f"val_{name}": value for name, value in evaluate().items()}
            checkpoint.note_evaluation(epoch, results)
            history.on_epoch_end(epoch - 1, results)
        elif not has_gone:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return history


def _load(model, path):
    """Takes the weights of a file; False if it has made room for newer ones meanwhile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the optimizer, which nobody needs here
            model.load_weights(path)
    except FileNotFoundError:
        return False
    return True
