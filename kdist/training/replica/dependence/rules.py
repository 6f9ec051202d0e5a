"""Rules: from the dependences of an operation's inputs to that of its result."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from kdist.training.replica.dependence import kinds, mixing, tensors
from kdist.training.replica.dependence.values import (
    SOME_AXIS,
    UNKNOWN,
    UNKNOWN_OVER_ROWS,
    Dependence,
    vector_of,
)

# Constants up to this size only keep a number of rows from being zero.
_LARGEST_EPSILON = 1e-5


def sum_degree(tensor, inputs, first=0):
    """Returns the degree that all terms have; negligible terms have any.

    Zero is negligible, and so is a small constant that is added to a number of rows. Added to a sum
    of weights it is not: a sum divided by that is no mean over rows, which has to be reported.
    """
    operands = list(tensor.op.inputs)[first:]
    limit = _LARGEST_EPSILON if any(map(tensors.is_count, operands)) else 0
    degrees = {
        i.degree
        for i, operand in zip(inputs[first:], operands, strict=True)
        if not (i.is_fixed and tensors.is_at_most(operand, limit))
    }
    return degrees.pop() if len(degrees) == 1 else None


def broadcast_axis(tensor, inputs):
    """Returns the axis of rows of an elementwise operation, which broadcasts its inputs."""
    rank, axes = tensor.shape.rank, set()
    for i, operand in zip(inputs, tensor.op.inputs, strict=True):
        if i.axis is None:
            continue
        if rank is None or operand.shape.rank is None or i.axis == SOME_AXIS:
            axes.add(SOME_AXIS)
        else:
            axes.add(i.axis + rank - operand.shape.rank)
    return _only(axes)


def _only(axes):
    """Returns the only one of a set of axes; None for none, and `SOME_AXIS` for several."""
    if len(axes) > 1:
        return SOME_AXIS
    return axes.pop() if axes else None


def _summed(degrees):
    """Returns the degree of a product of tensors of these degrees."""
    return None if None in degrees else sum(degrees)


def reduced(tensor, kind, dependence):
    """Returns the dependence of a sum, mean, … over axes."""
    degree, axis = dependence.degree, dependence.axis
    if dependence.elements and kind == "Prod":
        return Dependence(_summed([e.degree for e in dependence.elements]))
    operand = tensor.op.inputs[0]
    rank = operand.shape.rank
    axes = None if kind == "L2Loss" else tf.get_static_value(tensor.op.inputs[1])
    if kind == "L2Loss" and degree is not None:
        degree *= 2
    if axis is None:
        is_simple = kind not in ("EuclideanNorm", "Prod") or degree == 0
        return Dependence(degree if is_simple else None)
    is_whole = tensor.shape.rank == 0 or kind == "L2Loss"
    if axes is not None and rank is not None:
        axes = {int(a) % rank for a in axes.reshape(-1)} if rank else set()
        is_whole = is_whole or len(axes) == rank
    elif not is_whole:
        return Dependence(degree if kind == "Mean" else None, SOME_AXIS)
    grows = {"Sum": 1.0, "L2Loss": 1.0, "Mean": 0.0, "Max": 0.0, "Min": 0.0}.get(kind)
    if is_whole or axis in axes:
        known = degree is not None and grows is not None
        return Dependence(degree + grows if known else None)
    if axis == SOME_AXIS:
        return Dependence(degree if kind == "Mean" else None, SOME_AXIS)
    is_kept = tensor.shape.rank == rank
    return Dependence(degree, axis if is_kept else axis - sum(a < axis for a in axes))


def _power(tensor, inputs):
    exponent = tf.get_static_value(tensor.op.inputs[1])
    axis, degree = broadcast_axis(tensor, inputs), inputs[0].degree
    if degree is None or (degree and (exponent is None or exponent.size != 1)):
        return Dependence(None, axis)
    return Dependence(degree * float(exponent.reshape(-1)[0]) if degree else 0.0, axis)


def _squared_difference(tensor, inputs):
    degree = sum_degree(tensor, inputs)
    return Dependence(None if degree is None else 2 * degree, broadcast_axis(tensor, inputs))


def _reshaped(tensor, inputs):
    i, rank = inputs[0], tensor.shape.rank
    if i.elements:
        return i if rank == 1 else UNKNOWN
    if i.counts_rows and rank == 1:
        return vector_of([i])
    if i.axis is None:
        return Dependence(i.degree)
    if i.axis != 0 or not rank:
        return Dependence(i.degree if rank else None, SOME_AXIS if rank else None)
    rows = tensor.op.inputs[0].shape[0]
    if rows == 1:
        return Dependence(i.degree, 0)
    axes = [axis for axis, size in enumerate(inputs[1].elements or ()) if size.degree == 1]
    if len(axes) == 1:
        return Dependence(i.degree, axes[0])
    if rows is None and tensor.shape[0] not in (None, 1):
        return Dependence(i.degree, SOME_AXIS)
    ones = 0
    for size in tensor.shape.as_list():
        if size != 1:
            break
        ones += 1
    return Dependence(i.degree, ones if ones < rank else 0)


def _transposed(tensor, inputs):
    i, order = inputs[0], tensors.order(tensor.op.inputs[1])
    if i.axis is None or i.axis == SOME_AXIS:
        return Dependence(i.degree, i.axis)
    return Dependence(i.degree, SOME_AXIS if order is None else order.tolist().index(i.axis))


def _expanded(tensor, inputs):
    i, place = inputs[0], tf.get_static_value(tensor.op.inputs[1])
    if i.axis is None or i.axis == SOME_AXIS or place is None or tensor.shape.rank is None:
        return Dependence(i.degree, None if i.axis is None else SOME_AXIS)
    place = int(place.reshape(-1)[0]) % tensor.shape.rank
    return Dependence(i.degree, i.axis + (place <= i.axis))


def _packed(tensor, inputs):
    if tensor.shape.rank == 1:
        if len({i.degree for i in inputs}) == 1:
            return Dependence(inputs[0].degree, elements=tuple(inputs))
        return vector_of(inputs)
    axis = _only({i.axis for i in inputs if i.axis is not None})
    place = tensor.op.get_attr("axis") % (tensor.shape.rank or 1)
    if axis is not None and axis >= 0:
        axis += place <= axis
    return Dependence(sum_degree(tensor, inputs), axis)


def _concatenated(tensor, inputs):
    axis = _only({i.axis for i in inputs if i.axis is not None})
    degrees = {i.degree for i in inputs[:-1]}
    if (
        axis == 0
        and any(i.is_fixed for i in inputs[:-1])
        and not mixing.is_along_others(-1)(tensor, inputs)
    ):
        return Dependence(None, axis)  # a mean over these is none over the rows of the batch
    return Dependence(degrees.pop() if len(degrees) == 1 else None, axis)


def _sliced(tensor, inputs):
    i, operation = inputs[0], tensor.op
    begin = tf.get_static_value(operation.inputs[1])
    shrunk = operation.get_attr("shrink_axis_mask")
    if i.elements is not None:
        ends, strides = (tf.get_static_value(operation.inputs[n]) for n in (2, 3))
        if any(x is None or len(x) != 1 for x in (begin, ends, strides)):
            return UNKNOWN
        if shrunk:
            return i.elements[int(begin[0])]
        first = None if operation.get_attr("begin_mask") else int(begin[0])
        last = None if operation.get_attr("end_mask") else int(ends[0])
        return vector_of(i.elements[first : last : int(strides[0])])
    if i.is_fixed and tensor.shape.rank:
        return Dependence(0.0, 0 if any(map(mixing.has_counts, inputs[1:3])) else None)
    if i.axis is None or i.axis == SOME_AXIS:
        return Dependence(i.degree, i.axis if tensor.shape.rank != 0 else None)
    if operation.get_attr("ellipsis_mask"):
        rank, new = operation.inputs[0].shape.rank, operation.get_attr("new_axis_mask")
        same = tensor.shape.rank == rank or i.axis == 0
        if operation.get_attr("ellipsis_mask") == 1 and rank is not None:
            others = (operation.inputs[1].shape[0] or rank) - 1 - bin(new).count("1")
            same |= i.axis < rank - others
        return Dependence(i.degree, i.axis if same and not new & 1 else SOME_AXIS)
    new, passed, axis = operation.get_attr("new_axis_mask"), 0, 0
    for place in range(operation.inputs[1].shape[0] or 0):
        if new >> place & 1:
            axis += 1
            continue
        is_removed = shrunk >> place & 1
        if passed == i.axis:
            return Dependence(i.degree, None if is_removed else axis)
        passed, axis = passed + 1, axis + (not is_removed)
    return Dependence(i.degree, axis + i.axis - passed)


def _gathered(tensor, inputs):
    """Returns the dependence of rows of a table."""
    table, indices = inputs[:2]
    if table.elements is not None:
        numbers = tf.get_static_value(tensor.op.inputs[1])
        if numbers is None:
            return UNKNOWN
        elements = [table.elements[int(number)] for number in numbers.reshape(-1)]
        return elements[0] if numbers.ndim == 0 else vector_of(elements)
    place = 0 if len(inputs) == 2 else tf.get_static_value(tensor.op.inputs[2])
    rank = tensor.op.inputs[0].shape.rank
    if place is not None and place < 0:  # such as the last axis
        place = None if rank is None else place + rank
    if table.axis is None and table.degree == 0 and (len(inputs) == 2 or inputs[2].is_fixed):
        if indices.axis is None or indices.axis == SOME_AXIS or place is None:
            return Dependence(0.0, indices.axis)
        return Dependence(0.0, indices.axis + int(place))
    if tensor.op.type == "GatherV2" and tensor.op.get_attr("batch_dims") and table.axis == 0:
        return Dependence(table.degree, 0)
    same = table.axis is not None and indices.is_fixed and len(inputs) == 3
    if same and place is not None and int(place) > (table.axis or 0) >= 0:
        return Dependence(table.degree, table.axis)
    if table.axis == indices.axis == 0 and tensors.is_along_first(tensor):
        return Dependence(None if table.degree != 0 else 0.0, 0)  # such as those of a mask
    return Dependence(None if table.degree != 0 else 0.0, SOME_AXIS if tensor.shape.rank else None)


def _cumulated(tensor, inputs):
    """Returns the dependence of running sums, which grow along the rows."""
    i, place = inputs[0], tf.get_static_value(tensor.op.inputs[1])
    if i.axis is None:
        return Dependence(i.degree)
    is_along_others = place is not None and i.axis >= 0 and place % tensor.shape.rank != i.axis
    return Dependence(i.degree if is_along_others else None, i.axis)


def _segmented(tensor, inputs):
    """Returns the dependence of rows that are added up in a fixed number of segments."""
    data, _, number = inputs
    if data.is_of_weights and data.axis is None:  # slices of a gradient, as a tensor
        return Dependence(data.degree)
    operand, segments = tensor.op.inputs[0], tensor.shape[0] if tensor.shape.rank else None
    is_per_row = not number.is_fixed or segments in (None, operand.shape[0])
    if data.axis != 0 or is_per_row or tensor.op.inputs[1].shape.rank != 1:
        return Dependence(None, data.axis)
    is_sum = tensor.op.type == "UnsortedSegmentSum"
    return Dependence(None if data.degree is None else data.degree + is_sum)


def _scattered(tensor, inputs):
    """Returns the dependence of rows that are added up, or written, at a fixed number of places."""
    _, data, whole = inputs if tensor.op.type == "ScatterNd" else (*inputs[1:], inputs[0])
    if data.axis != 0 or not whole.is_fixed or tensor.shape[0] is None:
        is_simple = data.degree == 0 and (whole.degree == 0 or whole.elements is not None)
        axis = data.axis if whole.axis is None else whole.axis
        return Dependence(0.0 if is_simple else None, axis)
    if tensor.shape[0] == tensor.op.inputs[1].shape[0]:
        return Dependence(None, 0)  # one place for each row, or as many places by chance
    is_sum = tensor.op.type in ("ScatterNd", "TensorScatterAdd", "TensorScatterSub")
    return Dependence(data.degree + 1 if is_sum and data.degree is not None else None)


def _distinct(tensor, inputs):
    """Returns the dependence of distinct values and their numbers, or of each row's place."""
    is_of_batch = inputs[0].is_by_row and tensor.value_index != 1
    return Dependence(None) if is_of_batch else Dependence(0.0, inputs[0].axis)


