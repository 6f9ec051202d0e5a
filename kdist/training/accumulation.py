"""Gradients of k micro-steps, added up until the last one: one reduction, one update."""

import keras
import tensorflow as tf


class Accumulators:
    """For each variable of each optimizer a sum of gradients; every replica has its own.

    Args:
        optimizers: Keras optimizers that are built.
    """

    def __init__(self, optimizers):
        self._sums = {
            id(optimizer): {
                optimizer._var_key(variable): _zeros_like(variable)
                for variable in optimizer._trainable_variables
            }
            for optimizer in optimizers
        }

    def add(self, optimizer, gradients, variables, is_last):
        """Adds `gradients`. In the last micro-step gives the sums and begins again at zero.

        Raises:
            ValueError: `optimizer` was not built, or not known, before training.
        """
        sums = [self._sum(optimizer, variable) for variable in variables]
        for total, gradient in zip(sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(gradient)
            elif gradient is not None:
                total.assign_add(gradient)
        if not is_last:
            return None
        totals = [
            None if g is None else tf.identity(t) for g, t in zip(gradients, sums, strict=True)
        ]
        with tf.control_dependencies([t for t in totals if t is not None]):
            for total in sums:
                total.assign(tf.zeros_like(total))
        return totals

    def _sum(self, optimizer, variable):
        try:
            return self._sums[id(optimizer)][optimizer._var_key(variable)]
        except KeyError:
            raise ValueError(
                f"accumulate: {optimizer.name!r} updates {variable.name!r}, which it was not built "
                "for before training began; call optimizer.build(variables) before fit, and keep "
                "the optimizer as an attribute of the model"
            ) from None


def optimizers_of(model):
    """The optimizer that `model` is compiled with, and those that are its attributes."""
    found = {id(value): value for value in vars(model).values() if _is_optimizer(value)}
    if _is_optimizer(model.optimizer):
        found[id(model.optimizer)] = model.optimizer
    return list(found.values())


def _is_optimizer(value):
    return isinstance(value, keras.optimizers.Optimizer)


def _zeros_like(variable):
    return tf.Variable(
        tf.zeros(variable.shape, variable.dtype), trainable=False, name="accumulated_gradient"
    )
