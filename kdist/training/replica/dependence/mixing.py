"""Says whether an operation combines, moves, counts, or chooses rows of the batch."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from kdist.training.replica.dependence import kinds, tensors
from kdist.training.replica.dependence.values import SOME_AXIS


def _multiplies_pairs(tensor, kind, inputs):
    """Returns True for a product of each row of one matrix with each row of another one."""
    operands, axes = tensor.op.inputs, [i.axis for i in inputs]
    if None in axes or SOME_AXIS in axes:
        return kind == "MatMul" and None not in axes  # or adds up products of rows
    if any(operand.shape.rank is None for operand in operands):
        return False
    if kind == "Einsum":
        terms, _, result = tensor.op.get_attr("equation").decode().partition("->")
        labels = {term[i.axis] for i, term in zip(inputs, terms.split(","), strict=True)}
        return len(labels) == 2 and bool(labels & set(result)) and "." not in terms
    return all(
        i.axis >= operand.shape.rank - 2 and i.axis != tensors.contracted_axis(tensor, place)
        for place, (i, operand) in enumerate(zip(inputs, operands, strict=True))
    )


def mixes_rows(tensor, kind, inputs):
    """Returns True if an operation combines a row with other rows, or with a mean over rows.

    Rows that are taken by their positions in the batch count as well: the first of each replica are
    not those of the batch.
    """
    if _takes_positions(tensor, kind, inputs) or _uses_positions(tensor, kind, inputs):
        return True
    if kind == "Tile" and not inputs[1].is_fixed:
        of_pairs = inputs[0].axis is not None and has_counts(inputs[1])
        return of_pairs or repeats_over_rows(kind, inputs)
    if kind in (*kinds.ELEMENTWISE, *kinds.COMPARISONS) and _has_pairs(tensor, inputs):
        return True
    if kind == "Reshape" and (inputs[0].axis or 0) > 0:
        return _divides_other_axes(tensor, inputs[0].axis)
    is_with_rows = any(i.axis is not None for i in inputs)
    if kind in kinds.LOOPS:
        return _passes_rows_on(tensor.op, inputs)
    if kind in _OF_ALL_ROWS:
        return _OF_ALL_ROWS[kind](tensor, inputs)
    if kind == "OneHot" and inputs[0].axis is None and inputs[1].degree == 1:
        return True  # such as of the first row, or of that which has the largest value
    if kind in kinds.BRANCHES:
        is_check = tensor.op.inputs[0].op.type in ("All", "Any")  # such as of the labels of hinge
        is_of_rows = (inputs[0].is_over_rows and not is_check) or inputs[0].counts_rows
        return is_with_rows and is_of_rows
    if (
        is_with_rows
        and kind in (*kinds.ELEMENTWISE, *kinds.COMPARISONS)
        and tensor.dtype.is_floating
    ):
        # Not only scaled by the number of rows.
        is_scale = {i.degree is not None and kind != "SelectV2" for i in inputs if i.counts_rows}
        if False in is_scale:
            return True
    if kind in kinds.OF_MATRICES:
        return any(
            i.axis == SOME_AXIS or i.axis >= operand.shape.rank - 2
            for i, operand in zip(inputs, tensor.op.inputs, strict=True)
            if i.axis is not None
        )
    if kind in kinds.JOINS and not any(i.is_random for i in inputs):
        is_permuted = {i.is_permuted for i in inputs if i.axis is not None or i.is_one_row}
        if len(is_permuted) == 2 and (kind != "ConcatV2" or is_along_others(-1)(tensor, inputs)):
            return True  # a row and the one at another position
    if kind in ("BatchMatMulV2", "Einsum", "MatMul"):
        is_with_sums = is_with_rows and any(i.is_over_rows for i in inputs)
        return is_with_sums or (len(inputs) == 2 and _multiplies_pairs(tensor, kind, inputs))
    if kind in ("GatherV2", "ResourceGather"):
        table, indices = inputs[:2]
        if table.is_by_row and indices.is_over_rows and not _gathers_by_row(tensor, inputs):
            return True  # such as the row that has the largest value
        return table.is_over_rows and indices.axis is not None
    if kind in ("Mean", "Sum") and inputs[0].is_sized_by_values and inputs[0].axis == 0:
        return tensors.adds_padding(tensor)
    if kind in ("LogSoftmax", "Softmax", "TopKV2"):
        return inputs[0].axis == (tensor.shape.rank or 0) - 1
    if kind in kinds.CUMULATIVE:
        place = tf.get_static_value(tensor.op.inputs[1])
        return place is not None and inputs[0].axis == place % tensor.shape.rank
    return (
        kind not in kinds.COLLECTING
        and (is_with_rows or any(i.is_one_row for i in inputs))
        and any(
            i.is_over_rows and (operand.dtype.is_floating or kind == "SelectV2")
            for i, operand in zip(inputs, tensor.op.inputs, strict=True)
        )
    )


def is_position(tensor, kind, inputs):
    """Returns True for integers or truth values that depend on the positions of rows."""
    if tensor.dtype.is_floating:
        return False
    if kind == "Range":
        return any(i.degree == 1 or i.counts_rows for i in inputs)
    if kind in kinds.UNIQUE and tensor.value_index == 1:
        return True  # numbers of the distinct values, in the order of the rows
    is_chosen = kind.startswith(("Gather", "Resource", "Scatter", "TensorScatter"))
    return not is_chosen and any(i.is_position for i in inputs)


def _uses_positions(tensor, kind, inputs):
    """Returns True if numbers are computed from the positions of rows.

    These count from 0 on each replica. They are the same on all devices where they only choose
    something from each row.
    """
    if kind in ("LinSpace", "Range"):
        is_of_rows = any(i.degree == 1 or i.counts_rows for i in inputs)
        return tensor.dtype.is_floating and is_of_rows
    if kind in ("Slice", "StridedSlice"):
        return inputs[0].is_fixed and any(map(has_counts, inputs[1:3]))
    if kind in kinds.SEGMENTS:
        return inputs[1].is_position and inputs[0].axis == 0 and not tensors.keeps_positions(tensor)
    if kind in kinds.OF_DIAGONALS:
        axis = inputs[0].axis
        return axis not in (None, SOME_AXIS) and axis >= tensor.shape.rank - 2
    if kind == "GatherV2" and tensor.op.get_attr("batch_dims"):
        return inputs[1].is_position
    if kind in ("GatherV2", "ResourceGather"):
        if inputs[1].is_position and inputs[0].is_by_row and not _gathers_by_row(tensor, inputs):
            return not tensors.keeps_positions(tensor)
        return inputs[1].is_position and inputs[0].axis is None
    places = {"Select": [0], "SelectV2": [0], "Cast": [0], "OneHot": [0]}.get(kind, ())
    return tensor.dtype.is_floating and any(inputs[place].is_position for place in places)


def _passes_rows_on(operation, inputs):
    """Returns True for a loop over rows that passes what it computes from one to the next.

    It does so in a tensor, or as Keras's `scan` in a list that it also reads.
    """
    lists = [place for place, given in enumerate(operation.inputs) if given.dtype == tf.variant]
    rows = {place for place in lists if inputs[place].axis == 0}
    if not rows:
        return False
    body = operation.graph._get_function(operation.get_attr("body").name).graph
    places = {tensor.name: place for place, tensor in enumerate(body.inputs)}
    is_read = {
        place
        for operation in body.get_operations()
        if operation.type == "TensorListGetItem"
        for place in tensors.inputs_of(operation.inputs[0], places)
    }
    sources = [tensors.inputs_of(output, places) for output in body.outputs]
    for _ in sources:  # over several iterations
        sources = [found.union(*(sources[place] for place in found)) for found in sources]
    return any(
        place in found
        and found & rows
        and output is not given
        and (place in is_read or place not in lists)
        for place, (found, output, given) in enumerate(
            zip(sources, body.outputs, body.inputs, strict=True)
        )
    )


def repeats_over_rows(kind, inputs):
    """Returns True if an operation repeats a value that was computed from a reduction over rows."""
    place = {"BroadcastTo": 0, "Fill": 1, "Tile": 0}.get(kind)
    return place is not None and inputs[place].is_over_rows


def _has_pairs(tensor, inputs):
    """Returns True if an elementwise operation broadcasts rows along two axes, as of all pairs."""
    ranks = [operand.shape.rank for operand in tensor.op.inputs]
    if tensor.shape.rank is None or None in ranks:
        return False
    axes = {
        i.axis + tensor.shape.rank - rank
        for i, rank in zip(inputs, ranks, strict=True)
        if i.axis not in (None, SOME_AXIS)
    }
    return len(axes) > 1


def is_along_others(place):
    """Returns a function: True if the axis in input number `place` of an operation is not 0."""

    def is_along_others(tensor, inputs):
        axes, rank = tf.get_static_value(tensor.op.inputs[place]), tensor.op.inputs[0].shape.rank
        return axes is not None and bool(rank) and not np.any(np.asarray(axes) % rank == 0)

    return is_along_others


def _slices_others(tensor, inputs):
    """Returns True if a slice holds all rows."""
    operation = tensor.op
    if operation.type == "Slice":
        begin, size = (tensors.first_number(operation.inputs[n]) for n in (1, 2))
        sizes = inputs[2].elements
        return begin == 0 and (size == -1 or bool(sizes and sizes[0].degree == 1))
    masks = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask")]
    strides = tf.get_static_value(operation.inputs[3])
    is_whole = all(masks) and strides is not None and strides[0] == 1
    others = operation.get_attr("shrink_axis_mask") | operation.get_attr("new_axis_mask")
    return (is_whole and not others & 1) or bool(operation.get_attr("ellipsis_mask") & 1)


def _pads_others(tensor, inputs):
    """Returns True if no rows are added before or after others."""
    return not tensors.is_padded(tensor, 0)


def _takes_positions(tensor, kind, inputs):
    """Returns True if an operation takes some rows of the batch by their positions."""
    if kind in (*kinds.TENSOR_SCATTERS, "GatherNd", "XlaDynamicUpdateSlice"):
        return inputs[0].axis == 0 and inputs[1].axis is None and not inputs[1].is_over_rows
    place = {"Split": 1, "SplitV": 0, "GatherV2": 0, "Slice": 0, "StridedSlice": 0, "Unpack": 0}
    if kind not in place or not inputs[place[kind]].is_by_row:
        return False
    if kind == "GatherV2" and (inputs[1].axis is not None or tensor.op.get_attr("batch_dims")):
        return False
    return not KEEPS_ROWS[kind](tensor, inputs)


def _gathers_by_row(tensor, inputs):
    """Returns True if no row is gathered from others."""
    if inputs[0].axis is None or tensor.op.get_attr("batch_dims"):
        return True
    return is_along_others(2)(tensor, inputs)


def is_permuted(tensor, kind, inputs):
    """Returns True if rows of the batch have changed their positions."""
    is_moved = kind in ("ReverseV2", "Roll", "Slice", "StridedSlice")
    is_moved = is_moved and inputs[0].axis == 0 and not KEEPS_ROWS[kind](tensor, inputs)
    is_moved = is_moved and not _takes_joined_rows(tensor, kind, inputs)
    if kind in kinds.MOVING_POSITIONS and any(i.is_position for i in inputs):
        is_moved = any(i.counts_rows for i in inputs)
    if kind == "TensorListGetItem" and inputs[0].axis == 0:
        is_moved = tensor.op.inputs[1].op.type != "Placeholder"  # such as of the next row
    return is_moved or any(i.is_permuted for i in inputs)


def _takes_joined_rows(tensor, kind, inputs):
    """Returns True for a slice between multiples of the number of rows, such as one of two views.

    It takes all rows again from some that were joined.
    """
    if kind != "StridedSlice" or inputs[0].is_by_row:
        return False
    masks = [tensor.op.get_attr(name) & 1 for name in ("begin_mask", "end_mask")]
    masks[0] |= tensors.first_number(tensor.op.inputs[1]) == 0
    bounds = [i.elements[0].degree if i.elements else None for i in inputs[1:3]]
    return all(mask or degree == 1 for mask, degree in zip(masks, bounds, strict=True))


def has_rows_again(tensor, kind, inputs):
    """Returns True if all rows of the batch follow all rows, such as two views of each."""
    if kind in ("ConcatV2", "Tile") and any(i.axis == 0 for i in inputs):
        return not KEEPS_ROWS[kind](tensor, inputs) or any(i.has_rows_again for i in inputs)
    is_taken = kind in ("Slice", "Split", "SplitV", "StridedSlice", "Unpack")
    return not is_taken and any(i.has_rows_again for i in inputs)


def without_count(result, kind, inputs):
    """Returns the inputs without a constant by which a sum over rows is divided: their number."""
    sums = [i for i in inputs if i.degree == 1]
    is_mean = kind in ("Mul", *kinds.QUOTIENTS) and result.degree == 0
    return sums if is_mean and sums else inputs


def is_over_rows(kind, inputs):
    """Returns True for a result without rows that comes from a reduction over these."""
    reduces = kind in (
        *kinds.REDUCTIONS,
        *kinds.BILINEAR,
        *kinds.COUNTING,
        *kinds.SEGMENTS,
        *kinds.SUMMARIES,
    )
    reduces |= kind in kinds.CONTROL_FLOW
    has_rows = any(i.axis not in (None, SOME_AXIS) for i in inputs)
    return (reduces and has_rows) or any(i.is_over_rows for i in inputs)


def counts_rows(result, kind, inputs):
    """Returns True for a number that is computed from the number of rows alone."""
    if result.axis is not None or result.elements is not None:
        return False
    counts = [i.counts_rows or (kind == "Prod" and has_counts(i)) for i in inputs]
    return any(counts) and all(c or i.is_fixed for c, i in zip(counts, inputs, strict=True))


def has_counts(dependence):
    """Returns True for the number of rows, and for a vector that contains it."""
    return dependence.counts_rows or any(e.counts_rows for e in dependence.elements or ())


def _divides_other_axes(tensor, axis):
    """Returns True if a reshape puts values of several rows side by side.

    The axes before that of rows then are not a prefix of the result's.
    """
    before, after = tensor.op.inputs[0].shape.as_list(), tensor.shape.as_list()
    others = [size for place, size in enumerate(before) if place != axis]
    if None in others or after.count(None) > 1:
        return False
    first, step = int(np.prod(others[:axis])), 1
    for size in after:
        if size is None:  # n rows times what the sizes of other axes leave
            rest = [s for s in after if s is not None]
            return step * int(np.prod(others)) < first * int(np.prod(rest))
        step *= size
        if step % first and first % step:
            return True
    return False


def sizing_inputs(kind, inputs):
    """Returns those of an operation's inputs that tell how many rows its result has."""
    if kind in kinds.SEGMENTS and inputs[2].counts_rows:
        return inputs[2:]
    place = kinds.SHAPES_OF_PARTS.get(kind)
    return inputs if place is None else inputs[place : place + 1]