def _extreme(tensor, inputs):
    """Returns the dependence of the position of the largest or smallest number."""
    i, rank = inputs[0], tensor.op.inputs[0].shape.rank
    place = tf.get_static_value(tensor.op.inputs[1])
    if i.axis in (None, SOME_AXIS) or place is None or rank is None:
        return Dependence(0.0, i.axis if tensor.shape.rank else None)
    place = int(place) % rank
    return Dependence(0.0, None if place == i.axis else i.axis - (place < i.axis))


def _encoded(tensor, inputs):
    """Returns the dependence of one-hot codes."""
    i, rank = inputs[0], tensor.shape.rank
    place = tensor.op.get_attr("axis") % rank
    if i.axis is None:
        return Dependence(0.0, place if inputs[1].degree == 1 else None)
    return Dependence(0.0, i.axis if i.axis == SOME_AXIS else i.axis + (place <= i.axis))


def _padded_along(tensor, inputs):
    """Returns the dependence of a padded tensor, whose mean over rows is none if these are more."""
    i = inputs[0]
    if i.axis is None or i.axis == SOME_AXIS:
        return Dependence(i.degree, i.axis)
    return Dependence(None if tensors.is_padded(tensor, i.axis) else i.degree, i.axis)


def _listed(tensor, inputs):
    """Returns the dependence of a list, which is that of the tensor whose parts it contains."""
    return Dependence(inputs[0].degree, inputs[0].axis)


