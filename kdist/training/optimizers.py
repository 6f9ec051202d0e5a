"""Kinds of Keras optimizers: which wrap others, and which update each element separately."""

import warnings
from collections.abc import Iterator

import keras
import numpy as np

from kdist.compat.keras import MULTI_OPTIMIZERS
from kdist.training.scopes import outside_any_scope

_of = keras.optimizers

# The update of each element depends only on its own gradients (and on the number of the step).
_ELEMENTWISE_OPTIMIZERS = (
    *(_of.SGD, _of.Adam, _of.RMSprop, _of.Adagrad, _of.Adadelta, _of.Adamax, _of.Nadam),
    *(_of.Ftrl, _of.Lion, _of.ScheduleFreeAdamW),
)
_REASONS = {
    _of.Adafactor: "it factors a matrix's second moments into rows and columns, and scales an "
    "update by the root mean square of the whole weight",
    _of.Lamb: "its trust ratio uses the norms of a whole weight and its update",
    _of.Muon: "it orthogonalizes a whole matrix",
    MULTI_OPTIMIZERS: "the optimizers that a function returns are not known in advance. Use a "
    "keras.optimizers.OptimizerMap",
}


def check_elementwise(optimizer: keras.optimizers.Optimizer, where: str, otherwise: str):
    """Raises ValueError unless an optimizer is known to act on each element separately.

    Wrapped optimizers are also checked. An `update_step` of the program is tried on a small weight,
    with a warning if that fails.

    Args:
        optimizer: the optimizer.
        where: what is divided, at the beginning of the message.
        otherwise: what to do instead of choosing another optimizer.
    """
    for each in unwrapped(optimizer):
        try:
            reason = reason_against_parts(each)
        except NotTriedError as error:
            warnings.warn(
                f"{where}, and {error}. It must act on each element separately", stacklevel=2
            )
            continue
        if reason:
            raise ValueError(
                f"{where}, and {reason}. Use SGD, Adam, AdamW, RMSprop or another optimizer that "
                f"acts on each element separately, or {otherwise}"
            )


class NotTriedError(Exception):
    """An `update_step` of the program could not be tried."""


def reason_against_parts(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Returns why an optimizer that wraps no other cannot update parts of a weight; None if it can.

    Raises:
        NotTriedError: its `update_step` is the program's, and fails on a small weight.
    """
    name = type(optimizer).__name__
    for kind, reason in _REASONS.items():
        if isinstance(optimizer, kind):
            return f"{name} could act differently: {reason}"
    if not isinstance(optimizer, _ELEMENTWISE_OPTIMIZERS):
        return f"{name} is not known to act on each element separately"
    is_own = not type(optimizer).update_step.__module__.startswith("keras.")
    if is_own and not _is_elementwise(optimizer):
        return f"update_step of {name} does not act on each element separately"
    return None


def _is_elementwise(optimizer):
    """Returns False if `update_step` changes parts of a weight in another way than the whole.

    Averages over a gradient and norms of a weight do, for example.
    """
    try:
        of_whole, of_parts = outside_any_scope(lambda: _updates(optimizer))
    except Exception as error:
        name = type(optimizer).__name__
        raise NotTriedError(f"update_step of {name} could not be tried: {error}") from error
    return np.allclose(of_whole, of_parts, atol=1e-6)


def _updates(optimizer):
    """Returns a small weight after some updates: as a whole, and from updates of its halves."""
    whole = np.sin(np.arange(24.0)).reshape(6, 4)
    halves = [half.reshape(-1, 1) for half in np.split(whole, 2)]
    updated = [_updated(optimizer, values) for values in (whole, *halves)]
    return updated[0], np.concatenate(updated[1:]).reshape(whole.shape)


def _updated(optimizer, values):
    """Returns the values of a weight after some updates by a copy of an optimizer."""
    copy = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.1})
    weight = keras.Variable(values, dtype="float32", name="kernel")
    copy.build([weight])
    for number in range(3):
        gradient = keras.ops.cos((number + 2.0) * values)
        copy.update_step(keras.ops.cast(gradient, "float32"), weight.value, copy.learning_rate)
        counter_of(copy).assign_add(1)
    return weight.numpy()


def counter_of(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts the optimizer's steps, also accumulating ones.

    With `gradient_accumulation_steps`, `optimizer.iterations` is a quotient of it.
    """
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def unwrapped(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizers that update weights, without those that only wrap others."""
    inner = inner_optimizers(optimizer)
    for each in inner:
        yield from unwrapped(each)
    if not inner:
        yield optimizer


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that an optimizer wraps."""
    if isinstance(optimizer, _of.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    return list(optimizer.optimizers) if isinstance(optimizer, MULTI_OPTIMIZERS) else []
