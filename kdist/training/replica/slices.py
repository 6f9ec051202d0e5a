"""Gradients of looked-up rows (`tf.IndexedSlices`), combined over replicas and micro-steps.

Keras's optimizers square the slices of a gradient before they add up those of one index. Therefore
the slices must be those that one device has. A table that is looked up at words has one slice per
word of each row: replicas' slices are concatenated. A table that is looked up at positions, which
do not depend on the batch, has one slice per position: replicas' slices are added up.
"""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class SplitSlices:
    """A gradient in parts: values whose indices do not depend on the batch, and all others.

    Attributes:
        fixed: (indices, values) of each lookup at indices that do not depend on the batch.
        others: the rest as `tf.IndexedSlices`, or None.
        dense_shape: shape of the table.
    """

    fixed: tuple
    others: tf.IndexedSlices | None
    dense_shape: tf.Tensor | None

    @classmethod
    def of(cls, gradient: tf.IndexedSlices, is_fixed) -> "SplitSlices":
        """Divides a gradient at the lookups from which TensorFlow has concatenated it.

        Args:
            gradient: the gradient.
            is_fixed: function that returns True if indices do not depend on the batch.
        """
        lookups = _lookups(gradient.indices)
        kinds = [is_fixed(indices) for indices in lookups]
        if not any(kinds):
            return cls((), gradient, gradient.dense_shape)
        if all(kinds) and len(lookups) == 1:
            return cls(((gradient.indices, gradient.values),), None, gradient.dense_shape)
        sizes = [tf.size(indices) for indices in lookups]
        values = tf.split(gradient.values, sizes, num=len(sizes))
        parts = list(zip(kinds, lookups, values, strict=True))
        fixed = tuple((indices, part) for kind, indices, part in parts if kind)
        others = [(indices, part) for kind, indices, part in parts if not kind]
        return cls(fixed, _joined(others, gradient.dense_shape), gradient.dense_shape)

    def tensors(self) -> list:
        """Returns what is summed over replicas: values, and `tf.IndexedSlices` if there are any."""
        values = [values for _, values in self.fixed]
        return values if self.others is None else [*values, self.others]

    def with_tensors(self, tensors) -> "SplitSlices":
        """Returns the same gradient with other values, in the order of `tensors`."""
        tensors = list(tensors)
        fixed = tuple((indices, tensors.pop(0)) for indices, _ in self.fixed)
        return SplitSlices(fixed, tensors[0] if tensors else None, self.dense_shape)

    def joined(self) -> tf.IndexedSlices:
        """Returns the gradient as one `tf.IndexedSlices`."""
        parts = list(self.fixed)
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
    others = [(g.others.indices, g.others.values) for g in gradients if g.others is not None]
    return SplitSlices(fixed, _joined(others, first.dense_shape), first.dense_shape)


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
