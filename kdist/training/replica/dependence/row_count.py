"""The number of rows that a program reads from a static shape, and computes with in Python.

With batches of a constant size, `x.shape[0]` is an int: that of a replica's rows. What a program
computes of it in Python, such as `(n - 1) / n`, would be a constant, and nothing would show that it
depends on the rows. In a step, `x.shape[0]` is therefore a `RowCount`: an int in `range`, shapes,
and slices, and where it meets tensors, a tensor that is computed from the number of rows. It also
knows the number that one device would read, so that a program that decides by it is found.
"""

import functools
import math
import operator
import sys
import types
from collections.abc import Callable

import tensorflow as tf

from kdist.compat.tensorflow import preferred_dtype
from kdist.training.replica.dependence import fallbacks
from kdist.training.replica.dependence.of_step import is_in_graph
from kdist.training.replica.dependence.values import NUMBER_OF_ROWS

# Packages that read shapes, and compute with them, in no other way than kdist expects.
_LIBRARIES = {"kdist", "keras", "tensorflow"}
_BETWEEN = ("numpy", "kdist.training.replica.hooks")


class RowNumber:
    """A number that is computed from the number of a replica's rows, which its subclasses hold.

    Args:
        value: the number.
        whole: the number that one device would have, with all rows of the batch.
        make: function that returns it as a tensor, of type int32 or float64.
        step: the `ReplicaStep` in whose graph it does so.
    """

    whole: int | float
    make: Callable[[], tf.Tensor]
    dtype: type  # as Keras calls the type of numbers of Python

    def __new__(cls, value, whole, make, step):
        """Returns a number of Python that has a tensor."""
        number = super().__new__(cls, value)
        number.whole, number.make, number.step = whole, make, step
        return number

    def __tf_tensor__(self, dtype=None, name=None):
        """Returns the tensor, or a constant outside of the step."""
        preferred = preferred_dtype()
        is_whole = isinstance(self, int)
        if dtype is None and preferred is not None and (is_whole or preferred.is_floating):
            dtype = preferred  # of the tensor with which it is computed
        dtype = dtype or (tf.int32 if is_whole else tf.float32)
        if not self.step.is_running:
            return tf.convert_to_tensor(_plain(self), dtype, name=name)
        return tf.cast(self.make(), dtype, name=name)

    def __array_ufunc__(self, function, method, *inputs, **options):
        """Returns what NumPy computes, which knows no tensors."""
        if is_called_by_program():
            self._lose()
        return getattr(function, method)(*map(_plain, inputs), **options)

    def __float__(self):
        """Returns a number without a tensor, such as for `math.sqrt`."""
        if is_called_by_program():
            self._lose()
        return float(_plain(self))

    def __int__(self):
        """Returns a number without a tensor."""
        if is_called_by_program() and int(self.whole) != int(_plain(self)):
            self._lose()
        return int(_plain(self))

    def __divmod__(self, other):
        """Returns quotient and remainder."""
        return self // other, self % other

    def __rdivmod__(self, other):
        """Returns quotient and remainder."""
        return other // self, other % self

    def __round__(self, digits=None):
        """Returns the number, rounded to an even one between two, as TensorFlow does."""
        return _ROUND(self) if digits is None else round(_plain(self), digits)

    def __reduce__(self):
        """Copies are plain numbers."""
        return type(_plain(self)), (_plain(self),)

    def _lose(self):
        if self.step.is_running:
            self.step.dependence.check_rows_are_unknown()
            fallbacks.on_number_of_rows(self.step)


class RowCount(RowNumber, int):
    """The number of a replica's rows, or an integer that is computed from it."""

    dtype = int


class RowFraction(RowNumber, float):
    """A number with decimals that is computed from the number of a replica's rows."""

    dtype = float


def _plain(number):
    if isinstance(number, RowCount):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, RowFraction) else number


def _whole(number):
    return number.whole if isinstance(number, RowNumber) else number


