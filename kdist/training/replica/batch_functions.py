"""Losses that are functions of several means and sums over the batch, such as a ratio of sums.

A mean over a mask of the program's own is sum(l · m) / sum(m), a Dice loss divides sums, too, and a
root mean square error is a function of one mean. The mean of the replicas' values is another
number than the value of the whole batch. `find_function` divides such a loss into a function f and
its arguments a₁, a₂, …, each of which is a mean or a sum over rows. With the arguments A of the
whole batch, the loss is f(A), and its gradient is the sum over arguments of ∂f/∂A · ∇a, where
replicas' ∇a are averaged or added up like those of any mean or sum.
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from kdist.training.replica.batch_dependence import BatchDependence, is_count
from kdist.training.replica.reduction import all_reduce_sum

_REDUCTIONS = {"BatchMatMulV2", "Einsum", "L2Loss", "MatMul", "Mean", "Sum", "UnsortedSegmentSum"}
_LINEAR = {"Add", "AddN", "AddV2", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity"}
_LINEAR |= {"Mean", "Neg", "Pack", "PreventGradient", "Reshape", "Snapshot", "Squeeze"}
_LINEAR |= {"StopGradient", "StridedSlice", "Sub", "Sum"}
# Reductions over rows that are no mean over replicas, if their degree as an argument is unknown.
_NONLINEAR_IF_UNKNOWN = {"Max", "Mean", "Min", "Prod"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv"}


class UnknownFunctionError(ValueError):
    """A loss is no linear function of means and sums, and cannot be computed from those."""


@dataclasses.dataclass(frozen=True)
class BatchFunction:
    """A scalar, or a tensor without rows, that is computed from means and sums over rows.

    Attributes:
        arguments: [(tensor, degree)]; the degree is 0 for a mean over rows, 1 for a sum, and None
            for what does not depend on the batch.
        value: the scalar or tensor.
    """

    value: tf.Tensor
    arguments: list
    _operations: list

    def of(self, arguments):
        """Returns what the same operations compute from other `arguments`."""
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
            copy = graph.create_op(
                operation.type,
                [known[_key(tensor)] for tensor in operation.inputs],
                [output.dtype for output in operation.outputs],
                attrs=attributes,
                op_def=operation.op_def,
            )
            for old, new in zip(operation.outputs, copy.outputs, strict=True):
                known[_key(old)] = new
        return known[_key(self.value)]

    def of_batch(self, share, zero_if_empty) -> "FunctionOfBatch":
        """Returns the same function of means and sums over the rows of all replicas.

        Args:
            share: the `RowShare` of this replica.
            zero_if_empty: function that returns its argument, or zero if the replica has no rows.
        """
        own = []
        for tensor, degree in self.arguments:
            if degree is not None:
                tensor = tf.stop_gradient(tensor)
                tensor = tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float64)
                fraction = 1 if degree else share.micro_step_fraction
                own.append(zero_if_empty(tensor * tf.cast(fraction, tensor.dtype)))
        sums = iter(all_reduce_sum(own))
        whole = [
            tf.identity(tensor) if degree is None else tf.cast(next(sums), tensor.dtype)
            for tensor, degree in self.arguments
        ]
        value = self.of(whole)
        floating = [
            place for place, (tensor, _) in enumerate(self.arguments) if tensor.dtype.is_floating
        ]
        slopes = tf.gradients(value, [whole[place] for place in floating])
        terms = []
        for place, slope in zip(floating, slopes, strict=True):
            if slope is not None:
                tensor, degree = self.arguments[place]
                slope = tf.stop_gradient(tf.convert_to_tensor(slope))
                if degree == 1:
                    fraction = tf.cast(share.micro_step_fraction, slope.dtype)
                    slope = tf.math.divide_no_nan(slope, fraction)
                terms.append((slope, tensor, 0))
        return FunctionOfBatch(tf.stop_gradient(value), terms)


class FunctionOfBatch(NamedTuple):
    """A function of the means and sums of all replicas' rows.

    Attributes:
        value: the scalar, or the tensor. Tapes do not follow it.
        terms: [(factor, term, 0)], whose sum over factor · gradient of term is this replica's
            gradient of a mean over rows.
    """

    value: tf.Tensor
    terms: list

    def replica_value(self):
        """Returns the scalar of the whole batch, to be differentiated like a mean over rows."""
        parts = [
            # The slope may be infinite, as that of a root at 0.
            tf.reduce_sum(tf.math.multiply_no_nan(factor, term - tf.stop_gradient(term)))
            for factor, term, _ in self.terms
        ]
        return tf.add_n([self.value, *parts])


def find_function(value, dependence: BatchDependence) -> BatchFunction | None:
    """Returns the function of means and sums that `value` is; None if it is a linear one.

    Args:
        value: a scalar of the step's graph, or a tensor without an axis of rows.
        dependence: the `BatchDependence` of the step's tensors.

    Raises:
        UnknownFunctionError: the function is not linear, and cannot be divided in this way.
    """
    arguments, operations, begun = {}, {}, set()
    waiting, is_linear, is_known = [value], True, True
    while waiting:
        tensor = waiting[-1]
        key = _key(tensor)
        if key in arguments or key in begun:
            waiting.pop()
            if key not in arguments:
                operations[tensor.op.name] = tensor.op
            continue
        degree = _degree(tensor, dependence)
        if degree != "computed":
            is_known = is_known and degree != "unknown"
            is_mean = degree != "unknown" or tensor.op.type not in _NONLINEAR_IF_UNKNOWN
            is_linear = is_linear and is_mean
            arguments[key] = tensor, degree
            continue
        is_linear = is_linear and _is_linear(tensor.op, dependence)
        is_known = is_known and not dependence.of(tensor).may_be_divided
        is_known = is_known and _can_be_copied(tensor.op)
        begun.add(key)
        waiting.extend(tensor.op.inputs)
    if is_linear:
        return None
    if not is_known:
        raise UnknownFunctionError
    return BatchFunction(value, list(arguments.values()), list(operations.values()))


def _degree(tensor, dependence):
    """Returns the degree of an argument, "computed" for what follows from these, or "unknown"."""
    found = dependence.noted(tensor)
    is_noted = found is not None
    found = found or dependence.of(tensor)
    if found.is_fixed:
        return None
    inputs = [] if is_noted else [dependence.of(i) for i in tensor.op.inputs]
    is_reduction = any(i.axis is not None for i in inputs)
    is_last = is_noted or is_count(tensor) or is_reduction
    if not is_last and "Random" in tensor.op.type:
        return None
    if not is_last and _is_divided_by_rows(tensor.op, found, inputs):
        return 0
    if not is_last:
        return "computed" if inputs and found.axis is None else "unknown"
    if is_reduction and tensor.op.type not in _REDUCTIONS:
        return "unknown"
    is_known = found.axis is None and found.degree in (0, 1) and not found.may_be_divided
    if tensor.op.type == "Mean" and inputs and inputs[0].is_sized_by_values:
        return "unknown"  # such as a mean over a boolean mask
    return int(found.degree) if is_known else "unknown"


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
        return sum(varies) < 2
    return operation.type in _QUOTIENTS and (not varies[1] or is_count(operation.inputs[1]))


def _can_be_copied(operation):
    is_known = operation.op_def is not None and not operation.op_def.is_stateful
    if not is_known or operation.type in ("Placeholder", "PartitionedCall"):
        return False
    return "_gradient_op_type" not in operation.node_def.attr


def _key(tensor):
    return id(tensor.graph), tensor.name
