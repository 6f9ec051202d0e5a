"""Kinds of Keras optimizers: which wrap others, and which update each element separately."""

from collections.abc import Iterator

import keras

from kdist.compat.keras import MULTI_OPTIMIZERS

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

    Wrapped optimizers are also checked.

    Args:
        optimizer: the optimizer.
        where: what is divided, at the beginning of the message.
        otherwise: what to do instead of choosing another optimizer.
    """
    remedy = (
        "Use SGD, Adam, AdamW, RMSprop or another optimizer that acts on each element separately, "
        f"or {otherwise}"
    )
    for each in unwrapped(optimizer):
        name = type(each).__name__
        for kind, reason in _REASONS.items():
            if isinstance(each, kind):
                raise ValueError(f"{where}, and {name} could act differently: {reason}. {remedy}")
        if not isinstance(each, _ELEMENTWISE_OPTIMIZERS):
            raise ValueError(
                f"{where}, and {name} is not known to act on each element separately. {remedy}"
            )


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