def _reduced_sparse(tensor, inputs):
    """Returns the dependence of sums or maxima of a sparse tensor."""
    axes, shape = tf.get_static_value(tensor.op.inputs[3]), tensor.op.inputs[2].shape[0]
    if axes is None or shape is None or 0 in np.reshape(axes, -1) % shape:
        return UNKNOWN_OVER_ROWS
    return Dependence(None, 0)


def _element(tensor, inputs):
    """Returns the dependence of an element of a list, such as a row, or a step of a sequence."""
    i = inputs[0]
    if i.axis == 0:
        return Dependence(i.degree, is_one_row=True)
    return Dependence(i.degree, i.axis if i.axis in (None, SOME_AXIS) else i.axis - 1)


def _counted(tensor, inputs):
    """Returns the dependence of numbers of values: of the batch, or of each row."""
    return Dependence(0.0, 0) if tensor.shape.rank == 2 else Dependence(1.0)


def _padded(tensor, inputs):
    """Returns the dependence of ragged rows that have been padded to the longest one."""
    return Dependence(0.0, 0)


def _ranged(tensor, inputs):
    counts_rows = any(i.degree == 1 for i in inputs)  # and not the steps of the longest row
    return Dependence(0.0, 0 if counts_rows else SOME_AXIS)


def _tiled(tensor, inputs):
    i, multiples = inputs[0], inputs[1]
    if i.axis is not None:
        return Dependence(i.degree, i.axis)
    axes = [number for number, e in enumerate(multiples.elements or ()) if not e.is_fixed]
    if not axes:
        return Dependence(i.degree, None if multiples.is_fixed else SOME_AXIS)
    return Dependence(i.degree, axes[0])


