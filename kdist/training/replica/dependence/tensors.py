"""Facts about tensors and functions, read from their graph."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from kdist.training.replica.dependence import kinds

# Operations by which TensorFlow's softmax computes the order of axes.
_ON_NUMBERS = {
    "Add": np.add,
    "AddV2": np.add,
    "Range": np.arange,
    "Sub": np.subtract,
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1]),
    "Pack": lambda *parts: np.stack(parts),
}
# Operations by which TensorFlow's dropout computes its factor.
_ON_SCALARS = {"Add": np.add, "AddV2": np.add, "Mul": np.multiply, "Sub": np.subtract}


class Frame:
    """One call of a function: its outputs, and what its arguments are."""

    def __init__(self, graph, operation, frame):
        self.outputs = graph.outputs
        self._arguments = {
            id(inner.op): (outer, frame)
            for inner, outer in zip(graph.inputs, operation.inputs, strict=True)
        }
        self._graph = graph

    @classmethod
    def of(cls, operation, frame) -> "Frame | None":
        """Returns the frame of a call, or None if its function is not known here."""
        try:
            function = operation.graph._get_function(operation.get_attr("f").name)
            return cls(function.graph, operation, frame)
        except (AttributeError, KeyError, ValueError):
            return None

    def argument(self, placeholder):
        """Returns (tensor, frame) that the call passes for a placeholder, or None."""
        return self._arguments.get(id(placeholder.op))


def is_equal_on_all(operation):
    """Returns True if replicas compute the same from the same inputs, in functions, too."""
    if operation.type not in kinds.CONTROL_FLOW:
        is_stateful = operation.op_def is not None and operation.op_def.is_stateful
        return not is_stateful or operation.type in kinds.STATEFUL_AND_FIXED
    return all(
        "Random" not in inner.type and is_equal_on_all(inner)
        for graph in function_graphs(operation)
        for inner in graph.get_operations()
        if inner.type != "Placeholder"
    )


def function_graphs(operation):
    """Returns the graphs of the functions of a branch or a loop."""
    attributes = operation.node_def.attr.values()
    names = [a.func.name for a in attributes if a.func.name]
    names += [function.name for a in attributes for function in a.list.func]
    return [operation.graph._get_function(name).graph for name in names]


def contracted_axis(tensor, place):
    """Returns the axis of a product's factor over which it adds up."""
    attributes = {"MatMul": ("transpose_a", "transpose_b")}.get(tensor.op.type, ("adj_x", "adj_y"))
    is_transposed = tensor.op.get_attr(attributes[place])
    rank = tensor.op.inputs[place].shape.rank
    return rank - 1 if bool(is_transposed) == bool(place) else rank - 2


def inputs_of(tensor, places):
    """Returns the places of the inputs of a function from which a tensor is computed."""
    found, waiting, seen = set(), [tensor], set()
    while waiting:
        one = waiting.pop()
        if one.name in places:
            found.add(places[one.name])
        elif one.name not in seen:
            seen.add(one.name)
            waiting.extend(one.op.inputs)
    return found


def is_padded(tensor, axis):
    """Returns True if an axis is padded, or may be."""
    padding = tf.get_static_value(tensor.op.inputs[1], partial=True)
    return padding is None or any(size is None or size for size in np.ravel(padding[axis]))


def first_number(tensor):
    """Returns the first number of a shape or a position, if it is constant, else None."""
    value = tf.get_static_value(tensor.op.inputs[0] if tensor.op.type == "Pack" else tensor)
    return None if value is None else int(value.reshape(-1)[0])


def adds_padding(tensor):
    """Returns True for a mean or sum over an axis whose size the longest row of the batch has."""
    operand, axes = tensor.op.inputs[0], tf.get_static_value(tensor.op.inputs[1])
    if axes is None or not operand.shape.rank or _is_masked(operand):
        return False
    axes = {int(axis) % operand.shape.rank for axis in axes.reshape(-1)}
    return any(operand.shape[axis] is None for axis in axes - {0})