def is_chosen(kind, inputs, sizing):
    """Returns True for rows that a mask keeps, or for what is computed from each of them.

    Args:
        kind: type of the operation.
        inputs: the dependence of its inputs.
        sizing: those that tell how many rows the result has.
    """
    if kind == "GatherV2" and inputs[0].axis == 0 and inputs[1].is_sized_by_values:
        return True
    return kind == "DynamicPartition" or any(i.is_chosen for i in sizing)


def has_other_rows(tensor, kind, inputs):
    """Returns True for rows that are joined with others, or for what is computed from each."""
    if any(i.has_other_rows for i in inputs):
        return True
    if kind in kinds.PADDING:
        return inputs[0].axis not in (None, SOME_AXIS) and tensors.is_padded(tensor, inputs[0].axis)
    is_joined = kind == "ConcatV2" and any(i.is_fixed for i in inputs[:-1])
    return (
        is_joined and any(i.axis == 0 for i in inputs) and not is_along_others(-1)(tensor, inputs)
    )


def loses_degree(result, inputs):
    """Returns True if rows are not only scaled by their number, but added to others, as a bias."""
    if result.axis is None or result.degree is not None:
        return False
    return any(i.has_scaled_rows for i in inputs)


def contracted_places(tensor, inputs):
    """Returns (input, axis) of what a product multiplies with rows before it adds them up."""
    rows = next((n for n, i in enumerate(inputs) if i.axis not in (None, SOME_AXIS)), None)
    if rows is None or len(inputs) != 2:
        return []
    other, axis = 1 - rows, inputs[rows].axis
    if tensor.op.type == "Einsum":
        terms = tensor.op.get_attr("equation").decode().partition("->")[0].split(",")
        label = terms[rows][axis : axis + 1]
        return [(other, terms[other].index(label))] if label in terms[other] else []
    is_contracted = axis == tensors.contracted_axis(tensor, rows)
    return [(other, tensors.contracted_axis(tensor, other))] if is_contracted else []


