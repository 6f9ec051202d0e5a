"""Gradients of one replica, and how those of looked-up rows (`tf.IndexedSlices`) are combined.

Keras's optimizers square the slices of a gradient before they add up those of one index. Therefore
the slices must be those that one device has. A table that is looked up at words has one slice per
word of each row: replicas' slices are concatenated. A table that is looked up at positions, which
do not depend on the batch, has one slice per position: replicas' slices are added up. A table by
which a sparse tensor is multiplied has one slice per distinct column: replicas' slices of one
column are added up.
"""

import dataclasses

import tensorflow as tf

from kdist.training.replica.dependence.kinds import UNIQUE


@dataclasses.dataclass(frozen=True)
class SplitSlices:
    """A gradient in parts, by the indices of its lookups.

    Attributes:
        fixed: (indices, values) of each lookup at indices that do not depend on the batch.
        distinct: `tf.IndexedSlices` of each lookup at indices that differ from each other.
        others: the rest as `tf.IndexedSlices`, or None.
        dense_shape: shape of the table.
    """

    fixed: tuple
    distinct: tuple
    others: tf.IndexedSlices | None
    dense_shape: tf.Tensor | None

    @classmethod
    def of(cls, gradient: tf.IndexedSlices, is_fixed) -> "SplitSlices":
        """Divides a gradient at the lookups from which TensorFlow has concatenated it.

        Args:
            gradient: the gradient.
            is_fixed: function that returns True if indices do not depend on the batch.
        """
        lookups, shape = _lookups(gradient.indices), gradient.dense_shape
        if len(lookups) == 1:
            values = [gradient.values]
        else:
            sizes = [tf.size(indices) for indices in lookups]
            values = tf.split(gradient.values, sizes, num=len(sizes))
        fixed, distinct, others = [], [], []
        for indices, part in zip(lookups, values, strict=True):
            if is_fixed(indices):
                fixed.append((indices, part))
            elif _are_distinct(indices):
                distinct.append(tf.IndexedSlices(part, indices, shape))
            else:
                others.append((indices, part))
        whole = gradient if len(others) == len(lookups) else _joined(others, shape)
        return cls(tuple(fixed), tuple(distinct), whole, shape)

    def tensors(self) -> list:
        """Returns what is summed over replicas: values, and `tf.IndexedSlices` if there are any."""
        slices = [*self.distinct, *([] if self.others is None else [self.others])]
        return [values for _, values in self.fixed] + slices

    def with_tensors(self, tensors) -> "SplitSlices":
        """Returns the same gradient with other values, in the order of `tensors`."""
        tensors = list(tensors)
        fixed = tuple((indices, tensors.pop(0)) for indices, _ in self.fixed)
        distinct = tuple(tensors.pop(0) for _ in self.distinct)
        return SplitSlices(fixed, distinct, tensors[0] if tensors else None, self.dense_shape)

    def joined(self) -> tf.IndexedSlices:
        """Returns the gradient as one `tf.IndexedSlices`."""
        parts = [*self.fixed, *map(_summed, self.distinct)]
        if self.others is not None:
            parts.append((self.others.indices, self.others.values))
        return _joined(parts, self.dense_shape)


def sum_of_steps(gradients) -> SplitSlices:
    """Returns the sum of the gradients of several micro-steps, a list of `SplitSlices`."""
    first = gradients[0]
    fixed = tuple(
        (indices, tf.add_n([gradient.fixed[number][1] for gradient in gradients]))
        for number, (indices, _) in enumerate(first.fixed)
    )
    distinct = tuple(
        _joined([(s.indices, s.values) for s in lookup], first.dense_shape)
        for lookup in zip(*(gradient.distinct for gradient in gradients), strict=True)
    )
    others = [(g.others.indices, g.others.values) for g in gradients if g.others is not None]
    return SplitSlices(fixed, distinct, _joined(others, first.dense_shape), first.dense_shape)


def with_shape_of(variable, gradient):
    """Returns a gradient with the static shape of its variable, which may have been lost."""
    is_dense = not isinstance(gradient, tf.IndexedSlices | SplitSlices | None)
    if is_dense and not gradient.shape == variable.shape:  # noqa: SIM201 (ranks may be unknown)
        gradient = tf.ensure_shape(gradient, variable.shape)
    return gradient


def summed_tensors(gradient):
    """Returns the tensors of a gradient that are summed over replicas."""
    if isinstance(gradient, SplitSlices):
        return gradient.tensors()
    return [] if gradient is None else [gradient]


def with_summed_tensors(gradient, tensors):
    """Returns a gradient with other tensors, in the order of `summed_tensors`."""
    if isinstance(gradient, SplitSlices):
        return gradient.with_tensors(tensors)
    return tensors[0] if tensors else None


def scale_gradient(gradient, factor):
    """Returns a gradient or `tf.IndexedSlices`, multiplied by a factor; None stands for 1."""
    if factor is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def zero_unless(condition, gradient):
    """Returns a gradient, or zero (not infinity × 0) where a condition is False."""
    counts = tf.cast(condition, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, counts)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, counts)


def values_of(gradients):
    """Returns a structure of gradients, with the values of `tf.IndexedSlices` instead of these."""
    if isinstance(gradients, tf.IndexedSlices):
        return gradients.values
    if isinstance(gradients, list | tuple):
        return [values_of(one) for one in gradients]
    if isinstance(gradients, dict):
        return {key: values_of(one) for key, one in gradients.items()}
    return gradients


def _summed(slices):
    """Returns (indices, values) with one slice for each distinct index."""
    indices, places = tf.unique(slices.indices)
    return indices, tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))


def _are_distinct(indices):
    """Returns True if indices are the distinct ones among others."""
    while hasattr(indices, "graph") and indices.op.type in ("Cast", "Identity", "Reshape"):
        indices = indices.op.inputs[0]
    is_unique = hasattr(indices, "graph") and indices.op.type in UNIQUE
    return is_unique and indices.value_index == 0


def _lookups(indices):
    """Returns the indices of each lookup, in order."""
    found, waiting = [], [indices]
    while waiting:
        tensor = waiting.pop()
        operation = tensor.op if hasattr(tensor, "graph") else None
        if operation is not None and operation.type == "ConcatV2":
            waiting.extend(list(operation.inputs)[-2::-1])
        elif operation is not None and operation.type == "Identity":
            waiting.append(operation.inputs[0])
        else:
            found.append(tensor)
    return found


def _joined(parts, dense_shape):
    if not parts:
        return None
    if len(parts) == 1:
        ((indices, values),) = parts
        return tf.IndexedSlices(values, indices, dense_shape)
    dtype = parts[0][0].dtype
    indices = tf.concat([tf.cast(indices, dtype) for indices, _ in parts], 0)
    return tf.IndexedSlices(tf.concat([values for _, values in parts], 0), indices, dense_shape)