def _operation(compute, is_reflected):
    """Returns a method of `RowNumber` that computes with another number of Python."""

    def method(self, other):
        if not isinstance(other, int | float) or isinstance(other, bool):
            return NotImplemented
        pair = (other, self) if is_reflected else (self, other)
        value = compute(*map(_plain, pair))
        whole = compute(*map(_whole, pair))
        if not isinstance(value, int | float):
            return value  # a root of a negative number

        def make():
            is_whole = all(isinstance(one, int) and one < 2**31 for one in (*pair, value))
            dtype = tf.int32 if is_whole else tf.float64
            return compute(*(_tensor(one, dtype) for one in pair))

        kind = RowCount if isinstance(value, int) else RowFraction
        return kind(value, whole, make, self.step)

    return method


def _function(compute, tensor_function):
    """Returns a method of `RowNumber` without other operands, such as `abs`."""

    def method(self):
        value, whole = compute(_plain(self)), compute(self.whole)
        return type(self)(value, whole, lambda: tensor_function(self.make()), self.step)

    return method


def _rounding(compute, tensor_function):
    """Returns a method of `RowNumber` that rounds it."""

    def method(self):
        if isinstance(self, RowCount):
            return self

        def make():
            return tf.cast(tensor_function(self.make()), tf.int32)

        return RowCount(compute(_plain(self)), compute(self.whole), make, self.step)

    return method


_ROUND = _rounding(round, tf.round)


def _decision(compute, is_reflected=False):
    """Returns a method that falls back if one device would have another result, as of `n > 6`."""

    def method(self, *others):
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented
        numbers = (*others, self) if is_reflected else (self, *others)
        found = compute(*map(_plain, numbers))
        if is_called_by_program() and found != compute(*map(_whole, numbers)):
            self._lose()
        return found

    return method


def _tensor(number, dtype):
    is_counted = isinstance(number, RowNumber)
    return tf.cast(number.make(), dtype) if is_counted else tf.constant(number, dtype)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(RowNumber, f"__{_name}__", _operation(getattr(operator, _name), False))
    setattr(RowNumber, f"__r{_name}__", _operation(getattr(operator, _name), True))
_OF_BITS = ("lshift", "rshift", "and_", "or_", "xor")
for _name in ("eq", "ne", "lt", "le", "gt", "ge", *_OF_BITS):
    setattr(RowNumber, f"__{_name.strip('_')}__", _decision(getattr(operator, _name)))
for _name in _OF_BITS:
    setattr(RowNumber, f"__r{_name.strip('_')}__", _decision(getattr(operator, _name), True))
RowNumber.__bool__ = _decision(bool)  # type: ignore[attr-defined]
for _name, _of_tensor in {"neg": tf.negative, "pos": tf.identity, "abs": tf.abs}.items():
    setattr(RowNumber, f"__{_name}__", _function(getattr(operator, _name), _of_tensor))
for _name, _of_tensor in {"floor": tf.floor, "ceil": tf.math.ceil, "trunc": tf.identity}.items():
    setattr(RowNumber, f"__{_name}__", _rounding(getattr(math, _name), _of_tensor))


def packed(value, dtype):
    """Returns a tensor for a program's list that contains a `RowNumber`, else the value.

    Args:
        value: any value.
        dtype: type of the tensor, or None.
    """
    elements = tf.nest.flatten(value) if isinstance(value, list | tuple) else ()
    if not any(isinstance(element, RowNumber) for element in elements):
        return value
    if not is_called_by_program():
        return value
    if dtype is None:
        types = [element.dtype for element in elements if tf.is_tensor(element)]
        has_floats = any(isinstance(element, float) for element in elements)
        dtype = types[0] if types else tf.float32 if has_floats else tf.int32
    return _stack(value, dtype)


def _stack(value, dtype):
    if isinstance(value, list | tuple):
        return tf.stack([_stack(element, dtype) for element in value])
    return tf.convert_to_tensor(value, dtype)