def _product_of_matrices(tensor, inputs):
    """Returns the dependence of a product, which may be a sum over rows."""
    degree = _summed([i.degree for i in inputs[:2]])
    axes = []
    for place, (i, operand) in enumerate(zip(inputs, tensor.op.inputs, strict=True)):
        rank = operand.shape.rank
        if i.axis is None:
            continue
        if i.axis == SOME_AXIS or rank is None:
            return Dependence(degree, SOME_AXIS)
        if i.axis == tensors.contracted_axis(tensor, place):
            return Dependence(None if degree is None else degree + 1)
        offset = (tensor.shape.rank or rank) - rank
        last_two = i.axis >= rank - 2
        axes.append(rank - 2 + place + offset if last_two else i.axis + offset)
    return Dependence(degree, axes[0] if axes else None)


def _contracted(tensor, inputs):
    """Returns the dependence of an Einstein sum."""
    degree = _summed([i.degree for i in inputs])
    terms, _, result = tensor.op.get_attr("equation").decode().partition("->")
    labels = set()
    for i, term in zip(inputs, terms.split(","), strict=True):
        if i.axis is None:
            continue
        if i.axis == SOME_AXIS or "." in term[: i.axis + 1]:
            return Dependence(degree, SOME_AXIS if i.axis else 0)
        labels.add(term[i.axis])
    summed = len(labels - set(result))
    degree = None if degree is None else degree + summed
    if len(labels) == summed:
        return Dependence(degree)
    place = min(map(result.index, labels & set(result)))
    return Dependence(degree, SOME_AXIS if "." in result[:place] else place)


RULES: dict[str, Callable] = {
    "BatchMatMulV2": _product_of_matrices,
    "ConcatV2": _concatenated,
    **dict.fromkeys(("ArgMax", "ArgMin"), _extreme),
    "Cumsum": _cumulated,
    "Einsum": _contracted,
    "ExpandDims": _expanded,
    "GatherV2": _gathered,
    "MatMul": _product_of_matrices,
    "OneHot": _encoded,
    "Pack": _packed,
    "Pow": _power,
    "RaggedTensorToTensor": _padded,
    **dict.fromkeys(("LinSpace", "Range"), _ranged),
    "Reshape": _reshaped,
    "ResourceGather": _gathered,
    "SquaredDifference": _squared_difference,
    "StridedSlice": _sliced,
    "Tile": _tiled,
    "Transpose": _transposed,
    "TensorListFromTensor": _listed,
    "TensorListGetItem": _element,
    **dict.fromkeys(("SparseReduceMax", "SparseReduceSum"), _reduced_sparse),
    **dict.fromkeys(("ScatterNd", *kinds.TENSOR_SCATTERS), _scattered),
    **dict.fromkeys(kinds.COUNTING, _counted),
    **dict.fromkeys(kinds.PADDING, _padded_along),
    **dict.fromkeys(kinds.UNIQUE, _distinct),
    **dict.fromkeys(kinds.SEGMENTS, _segmented),
}
