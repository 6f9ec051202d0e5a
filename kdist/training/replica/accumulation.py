"""Gradient accumulation over micro-steps, with one reduction and one update per step."""

import keras
import tensorflow as tf

from kdist.training.replica.gradients import SplitSlices
from kdist.training.scopes import in_new_thread, this_replica
from kdist.training.sharding.optimizer_state import summed_gradients


class Accumulators:
    """Gradient sums of each variable of each optimizer; every replica has its own.

    Args:
        optimizers: Keras optimizers that have been built.
    """

    def __init__(self, optimizers):
        self._sums = {
            id(optimizer): {
                optimizer._var_key(variable): _zeros(shape, variable.dtype)
                for variable, shape in summed_gradients(optimizer)
            }
            for optimizer in optimizers
        }
        self._slices: dict[tuple, tf.Variable] = {}

    def add(self, optimizer, gradients, variables, is_last):
        """Adds `gradients`. In the last micro-step, returns the sums and resets them to zero.

        Slices of looked-up rows are kept: an optimizer squares each of them.

        Raises:
            ValueError: `optimizer` was not built, or was not an attribute of the model, before
                training.
        """
        sums = [self._sum(optimizer, variable) for variable in variables]
        totals = [
            self._add(total, gradient, is_last)
            for total, gradient in zip(sums, gradients, strict=True)
        ]
        return totals if is_last else None

    def _add(self, total, gradient, is_last):
        if gradient is None:
            return None
        if isinstance(gradient, SplitSlices):
            return self._add_slices(total, gradient, is_last)
        total.assign_add(gradient)
        if not is_last:
            return None
        result = tf.identity(total)
        with tf.control_dependencies([result]):
            total.assign(tf.zeros_like(total))
        return result

    def _add_slices(self, total, gradient, is_last):
        totals = []
        for number, part in enumerate(gradient.tensors()):
            key = total._unique_id, number, this_replica()
            is_fixed = not isinstance(part, tf.IndexedSlices)
            values = part if is_fixed else part.values
            all_values = self._appended((*key, "values"), values, total.device, is_last)
            if not is_fixed:
                indices = self._appended((*key, "indices"), part.indices, total.device, is_last)
                totals.append(tf.IndexedSlices(all_values, indices, part.dense_shape))
            else:
                steps = tf.reshape(all_values, tf.concat([[-1], tf.shape(values)], 0))
                totals.append(tf.reduce_sum(steps, 0))
        return gradient.with_tensors(totals) if is_last else None

    def _appended(self, key, part, device, is_last):
        """Returns the parts of all micro-steps so far, concatenated."""
        shape = [None, *part.shape[1:]]

        def new():
            with tf.device(device):
                start = tf.zeros([0, *part.shape[1:]], part.dtype)
                return tf.Variable(start, shape=shape, trainable=False, name="accumulated_slices")

        if key not in self._slices:
            self._slices[key] = in_new_thread(new)
        kept = self._slices[key]
        parts = tf.ensure_shape(tf.concat([kept.read_value(), part], 0), shape)
        with tf.control_dependencies([parts]):
            kept.assign(parts[:0] if is_last else parts)
        return parts

    def _sum(self, optimizer, variable):
        try:
            return self._sums[id(optimizer)][optimizer._var_key(variable)]
        except KeyError:
            raise ValueError(
                f"accumulate: {optimizer.name!r} updates {variable.name!r}, which it was not built "
                "for before training; call optimizer.build(variables) before fit, and keep "
                "the optimizer as an attribute of the model"
            ) from None


def optimizers_of(model):
    """Returns the compiled optimizer of a model, and those in its attributes, lists, and dicts."""
    found = {id(each): each for each in _optimizers_in(vars(model))}
    compiled = getattr(model, "optimizer", None)  # missing before `compile`
    if _is_optimizer(compiled):
        found[id(compiled)] = compiled
    return list(found.values())


def _optimizers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _optimizers_in(each)
    elif _is_optimizer(value):
        yield value


def _is_optimizer(value):
    return isinstance(value, keras.optimizers.Optimizer)


def _zeros(shape, dtype):
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, name="accumulated_gradient")