def with_counts(step, tensor, sizes):
    """Returns the sizes of a tensor's axes; that of the axis of a replica's rows is a `RowCount`.

    Args:
        step: the replica's `ReplicaStep`.
        tensor: a tensor.
        sizes: a tuple of ints, tensors, and None.
    """
    axis = axis_of_static_rows(step, tensor, sizes)
    if axis is None:
        return sizes

    def make():
        return step.dependence.note(_size_of(tensor, axis), NUMBER_OF_ROWS)

    batch_rows = step.share.batch_rows
    whole = batch_rows if isinstance(batch_rows, int) else sizes[axis]
    count = RowCount(sizes[axis], whole, make, step)
    return (*sizes[:axis], count, *sizes[axis + 1 :])


class HiddenRowsShape(tf.TensorShape):
    """A shape whose number of rows is hidden from the step, where the program reads a tensor.

    One device knows the number, so that the program may not expect None.

    Args:
        shape: the shape.
        axis: the axis of rows.
        count: function that returns the number of rows as a tensor.
    """

    def __init__(self, shape, axis, count):
        super().__init__(shape)
        self._axis, self._count = axis, count

    def __reduce__(self):
        """Copies are plain shapes."""
        return tf.TensorShape, (self.dims,)

    def __getitem__(self, key):
        """Returns a size, or a part of the shape."""
        found, places = super().__getitem__(key), range(self.rank)[key]
        if not is_called_by_program():
            return found
        if isinstance(places, range):
            is_kept = self._axis in places
            axis = places.index(self._axis) if is_kept else None
            return HiddenRowsShape(found, axis, self._count) if is_kept else found
        return self._count() if places == self._axis else found

    def __iter__(self):
        """Returns an iterator over the sizes."""
        return iter(self._sizes(is_called_by_program()))

    def as_list(self):
        """Returns the list of sizes."""
        return self._sizes(is_called_by_program())

    def _sizes(self, is_of_program):
        sizes = super().as_list()
        if is_of_program:
            sizes[self._axis] = self._count()
        return sizes


def with_hidden_count(step, tensor, shape):
    """Returns a static shape, in which a program reads a tensor as the number of hidden rows.

    Args:
        step: the replica's `ReplicaStep`.
        tensor: a tensor.
        shape: its `tf.TensorShape`.
    """
    sizes = tuple(shape)
    is_hidden = isinstance(step.share.batch_rows, int)
    if None not in sizes or not is_hidden or not is_in_graph(tensor):
        return shape
    found = step.dependence.of(tensor)
    is_known = found.axis is not None and found.axis >= 0 and sizes[found.axis] is None
    if not is_known or found.is_chosen or found.is_sized_by_values:
        return shape  # None on one device, too
    count = functools.partial(_size_of, tensor, found.axis)
    return HiddenRowsShape(shape, found.axis, count)


def _size_of(tensor, axis):
    return tf.raw_ops.Shape(input=tensor)[axis]


def axis_of_static_rows(step, tensor, sizes) -> int | None:
    """Returns the axis with the rows of a replica, whose number is known; None without one.

    Args:
        step: the replica's `ReplicaStep`.
        tensor: a tensor.
        sizes: the sizes of its axes.
    """
    dependence = step.dependence
    rows = dependence.static_rows
    if rows is None or rows not in sizes or not dependence.is_divided or not is_in_graph(tensor):
        return None
    found = dependence.of(tensor)
    is_known = found.axis is not None and found.axis >= 0 and not found.has_other_rows
    return found.axis if is_known and sizes[found.axis] == rows else None


def is_called_by_program() -> bool:
    """Returns True if the caller was called by the program, and not by a library.

    Calls of NumPy and hooks between them do not count.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _module_of(frame).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and _module_of(frame).partition(".")[0] not in _LIBRARIES


def _module_of(frame):
    return frame.f_globals.get("__name__", "")