def changes_gradients(kind, inputs):
    """Returns True if an operation is not linear in gradients that are not of the whole batch."""
    places = [place for place, i in enumerate(inputs) if i.is_of_weights and not i.is_reduced]
    if not places or kind in kinds.LINEAR_IN_GRADIENTS:
        return False
    if kind in ("Select", "SelectV2"):
        return 0 in places
    return (
        places != [0] if kind in kinds.QUOTIENTS else kind not in kinds.BILINEAR or len(places) > 1
    )


def _transforms_rows(axes):
    """Returns a function: True if the rows are along one of the last `axes` axes."""

    def transforms_rows(tensor, inputs):
        axis = inputs[0].axis
        return axis is not None and axis >= tensor.op.inputs[0].shape.rank - axes

    return transforms_rows


def _finds_range(tensor, inputs):
    """Returns True if numbers are quantized in the range that they have in the batch."""
    is_given = tensor.op.get_attr("range_given")
    return not is_given and inputs[0].axis not in (None, tensor.op.node_def.attr["axis"].i)


# Operations that may combine rows, and functions that tell.
_OF_ALL_ROWS: dict[str, Callable] = {
    **{kind: _transforms_rows(axes) for kind, axes in kinds.FOURIER.items()},
    **dict.fromkeys(kinds.OF_NEIGHBORS, lambda tensor, inputs: (inputs[0].axis or 0) > 0),
    **dict.fromkeys(kinds.HIDDEN, lambda tensor, inputs: any(i.axis is not None for i in inputs)),
    **dict.fromkeys(kinds.OF_SORTED_SEGMENTS, lambda tensor, inputs: inputs[0].is_by_row),
    **dict.fromkeys(
        kinds.FUSED_BATCH_NORMS, lambda tensor, inputs: tensor.op.get_attr("is_training")
    ),
    "ReverseSequence": lambda tensor, inputs: inputs[0].axis == tensor.op.get_attr("seq_dim"),
    "SparseTensorDenseMatMul": lambda tensor, inputs: inputs[3].axis is not None,
    **{f"QuantizeAndDequantizeV{version}": _finds_range for version in (2, 3, 4)},
}


# Whether a result is by row if its inputs are.
KEEPS_ROWS: dict[str, Callable] = {
    "ArgMax": is_along_others(1),
    "ArgMin": is_along_others(1),
    "ConcatV2": is_along_others(-1),
    **dict.fromkeys(kinds.CUMULATIVE, is_along_others(1)),
    "GatherV2": _gathers_by_row,
    "LogSoftmax": lambda tensor, inputs: tensor.shape.rank != 1,
    **dict.fromkeys(kinds.PADDING, _pads_others),
    "ReverseV2": is_along_others(1),
    "Roll": is_along_others(2),
    "Slice": _slices_others,
    "Softmax": lambda tensor, inputs: tensor.shape.rank != 1,
    "Split": lambda tensor, inputs: tf.get_static_value(tensor.op.inputs[0]) != 0,
    "SplitV": is_along_others(2),
    "StridedSlice": _slices_others,
    "Tile": lambda tensor, inputs: (
        inputs[0].axis == 0 and inputs[1].is_fixed and tensors.is_one(tensor)
    ),
    "TopKV2": lambda tensor, inputs: tensor.shape.rank != 1,
    "Unpack": lambda tensor, inputs: tensor.op.get_attr("axis") != 0,
}
