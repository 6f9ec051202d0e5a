"""Which optimizers do to the parts of a weight what they would do to the whole."""

from collections.abc import Iterable

import keras

_of = keras.optimizers

# Each element's update depends on its own gradients alone (and on the number of the step).
_ELEMENTWISE = (
    _of.SGD,
    _of.Adam,
    _of.RMSprop,
    _of.Adagrad,
    _of.Adadelta,
    _of.Adamax,
    _of.Nadam,
    _of.Ftrl,
    _of.Lion,
    _of.ScheduleFreeAdamW,
)
_REASONS = {
    _of.Adafactor: "it factors a matrix's second moments into rows and columns, and scales an "
    "update by the root mean square of the whole",
    _of.Lamb: "its trust ratio is of the norms of a whole weight and its update",
    _of.Muon: "it orthogonalizes a whole matrix",
    _of.MultiOptimizer: "which optimizers a function will give is known too late: give it a "
    "keras.optimizers.OptimizerMap",
}


def check_optimizer(optimizers: Iterable[keras.optimizers.Optimizer], layers: Iterable[str]):
    """Raises unless the optimizers do the same to the parts of weights as to the whole.

    Args:
        optimizers: a model's; what those hold that wrap others counts.
        layers: names of the divided ones.

    Raises:
        ValueError: one looks at a whole weight, or is not known not to.
    """
    instead = (
        "take SGD, Adam, AdamW, RMSprop or another one that acts on each element by itself, or "
        "leave the layers whole"
    )
    for optimizer in (inner for outer in optimizers for inner in _unwrapped(outer)):
        name = type(optimizer).__name__
        where = f"the weights of {', '.join(list(layers)[:3])} … are divided"
        for kind, reason in _REASONS.items():
            if isinstance(optimizer, kind):
                raise ValueError(f"{where}, and {name} could act otherwise: {reason}; {instead}")
        if not isinstance(optimizer, _ELEMENTWISE):
            raise ValueError(
                f"{where}, and {name} is not known to act on each element by itself; {instead}"
            )
        if optimizer.clipnorm:
            raise ValueError(
                f"{where}, and clipnorm={optimizer.clipnorm} would clip each part by its own norm: "
                "take global_clipnorm, whose norm is that of all weights, or clipvalue"
            )


def _unwrapped(optimizer):
    """Those that update weights, within those that wrap others."""
    inner = inner_optimizers(optimizer)
    for each in inner:
        yield from _unwrapped(each)
    if not inner:
        yield optimizer


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Those that an optimizer wraps."""
    if isinstance(optimizer, _of.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    return list(optimizer.optimizers) if isinstance(optimizer, _of.MultiOptimizer) else []