def _is_masked(tensor):
    """Returns True for a product with numbers that come from truth values, or for these."""
    if tensor.op.type == "Mul":
        return any(map(_is_masked, tensor.op.inputs))
    while tensor.op.type in ("Cast", "ExpandDims", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype == tf.bool


def values_of_rows(tensor):
    """Returns the parts of a ragged or sparse tensor of which each row has any number."""
    if isinstance(tensor, tf.SparseTensor):
        return [tensor.indices, tensor.values]
    if not isinstance(tensor, tf.RaggedTensor):
        return []
    return [tensor.flat_values, *tensor.nested_row_splits[1:]]


def keeps_positions(tensor):
    """Returns True if rows are gathered in their order, or several parts of each."""
    table, indices = tensor.op.inputs[:2]
    while indices.op.type in ("Cast", "Identity", "SelectV2"):  # chosen if there are any rows
        indices = indices.op.inputs[indices.op.type == "SelectV2"]
    bounds = [tf.get_static_value(bound) for bound in indices.op.inputs]
    is_whole = indices.op.type == "Range" and (bounds[0], bounds[2]) == (0, 1)
    return is_whole or table.op.type == "Reshape"


def is_computed_from_constants(tensor):
    """Returns True for a number, such as a condition, of constants that are compared."""
    kind, operands = tensor.op.type, tensor.op.inputs
    others = ("Cast", "Identity", "LogicalNot", "StridedSlice")
    is_known = kind in (*others, *kinds.COMPARISONS, *kinds.ELEMENTWISE)
    return kind == "Const" or (is_known and all(map(is_computed_from_constants, operands)))


def repeats_along(tensor, axis):
    """Returns True if a constant has the same values at all positions of an axis."""
    value = tf.get_static_value(tensor)
    return value is not None and bool(np.all(value == np.take(value, [0], axis)))


def static_value(tensor):
    """Returns the value of a scalar that is computed from constants, or None."""
    value = tf.get_static_value(tensor)
    kind, operands = tensor.op.type, tensor.op.inputs
    if value is None and kind in _ON_SCALARS and not any(o.shape.rank for o in operands):
        numbers = [static_value(operand) for operand in operands]
        return None if any(n is None for n in numbers) else _ON_SCALARS[kind](*numbers)
    if value is not None or kind not in ("Cast", "Identity", "Prod", "StridedSlice"):
        return value
    if kind in ("Cast", "Identity"):
        return static_value(operands[0])
    whole, place = tf.get_static_value(operands[0]), tf.get_static_value(operands[1])
    if whole is None or place is None or whole.ndim != 1:
        return None
    return whole.prod() if kind == "Prod" else whole[int(place.reshape(-1)[0])]


def order(tensor):
    """Returns the constant order of axes; TensorFlow's softmax computes it by operations."""
    value, operands = tf.get_static_value(tensor), tensor.op.inputs
    if value is None and tensor.op.type in _ON_NUMBERS:
        numbers = [order(operand) for operand in operands]
        return None if any(n is None for n in numbers) else _ON_NUMBERS[tensor.op.type](*numbers)
    return value


def summed(tensor):
    """Returns the tensor whose elements a sum adds up."""
    while tensor.op.inputs and (not tensor.shape.rank or tensor.op.type == "Sum"):
        tensor = tensor.op.inputs[0]
    return tensor


def size(tensor):
    """Returns the number of terms of a sum over all axes, if it is known before the step runs."""
    is_sum = tensor.op.type == "Sum" and tensor.shape.rank == 0
    return tensor.op.inputs[0].shape.num_elements() if is_sum else None


def is_count(tensor, dependence_of: Callable | None = None) -> bool:
    """Returns True if a tensor is computed from shapes alone, such as a number of rows.

    Args:
        tensor: a tensor.
        dependence_of: function from a tensor to its `Dependence`; numbers of the rows that a mask
            keeps, and of rows with padding, are then excluded. Defaults to None.
    """
    waiting, is_of_shape = [tensor], False
    while waiting:
        operation = getattr(waiting.pop(), "op", None)
        if operation is None or operation.type not in kinds.OF_COUNTS or rounds(operation):
            return False
        if operation.type in ("Shape", "Size"):
            is_of_shape = True
            found = dependence_of(operation.inputs[0]) if dependence_of is not None else None
            if found is not None and (found.is_chosen or found.has_other_rows):
                return False
        else:
            waiting.extend(operation.inputs)
    return is_of_shape


def rounds(operation):
    """Returns True for a cast to integers, which of a part of a number of rows is no part of it."""
    is_cast = operation.type == "Cast" and operation.outputs[0].dtype.is_integer
    return is_cast and operation.inputs[0].dtype.is_floating


def is_at_most(tensor, limit):
    """Returns True for a constant number whose absolute value is at most `limit`."""
    value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
    return value is not None and abs(value) <= limit


def is_along_first(tensor):
    """Returns True if rows are gathered, and not parts of them."""
    return tensor.op.type != "GatherV2" or tf.get_static_value(tensor.op.inputs[2]) == 0


def is_number(tensor):
    """Returns True for an integer, such as the number of rows over which a loop runs."""
    return tensor.shape.rank == 0 and tensor.dtype.is_integer


def is_one(tensor):
    """Returns True if a tile does not repeat the rows."""
    return first_number(tensor.op.inputs[1]) == 1
