"""Finds how tensors of a step depend on the rows of the batch.

A loss that is a sum over rows grows with their number, and a mean does not. A table that is looked
up at positions receives one gradient per position, and a table that is looked up at words receives
one per word of each row. Replicas must combine these in different ways, and only the graph tells
which is which. `BatchDependence` walks from a tensor back to the step's rows.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from kdist.training.replica.colocation import outer_tensor
from kdist.training.replica.dependence import kinds, mixing, rules, tensors
from kdist.training.replica.dependence.values import (
    FIXED,
    FIXED_OR_ROWS,
    MEAN,
    NUMBER_OF_ROWS,
    ROWS,
    ROWS_OF_UNKNOWN_DEGREE,
    SOME_AXIS,
    SUM,
    UNKNOWN,
    UNKNOWN_OVER_ROWS,
    Dependence,
    elements_of,
    vector_of,
)

# A constant divides by a number that is not known before the step runs.
_SOME_NUMBER = -1


class BatchDependence:
    """Finds how tensors depend on the rows of the batch.

    Args:
        data: tensors of shape (rows, …), dense, ragged, or sparse: the replica's part of the batch.
        rows: the number of rows, if it is known before the step runs, else None.
        batch_rows: the number of rows of all replicas, if it is known, else None.
        rows_are_known: False gives everything computed from values of the rows an unknown degree.
            Defaults to True.

    Attributes:
        rows_of_parts: the numbers of rows of parts of the data, such as micro-batches.
    """

    def __init__(self, data, rows: int | None, batch_rows: int | None, rows_are_known: bool = True):
        self._rows, self._batch_rows = rows, batch_rows
        self.rows_of_parts: set[int] = set()
        self._leaf = ROWS if rows_are_known else ROWS_OF_UNKNOWN_DEGREE
        self._unknown = dataclasses.replace(self._leaf, is_by_row=False)
        self._known: dict[tuple, Dependence] = {}
        self._noted: dict[tuple, Dependence] = {}
        self._kept: list = []  # ids of eager tensors are unique as long as these exist
        self._frames: dict[tuple, tensors.Frame] = {}
        for tensor in data:
            parts = tf.nest.flatten(tensor, expand_composites=True)
            dependence = self._leaf if parts[0] is tensor else self._unknown
            for part in parts:
                self.note(part, dependence if part.shape.rank else FIXED)
            values = dataclasses.replace(dependence, is_sized_by_values=True, is_chosen=True)
            for part in tensors.values_of_rows(tensor):
                self.note(part, values)

    def note(self, tensor, dependence: Dependence):
        """Records the dependence of a tensor, at which walks end."""
        self._kept.append(tensor)
        self._noted[_key(tensor, None)] = dependence

    def noted(self, tensor) -> Dependence | None:
        """Returns the dependence of a tensor that has been recorded, or None."""
        return self._noted.get(_key(tensor, None))

    def of(self, tensor) -> Dependence:
        """Returns the dependence of a tensor."""
        waiting, begun = [(tensor, None)], set()
        while waiting:
            here = waiting[-1]
            if self._look_up(*here) is not None:
                waiting.pop()
                continue
            key, sources = _key(*here), self._sources(*here)
            missing = [s for s in sources if self._look_up(*s) is None]
            if missing and key not in begun:
                begun.add(key)
                waiting.extend(missing)
                continue
            inputs = [self._look_up(*source) or UNKNOWN for source in sources]
            self._kept.append(here[0])
            try:
                self._known[key] = self._rule(here[0], inputs)
            except (AttributeError, IndexError, TypeError, ValueError):  # an unusual operation
                self._known[key] = self._unknown_of(here[0])
            waiting.pop()
        return self._look_up(tensor, None)

    def _look_up(self, tensor, frame):
        key = _key(tensor, frame)
        return self._noted.get((id(None), *key[1:])) or self._known.get(key)

    def terms(self, tensor):
        """Returns [(factor, term, dependence)], whose sum is a scalar or a gradient.

        Sums of terms that depend on the batch in different ways are divided into them. A factor is
        a number or a fixed tensor.
        """
        found, waiting = [], [(1.0, tensor)]
        while waiting:
            factor, term = waiting.pop()
            dependence = self.of(term)
            parts = None if dependence.summed_degree is not None else self._parts(term)
            if parts is None:
                found.append((factor, term, dependence))
            else:
                waiting.extend((factor * f, part) for f, part in parts)
        return found

    def _parts(self, tensor):
        """Returns [(factor, part)] of a linear operation on tensors of one shape, or None."""
        if not hasattr(tensor, "graph"):
            return None
        operation = tensor.op
        kind, inputs = operation.type, list(operation.inputs)
        if any(part.shape.rank is None for part in [tensor, *inputs]):
            return None
        if kind in ("Identity", "PreventGradient", "Reshape") and inputs[0].shape == tensor.shape:
            return [(1.0, inputs[0])]
        if kind == "Sum" and inputs[0].op.type == "Pack" and tensor.shape.rank == 0:
            packed = list(inputs[0].op.inputs)
            return [(1.0, part) for part in packed] if not packed[0].shape.rank else None
        if kind in ("Add", "AddN", "AddV2", "Sub"):
            if any(part.shape != tensor.shape for part in inputs):
                return None
            signs = [1.0, -1.0] if kind == "Sub" else [1.0] * len(inputs)
            return list(zip(signs, inputs, strict=True))
        if kind == "Neg":
            return [(-1.0, inputs[0])]
        if kind == "Mul":
            for factor, part in (inputs, inputs[::-1]):
                is_scalar = factor.shape.rank == 0 and part.shape == tensor.shape
                if is_scalar and self.of(factor).is_fixed:
                    return [(factor, part)]
        if kind in kinds.QUOTIENTS and inputs[1].shape.rank == 0 and self.of(inputs[1]).is_fixed:
            return [(1.0 / inputs[1], inputs[0])]
        return None

    # Graph.

    def _sources(self, tensor, frame):
        """Returns (tensor, frame) pairs from which a tensor is computed."""
        if not hasattr(tensor, "graph"):
            return []
        operation = tensor.op
        if operation.type == "Placeholder":
            source = frame.argument(tensor) if frame else None
            if source is None and (outer := outer_tensor(tensor)) is not None:
                source = outer, None
            return [source] if source else []
        if operation.type in kinds.CALLS:
            inner = self._frame(operation, frame)
            if inner:
                return [(inner.outputs[tensor.value_index], inner)]
        return [(source, frame) for source in operation.inputs]

    def _frame(self, operation, frame):
        key = (id(operation.graph), operation.name, id(frame))
        if key not in self._frames:
            self._frames[key] = tensors.Frame.of(operation, frame)
            self._kept.append(frame)
        return self._frames[key]

    # Rules.

    def _rule(self, tensor, inputs):
        if not hasattr(tensor, "graph"):  # a constant or a handle from outside of the function
            return FIXED if tf.executing_eagerly() is False else UNKNOWN
        kind = tensor.op.type
        if kind == "Placeholder" or kind in kinds.CALLS:
            if inputs and (kind == "Placeholder" or len(inputs) == 1):
                return inputs[0]
            return self._unknown_of(tensor)
        if kind == "PlaceholderWithDefault":
            return UNKNOWN  # such as the index of the row of which a Jacobian is computed
        if "Random" in kind or kind in ("Fill", "BroadcastTo"):
            found = self._filled(tensor, kind, inputs)
            is_over_rows = mixing.repeats_over_rows(kind, inputs)
            return dataclasses.replace(
                found,
                is_over_rows=is_over_rows and found.axis is None,
                mixes_rows=any(i.mixes_rows for i in inputs)
                or (is_over_rows and found.axis is not None),
                is_random="Random" in kind,
            )
        if kind == "ConcatV2" and tensor.shape.rank == 1 and any(i.elements for i in inputs):
            parts = zip(inputs[:-1], tensor.op.inputs, strict=False)
            return vector_of([e for part in parts for e in elements_of(*part)])
        if kind == "Shape":
            return self._shape(tensor.op.inputs[0], inputs[0])
        if kind == "Size" and not inputs[0].is_fixed:
            if inputs[0].has_other_rows:
                return UNKNOWN
            if inputs[0].axis is None:
                return UNKNOWN_OVER_ROWS if inputs[0].is_sized_by_values else MEAN
            return SUM if inputs[0].is_sized_by_values else NUMBER_OF_ROWS
        if all(i.is_fixed for i in inputs):
            if inputs and not tensors.is_equal_on_all(tensor.op):
                return self._unknown_of(tensor)
            return FIXED_OR_ROWS if self._may_count_rows(tensor, kind, inputs) else FIXED
        result = self._varying(tensor, kind, inputs)
        sizing = mixing.sizing_inputs(kind, inputs)
        sized = kind in kinds.SIZED_BY_VALUES or any(i.is_sized_by_values for i in sizing)
        divided = result.may_be_divided or any(i.may_be_divided for i in inputs)
        mixes_rows = (
            mixing.mixes_rows(tensor, kind, inputs)
            or self._mixes_rows_inside(tensor.op, inputs)
            or self._has_constants_of_rows(tensor, kind, inputs)
            or self._divides_into_groups(tensor, kind, inputs)
            or mixing.loses_degree(result, inputs)
        )
        return dataclasses.replace(
            result,
            is_sized_by_values=sized,
            may_be_divided=divided,
            may_count_rows=result.axis is None
            and self._may_count_rows(tensor, kind, mixing.without_count(result, kind, inputs)),
            is_of_gradient=any(i.is_of_gradient for i in inputs),
            is_of_weights=any(i.is_of_weights for i in inputs),
            is_nonlinear=any(i.is_nonlinear for i in inputs)
            or mixing.changes_gradients(kind, inputs),
            is_reduced=any(i.is_reduced for i in inputs),
            is_over_rows=result.axis is None
            and (result.is_over_rows or mixing.is_over_rows(kind, inputs)),
            mixes_rows=mixes_rows or any(i.mixes_rows for i in inputs),
            is_permuted=(result.axis is not None or result.is_one_row)
            and mixing.is_permuted(tensor, kind, inputs),
            has_rows_again=result.axis == 0 and mixing.has_rows_again(tensor, kind, inputs),
            is_position=result.axis is not None and mixing.is_position(tensor, kind, inputs),
            is_random=any(i.is_random for i in inputs),
            counts_rows=result.counts_rows or mixing.counts_rows(result, kind, inputs),
            is_one_row=result.is_one_row or any(i.is_one_row for i in inputs),
            is_chosen=result.axis is not None and mixing.is_chosen(kind, inputs, sizing),
            has_other_rows=result.axis is not None and mixing.has_other_rows(tensor, kind, inputs),
            is_by_row=result.axis == 0
            and not (mixes_rows or any(i.mixes_rows for i in inputs))
            and self._is_by_row(tensor, kind, inputs),
        )

    def _unknown_of(self, tensor):
        """Returns the dependence of a tensor of which nothing is known: it may have rows."""
        return self._unknown if tensor.shape.rank != 0 else UNKNOWN

    def _varying(self, tensor, kind, inputs):
        """Returns the dependence of a result of which at least one input depends on the batch."""
        if kind in kinds.REDUCTIONS:
            return rules.reduced(tensor, kind, inputs[0])
        if kind in ("Mul", *kinds.QUOTIENTS) and len(inputs) == 2:
            return self._product(tensor, kind, inputs)
        if kind in rules.RULES:
            return rules.RULES[kind](tensor, inputs)
        if kind == "SoftmaxCrossEntropyWithLogits" and any(
            map(self._ends_with_rows, tensor.op.inputs, inputs)
        ):
            return UNKNOWN_OVER_ROWS  # a softmax over the rows of each class
        if kind in (*kinds.SUMS, "Select", "SelectV2"):
            first = 0 if kind in kinds.SUMS else 1  # after the condition
            degree = rules.sum_degree(tensor, inputs, first)
            return Dependence(degree, rules.broadcast_axis(tensor, inputs))
        if kind in kinds.LINEAR or kind in kinds.POWERS:
            degree = inputs[0].degree
            power = kinds.POWERS.get(kind, 1.0)
            degree = None if degree is None else degree * power
            axis = self._kept_axis(tensor, inputs)
            if degree and axis is None and tensors.rounds(tensor.op):
                degree = None
            elements = inputs[0].elements if kind in ("Cast", "Identity") else None
            return Dependence(degree, axis, elements=elements)
        has_rows = any(i.axis is not None for i in inputs)
        if has_rows and tensor.shape.rank == 0 and tensor.dtype.is_floating:
            return UNKNOWN  # control flow, or another operation that may reduce rows
        # Next to rows, a vector of numbers is a shape, as of a transposed convolution's output.
        is_loop = "While" in kind or kind.startswith("TensorList")
        is_simple = all(
            i.degree == 0 or (has_rows and i.elements) or (is_loop and tensors.is_number(operand))
            for i, operand in zip(inputs, tensor.op.inputs, strict=True)
        )
        return Dependence(0.0 if is_simple else None, self._kept_axis(tensor, inputs))

    def _product(self, tensor, kind, inputs):
        a, b = inputs
        axis = rules.broadcast_axis(tensor, inputs)
        if a.degree is None or b.degree is None:
            return Dependence(None, axis)
        degree = a.degree + b.degree if kind == "Mul" else a.degree - b.degree
        divided = False
        for place in (1,) if kind != "Mul" else (1, 0):
            if not inputs[place].is_fixed or inputs[1 - place].counts_rows:
                continue
            other, whose = tensor.op.inputs[1 - place], inputs[1 - place]
            divisor = self._divisor(tensor.op.inputs[place], kind)
            if divisor is None and axis is not None and kind == "Mul":
                divisor = self._divisor(tensor.op.inputs[place], "RealDiv")  # multiplies by it
            if divisor is None or (
                whose.degree == 1 and divisor == self._batch_rows != tensors.size(other)
            ):
                continue  # also a sum, divided by the size of the whole batch
            if divisor != _SOME_NUMBER and divisor not in self._sizes(other):
                continue  # another constant
            counts = (*self._numbers_of_rows(other), tensors.size(other))
            if kind != "Mul" and whose.degree == 1 and divisor in counts:
                return Dependence(0.0, axis)  # a sum, divided by the number of this replica's rows
            divided = True
        return Dependence(degree, axis, may_be_divided=divided)

    def _sizes(self, tensor):
        """Returns the number of rows, and its products with sizes of what is summed."""
        tensor = tensors.summed(tensor)
        found = {*self._numbers_of_rows(tensor)}
        for size in tensor.shape.as_list()[1:] if tensor.shape.rank else ():
            found |= {number * size for number in found if size}
        return found

    def _numbers_of_rows(self, tensor):
        """Returns the number of rows, and that of a tensor that may have several for each."""
        summed = tensors.summed(tensor)
        leading = summed.shape[0] if summed.shape.rank else None
        return self._rows, leading or self._rows

    def _may_count_rows(self, tensor, kind, inputs):
        """Returns True if a value without rows may have been computed from their number."""
        if (self._rows or 0) < 2:  # one row is hidden
            return False
        if kind in kinds.REDUCTIONS:  # such as the sum of a one for each row
            operand = tensor.op.inputs[0]
            is_of_rows = operand.shape.rank and operand.shape[0] == self._rows
            is_constant = is_of_rows and tensors.is_computed_from_constants(operand)
            return is_constant or inputs[0].may_count_rows
        if kind in kinds.ARITHMETIC:
            return any(i.may_count_rows for i in inputs)
        is_number = tensor.shape.rank == 0 and (tensor.dtype.is_floating or tensor.dtype.is_integer)
        value = tensors.static_value(tensor) if is_number else None
        if not value or not np.isfinite(value):
            return False
        value = float(value)
        return value % self._rows == 0 or abs(value * self._rows - 1) < 1e-5

    def _divisor(self, factor, kind):
        """Returns the number by which a constant divides, if it may come from that of the rows."""
        if not self._rows or factor.shape.rank != 0:
            return None
        value = tensors.static_value(factor)
        if value is None:
            return None if factor.op.type == "ReadVariableOp" else _SOME_NUMBER
        if not value or (kind == "Mul" and value == 1):
            return None
        with np.errstate(over="ignore"):
            divisor = abs(float(1 / value if kind == "Mul" else value))
        if not np.isfinite(divisor):
            return None  # such as of a mask, whose values do not count
        times = divisor / self._rows
        is_multiple = times > 0.5 and abs(times - round(times)) < 1e-5 * times
        return round(divisor) if is_multiple else None

    def _filled(self, tensor, kind, inputs):
        """Returns the dependence of a tensor whose shape is an argument: numbers, or one value."""
        values = inputs[1] if kind == "Fill" else inputs[0] if kind == "BroadcastTo" else MEAN
        shape = inputs[1] if kind == "BroadcastTo" else inputs[0] if inputs else UNKNOWN
        elements = shape.elements or ()
        axes = [number for number, e in enumerate(elements) if not e.is_fixed]
        if kind == "BroadcastTo" and values.axis not in (None, SOME_AXIS):
            axes = [values.axis + (tensor.shape.rank or 0) - (tensor.op.inputs[0].shape.rank or 0)]
        if axes:
            is_by_row = "Random" in kind or (kind == "BroadcastTo" and _is_repeated(tensor, values))
            return Dependence(values.degree, axes[0], is_by_row=axes[0] == 0 and is_by_row)
        if shape.is_fixed:
            dims = tensor.shape.as_list() if tensor.shape.rank else []
            if kind != "BroadcastTo" and self._rows is not None and self._rows in dims[:1]:
                return Dependence(values.degree, 0)
            return FIXED if values.is_fixed and "Random" not in kind else values
        return Dependence(values.degree, SOME_AXIS if tensor.shape.rank != 0 else None)

    def _is_by_row(self, tensor, kind, inputs):
        """Returns True if each row of a result whose first axis is that of rows follows from one.

        As with the axis of rows, operations that are not known in detail count as such.
        """
        with_rows = [i for i in inputs if i.axis is not None]
        if not with_rows or not all(i.is_by_row for i in with_rows) or kind in kinds.BY_POSITION:
            return False
        if any(i.is_over_rows for i in inputs):
            return False
        if kind == "Reshape":
            return self._begins_with_rows(tensor, inputs[1])
        return kind not in mixing.KEEPS_ROWS or mixing.KEEPS_ROWS[kind](tensor, inputs)

    def _mixes_rows_inside(self, operation, inputs):
        """Returns True if the functions of a branch or a loop combine rows with each other."""
        is_loop = operation.type in kinds.LOOPS
        given = inputs if is_loop else inputs[1:]
        if operation.type not in kinds.CONTROL_FLOW or all(i.axis is None for i in given):
            return False
        if any(i.is_one_row for i in given):
            return True  # a loop in another loop, which combines one row with all
        if not is_loop:
            functions = [(graph, given) for graph in tensors.function_graphs(operation)]
            return any(any(o.mixes_rows for o in self._outputs(*one)) for one in functions)
        condition, body = (
            operation.graph._get_function(operation.get_attr(name).name).graph
            for name in ("cond", "body")
        )
        may_count = self._may_be_compared(operation, condition)
        for _ in range(2):  # over several iterations
            outputs = self._outputs(body, given)
            (goes_on,) = self._outputs(condition, given)
            if goes_on.is_over_rows or any(output.mixes_rows for output in outputs):
                return True
            counts = goes_on.counts_rows or may_count
            if counts and any(map(_changes_rows, given, body.inputs, body.outputs)):
                return True
            given = [
                after if before.is_fixed else before
                for before, after in zip(given, outputs, strict=True)
            ]
        return False

    def _may_be_compared(self, loop, condition):
        """Returns True if a constant in a loop's condition may be the known number of rows."""
        constants = [*loop.inputs, *(o.outputs[0] for o in condition.get_operations() if o.outputs)]
        values = [tensors.static_value(tensor) for tensor in constants if not tensor.shape.rank]
        return (self._rows or 0) > 1 and self._rows in [v for v in values if v is not None]

    def _outputs(self, graph, inputs):
        """Returns the dependences of the outputs of a function, given those of its inputs."""
        inside = BatchDependence([], self._rows, self._batch_rows)
        for placeholder, dependence in zip(graph.inputs, inputs, strict=True):
            inside.note(placeholder, dependence)
        return [inside.of(output) for output in graph.outputs]

    def _has_constants_of_rows(self, tensor, kind, inputs):
        """Returns True if rows meet a constant that has other values for each of them.

        If the number of rows is known, their positions are such constants.
        """
        if (self._rows or 0) < 2 or kind not in kinds.WITH_CONSTANTS_OF_ROWS:
            return False
        operands = list(tensor.op.inputs)
        if kind in kinds.BRANCHES:
            return tensors.is_computed_from_constants(operands[0])
        if kind == "Tile":
            sizes = zip(tensor.shape, operands[0].shape, strict=True)
            is_repeated = any(new and old and new == old * self._rows for new, old in sizes)
            return inputs[0].axis is not None and is_repeated
        if kind == "GatherV2" and not tensor.op.get_attr("batch_dims"):
            return False
        if kind in kinds.BILINEAR - {"Mul"}:
            places = mixing.contracted_places(tensor, inputs)
        elif None in [operand.shape.rank for operand in operands]:
            return False
        else:
            rank = max(operand.shape.rank for operand in operands)
            # Others compare the first axes.
            ends = [rank - o.shape.rank if kind in kinds.JOINS else 0 for o in operands]
            axes = {
                i.axis + end
                for i, end in zip(inputs, ends, strict=True)
                if i.axis not in (None, SOME_AXIS)
            }
            places = [(n, axis - end) for n, end in enumerate(ends) for axis in axes]
        return any(
            inputs[n].is_fixed
            and 0 <= place < operands[n].shape.rank
            and operands[n].shape[place] == self._rows
            and not tensors.repeats_along(operands[n], place)
            for n, place in places
        )

    def _divides_into_groups(self, tensor, kind, inputs):
        """Returns True for a reshape of the rows to a fixed number of groups."""
        if kind != "Reshape" or not inputs[0].is_by_row or not tensor.shape.rank:
            return False
        return tensor.shape[0] not in (None, 1) and not self._begins_with_rows(tensor, inputs[1])

    def _begins_with_rows(self, tensor, shape):
        """Returns True if the first axis after a reshape is that of rows, or of parts of these."""
        size, operand = (tensor.shape[0] if tensor.shape.rank else 0), tensor.op.inputs[1]
        if size is not None:
            sizes = {self._rows, *self.rows_of_parts} - {None, 0}
            return any(size % rows == 0 for rows in sizes)
        if shape.elements and shape.elements[0].degree == 1:
            return True
        return tensors.first_number(operand) == -1

    def _ends_with_rows(self, matrix, dependence):
        """Returns True if the rows of the batch are on the second of two axes."""
        if dependence.axis == SOME_AXIS:
            return matrix.shape[0] not in (None, self._rows)
        return dependence.axis == 1

    def _shape(self, tensor, dependence):
        rank = tensor.shape.rank
        if dependence.is_fixed:
            return FIXED
        if rank is None or dependence.axis == SOME_AXIS:
            return UNKNOWN
        is_known = not dependence.is_sized_by_values
        unknown = UNKNOWN_OVER_ROWS if dependence.axis is None else UNKNOWN
        others = [
            FIXED if is_known and (size is not None or not dependence.mixes_rows) else unknown
            for size in tensor.shape
        ]  # of all pairs of rows, another axis grows, too
        rows = NUMBER_OF_ROWS if is_known else SUM
        if dependence.has_other_rows:
            rows = UNKNOWN
        return vector_of(
            [rows if n == dependence.axis else other for n, other in enumerate(others)]
        )

    def _kept_axis(self, tensor, inputs):
        """Returns the axis of rows after an operation that is not known in detail."""
        if tensor.op.type == "TensorListStack" and tensor.shape.rank and None in [*tensor.shape]:
            return self._axis_by_size(tensor)  # such as of what tf.map_fn computes for each row
        first = next((i for i in inputs if i.axis is not None), None)
        if first is None or tensor.shape.rank == 0:
            return None
        operands = tensor.op.inputs
        place = next(n for n, i in enumerate(inputs) if i is first)
        rank = tensor.shape.rank
        same_rank = rank is not None and rank == operands[place].shape.rank
        if tensor.op.type == "Squeeze":
            removed = tensor.op.get_attr("squeeze_dims")
            rank = operands[0].shape.rank
            if removed and rank is not None and first.axis >= 0:
                return first.axis - sum(axis % rank < first.axis for axis in removed)
        elif same_rank and "List" not in tensor.op.type and "While" not in tensor.op.type:
            return first.axis
        return self._axis_by_size(tensor)

    def _axis_by_size(self, tensor):
        """Returns the only axis of a size that is unknown, or that of the rows."""
        if tensor.shape.rank is None:
            return SOME_AXIS
        if tensor.shape.rank == 1:
            return 0
        sizes = tensor.shape.as_list()
        fits = [axis for axis, size in enumerate(sizes) if size is None or size == self._rows]
        return fits[0] if len(fits) == 1 else SOME_AXIS


def _is_repeated(tensor, values):
    """Returns True if a fixed tensor is repeated along the first axis of the result."""
    repeated, rank = tensor.op.inputs[0].shape, tensor.shape.rank
    if not values.is_fixed or None in (repeated.rank, rank):
        return False
    return repeated.rank < rank or repeated[0] == 1


def _changes_rows(dependence, before, after):
    """Returns True if a loop computes a tensor with rows from that of the step before.

    Lists may receive one row in each step.
    """
    return dependence.axis is not None and before.dtype != tf.variant and before is not after


def _key(tensor, frame):
    if hasattr(tensor, "graph"):
        return id(frame), id(tensor.graph), tensor.name
    return id(None), None, id(tensor)
