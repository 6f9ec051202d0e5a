"""The number of rows that a program reads from a static shape, and computes with in Python.

With batches of a constant size, `x.shape[0]` is an int: that of a replica's rows. What a program
computes of it in Python, such as `(n - 1) / n`, would be a constant, and nothing would show that it
depends on the rows. In a step, `x.shape[0]` is therefore a `RowCount`: an int in `range`, shapes,
and slices, and where it meets tensors, a tensor that is computed from the number of rows.
"""

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
        make: function that returns it as a tensor, of type int32 or float64.
        step: the `ReplicaStep` in whose graph it does so.
    """

    make: Callable[[], tf.Tensor]
    dtype: type  # as Keras calls the type of numbers of Python

    def __new__(cls, value, make, step):
        """Returns a number of Python that has a tensor."""
        number = super().__new__(cls, value)
        number.make, number.step = make, step
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


def _operation(compute, is_reflected):
    """Returns a method of `RowNumber` that computes with another number of Python."""

    def method(self, other):
        if not isinstance(other, int | float) or isinstance(other, bool):
            return NotImplemented
        pair = (other, self) if is_reflected else (self, other)
        value = compute(*map(_plain, pair))
        if not isinstance(value, int | float):
            return value  # a root of a negative number

        def make():
            is_whole = all(isinstance(one, int) and one < 2**31 for one in (*pair, value))
            dtype = tf.int32 if is_whole else tf.float64
            a, b = (tf.cast(_tensor(one), dtype) for one in pair)
            return compute(a, b)

        return (RowCount if isinstance(value, int) else RowFraction)(value, make, self.step)

    return method


def _tensor(number):
    if isinstance(number, RowNumber):
        return number.make()
    is_whole = isinstance(number, int) and number < 2**31
    return tf.constant(number, tf.int32 if is_whole else tf.float64)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(RowNumber, f"__{_name}__", _operation(getattr(operator, _name), False))
    setattr(RowNumber, f"__r{_name}__", _operation(getattr(operator, _name), True))


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
        return step.dependence.note(tf.raw_ops.Shape(input=tensor)[axis], NUMBER_OF_ROWS)

    return (*sizes[:axis], RowCount(sizes[axis], make, step), *sizes[axis + 1 :])


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
