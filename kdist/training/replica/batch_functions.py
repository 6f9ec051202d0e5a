"""Losses that are computed from all rows of a batch together, such as a ratio of sums.

A mean over a mask of the program's own is sum(l · m) / sum(m), a Dice loss divides sums, too, a
root mean square error is a function of one mean, and a contrastive loss compares each row with all
others. The mean of the replicas' values is another number than the value of the whole batch.
`find_function` divides such a loss into a function f and its arguments a₁, a₂, …, each of which is
a mean or a sum over rows, or a tensor with a part for each row. Replicas exchange the arguments.
With those of the whole batch, A, the loss is f(A), and its gradient is the sum over arguments of
∂f/∂A · ∇a, where each replica computes the ∇a of its own rows.
"""

import dataclasses
import enum
from typing import NamedTuple

import tensorflow as tf

from kdist.training.replica.dependence import tensors
from kdist.training.replica.dependence.walk import BatchDependence
from kdist.training.replica.reduction import all_reduce_sum, gather_rows

_REDUCTIONS = {"BatchMatMulV2", "Einsum", "L2Loss", "MatMul", "Mean", "Sum", "UnsortedSegmentSum"}
_LINEAR = {"Add", "AddN", "AddV2", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity"}
_LINEAR |= {"Mean", "Neg", "Pack", "PreventGradient", "Reshape", "Snapshot", "Squeeze"}
_LINEAR |= {"StopGradient", "StridedSlice", "Sub", "Sum"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv"}
# TensorFlow computes Jacobians with a placeholder for the index of a row.
_NOT_COPIED = {"PartitionedCall", "Placeholder", "PlaceholderWithDefault"}
# TensorFlow rewrites these when they are differentiated, and cannot do it twice.
_NOT_COPIED |= {"StatelessCase", "StatelessIf", "StatelessWhile"}
# Operations with weights. A loss that is computed from all rows does not repeat these for the rows
# of other replicas.
_WITH_WEIGHTS = {"BatchMatMulV2", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Einsum", "MatMul"}


class UnknownFunctionError(ValueError):
    """A loss cannot be computed from means, sums, and rows of all replicas."""


class Kind(enum.Enum):
    """Kind of an argument: how the argument of the whole batch follows from those of replicas."""

    MEAN = "mean over rows"
    SUM = "sum over rows"
    SHAPE = "shape, of which one element grows with the rows"
    ROWS = "a part for each row"
    FIXED = "equal on all replicas"


@dataclasses.dataclass(frozen=True)
class BatchFunction:
    """A scalar, or a tensor without rows, that is computed from all rows of a batch.

    Attributes:
        arguments: [(tensor, `Kind`)].
        is_state: it is assigned to a variable, so that no gradient is taken of it.
    """

    arguments: list
    is_state: bool
    _value: tf.Tensor
    _operations: list
    _dependence: BatchDependence

    @property
    def has_rows(self) -> bool:
        """True if an argument has a part for each row, whose number must not be a constant."""
        return any(kind in (Kind.ROWS, Kind.SHAPE) for _, kind in self.arguments)

    def of(self, arguments):
        """Returns what the same operations compute from other `arguments`.

        Raises:
            UnknownFunctionError: an operation cannot be repeated.
        """
        graph = tf.compat.v1.get_default_graph()
        known = {
            _key(tensor): new for (tensor, _), new in zip(self.arguments, arguments, strict=True)
        }
        for operation in self._operations:
            attributes = {
                name: attribute
                for name, attribute in operation.node_def.attr.items()
                if not name.startswith("_")
            }
            try:
                copy = graph.create_op(
                    operation.type,
                    [known[_key(tensor)] for tensor in operation.inputs],
                    [output.dtype for output in operation.outputs],
                    attrs=attributes,
                    op_def=operation.op_def,
                )
            except (TypeError, ValueError) as error:  # a shape that only this replica's rows have
                raise UnknownFunctionError from error
            for old, new in zip(operation.outputs, copy.outputs, strict=True):
                known[_key(old)] = new
        return known[_key(self._value)]

    def of_batch(self, share, zero_if_empty) -> "FunctionOfBatch":
        """Returns the same function of the rows of all replicas.

        Args:
            share: the `RowShare` of this replica.
            zero_if_empty: function that returns its argument, or zero if the replica has no rows.
        """
        whole, slices = self._of_all_replicas(share, zero_if_empty)
        value = self.of(whole)
        if self.is_state:
            return FunctionOfBatch(tf.stop_gradient(value), [])
        floating = [
            place
            for place, (tensor, kind) in enumerate(self.arguments)
            if tensor.dtype.is_floating and kind is not Kind.SHAPE
        ]
        slopes = tf.gradients(value, [whole[place] for place in floating])
        terms = []
        for place, slope in zip(floating, slopes, strict=True):
            if slope is not None:
                tensor, kind = self.arguments[place]
                slope = tf.stop_gradient(_dense(slope, whole[place]))
                if kind is Kind.ROWS:
                    slope = slices[place](slope)
                if kind in (Kind.ROWS, Kind.SUM):
                    fraction = tf.cast(share.micro_step_fraction, slope.dtype)
                    slope = tf.math.divide_no_nan(slope, fraction)
                terms.append((slope, tensor, 0))
        return FunctionOfBatch(tf.stop_gradient(value), terms)

    def _of_all_replicas(self, share, zero_if_empty):
        """Returns the arguments of the whole batch, and {place: function that slices own rows}."""
        rows = [place for place, (_, kind) in enumerate(self.arguments) if kind is Kind.ROWS]
        own = [tf.stop_gradient(self.arguments[place][0]) for place in rows]
        gathered, starts = gather_rows(own, share)
        whole = dict(zip(rows, gathered, strict=True))
        slices = {
            place: _slice_of(self.arguments[place][0], start, zero_if_empty)
            for place, start in zip(rows, starts, strict=True)
        }
        added = {}
        for place, (tensor, kind) in enumerate(self.arguments):
            if kind in (Kind.MEAN, Kind.SUM, Kind.SHAPE):
                added[place] = zero_if_empty(self._part(tensor, kind, share))
        for place, total in zip(
            added, all_reduce_sum(list(added.values())) if added else [], strict=True
        ):
            tensor, kind = self.arguments[place]
            if kind is Kind.SHAPE:
                total += tensor * (1 - self._growing(tensor))
            whole[place] = tf.cast(total, tensor.dtype)
        for place, (tensor, kind) in enumerate(self.arguments):
            if kind is Kind.FIXED:
                whole[place] = tf.identity(tensor)
        return [whole[place] for place in range(len(self.arguments))], slices

    def _part(self, tensor, kind, share):
        """Returns what this replica adds to an argument of the whole batch."""
        if kind is Kind.SHAPE:
            return tensor * self._growing(tensor)
        tensor = tf.stop_gradient(tensor)
        tensor = tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float64)
        fraction = share.micro_step_fraction if kind is Kind.MEAN else 1
        return tensor * tf.cast(fraction, tensor.dtype)

    def _growing(self, tensor):
        """Returns 1 for the elements of a shape that grow with the rows, else 0."""
        elements = self._dependence.of(tensor).elements
        return tf.constant([0 if e.is_fixed else 1 for e in elements], tensor.dtype)


def _dense(slope, like):
    """Returns a gradient as a tensor; TensorFlow would warn that looked-up rows become dense."""
    if not isinstance(slope, tf.IndexedSlices):
        return slope
    return tf.math.unsorted_segment_sum(slope.values, slope.indices, tf.shape(like)[0])


def _slice_of(tensor, start, zero_if_empty):
    """Returns a function that takes the rows of `tensor` from one of the rows of all replicas."""

    def slice_of(whole):
        held = tf.shape(tensor)[0]
        begin = tf.cast(start, tf.int32)
        padded = tf.pad(whole, [[0, held], *[[0, 0]] * (whole.shape.rank - 1)])
        return zero_if_empty(tf.ensure_shape(padded[begin : begin + held], tensor.shape))

    return slice_of


class FunctionOfBatch(NamedTuple):
    """A function of the rows of all replicas.

    Attributes:
        value: the scalar, or the tensor. Tapes do not follow it.
        terms: [(factor, term, 0)], whose sum over factor · gradient of term is this replica's
            gradient of a mean over rows.
    """

    value: tf.Tensor
    terms: list

    def replica_value(self):
        """Returns the scalar of the whole batch, to be differentiated like a mean over rows."""

        def part(factor, term):
            # Rows that are left out may be infinite, and the slope, as that of a root at 0.
            is_finite = tf.math.is_finite(term)
            zero = tf.where(is_finite, term - tf.stop_gradient(term), tf.zeros_like(term))
            return tf.reduce_sum(tf.math.multiply_no_nan(factor, zero))

        return tf.add_n([self.value, *(part(factor, term) for factor, term, _ in self.terms)])


def find_function(
    value, dependence: BatchDependence, is_state: bool = False
) -> BatchFunction | None:
    """Returns the function of the batch that `value` is; None if it needs none.

    A value that is linear in means and sums over rows is the mean of replicas' values.

    Args:
        value: a scalar of the step's graph, or a tensor that is no part for each row.
        dependence: the `BatchDependence` of the step's tensors.
        is_state: whether the value is assigned to a variable. Linear functions of means and sums
            are returned, too, and custom gradients do not count. Defaults to False.

    Raises:
        UnknownFunctionError: the function is not linear, and cannot be divided in this way.
    """
    arguments, operations, begun = {}, {}, set()
    linear_kinds = {Kind.FIXED} if is_state else {Kind.FIXED, Kind.MEAN, Kind.SUM}
    waiting, is_linear = [value], True
    while waiting:
        tensor = waiting[-1]
        key = _key(tensor)
        if key in arguments or key in begun:
            waiting.pop()
            if key not in arguments:
                operations[tensor.op.name] = tensor.op
            continue
        kind = _kind(tensor, dependence)
        if kind is not None:
            is_linear = is_linear and kind in linear_kinds
            arguments[key] = tensor, kind
            continue
        is_linear = is_linear and _is_linear(tensor.op, dependence)
        can_be_copied = _can_be_copied(tensor.op, dependence, is_state)
        if dependence.of(tensor).may_be_divided or not can_be_copied:
            raise UnknownFunctionError(f"{tensor.op.type} {tensor.name!r}")
        begun.add(key)
        waiting.extend(tensor.op.inputs)
    if is_linear:
        return None
    parts = list(arguments.values()), is_state, value, list(operations.values()), dependence
    return BatchFunction(*parts)


def _kind(tensor, dependence) -> Kind | None:
    """Returns the kind of an argument; None for what is computed from arguments."""
    is_noted = dependence.noted(tensor) is not None
    found = dependence.of(tensor)
    if found.is_fixed:
        return Kind.FIXED
    if tensor.dtype.is_complex:
        return None  # gradients are taken of real arguments
    if found.is_by_row and found.degree in (0, None):
        return Kind.ROWS
    if found.mixes_rows and not is_noted:
        return None
    inputs = [] if is_noted else [dependence.of(i) for i in tensor.op.inputs]
    if tensor.op.type == "Shape" and found.elements:
        is_known = all(e.is_fixed or e.degree == 1 for e in found.elements)
        return Kind.SHAPE if is_known else None
    is_reduction = any(i.axis is not None for i in inputs)
    if not is_noted and not tensors.is_count(tensor) and not is_reduction:
        if "Random" in tensor.op.type:
            return Kind.FIXED
        return Kind.MEAN if _is_divided_by_rows(tensor.op, found, inputs) else None
    if is_reduction and tensor.op.type not in _REDUCTIONS:
        return None
    if found.axis is not None or found.may_be_divided:
        return None
    is_of_some = any(i.is_sized_by_values or i.is_chosen for i in inputs)
    if tensor.op.type == "Mean" and is_of_some:
        return None  # such as a mean over a boolean mask
    return {0: Kind.MEAN, 1: Kind.SUM}.get(found.degree)


def _is_divided_by_rows(operation, found, inputs):
    """Returns True for a sum that is divided by a constant, this replica's number of rows."""
    if operation.type not in _QUOTIENTS or not inputs[1].is_fixed:
        return False
    return inputs[0].degree == 1 and found.degree == 0 and not found.may_be_divided


def _is_linear(operation, dependence):
    """Returns True for an operation whose mean over replicas is that of its inputs' means."""
    varies = [not dependence.of(tensor).is_fixed for tensor in operation.inputs]
    if operation.type in _LINEAR or not any(varies):
        return True
    if operation.type == "Cast":
        return operation.outputs[0].dtype.is_floating  # not to integers, which rounds
    if operation.type == "Mul":
        return sum(varies) < 2 or _is_mean_times_count(*operation.inputs, dependence)
    if operation.type not in _QUOTIENTS:
        return False
    numerator, divisor = operation.inputs
    is_mean = dependence.of(numerator).degree != 0 and tensors.is_count(divisor, dependence.of)
    return is_mean or not varies[1]


def _is_mean_times_count(a, b, dependence):
    """Returns True for a mean over rows times their number, which is a sum over them."""
    return any(
        tensors.is_count(count, dependence.of) and dependence.of(mean).degree == 0
        for count, mean in ((a, b), (b, a))
    )


def _can_be_copied(operation, dependence, is_state):
    is_known = operation.op_def is not None and not operation.op_def.is_stateful
    if not is_known or operation.type in _NOT_COPIED:
        return False
    if operation.type in _WITH_WEIGHTS:
        for tensor in operation.inputs:
            is_matrix = tensor.shape.rank is None or tensor.shape.rank > 1
            if is_matrix and dependence.of(tensor).is_fixed and tf.get_static_value(tensor) is None:
                return False
    return is_state or "_gradient_op_type" not in operation.node_def.attr


def _key(tensor):
    return id(tensor.graph), tensor.name
