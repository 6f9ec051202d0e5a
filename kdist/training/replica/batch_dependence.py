"""Dependence of a step's tensors on the rows of the batch, read from the step's graph.

A loss that is a sum over rows grows with their number, and a mean does not. A table that is looked
up at positions receives one gradient per position, and a table that is looked up at words receives
one per word of each row. Replicas must combine these in different ways, and only the graph tells
which is which. `BatchDependence` walks from a tensor back to the step's rows.

The degree of a tensor is the power by which it grows if every row of the batch is repeated: 0 for
means, weights, and the values of single rows, 1 for sums and for the number of rows, None if the
graph does not tell.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from kdist.training.replica.colocation import outer_tensor

# The axis of rows exists, but its position is unknown.
_SOME_AXIS = -1
# A constant divides by a number that is not known before the step runs.
_SOME_NUMBER = -1
# Constants up to this size only keep a number of rows from being zero.
_LARGEST_EPSILON = 1e-5

_LINEAR = {"Abs", "Cast", "CheckNumerics", "EnsureShape", "Identity", "IdentityN", "Neg", "Relu"}
_LINEAR |= {"PreventGradient", "Snapshot", "Squeeze", "StopGradient"}
_SUMS = {"Add", "AddN", "AddV2", "Maximum", "Minimum", "Sub"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
_POWERS = {"Square": 2.0, "Sqrt": 0.5, "Rsqrt": -0.5, "Reciprocal": -1.0, "Inv": -1.0}
_POWERS |= {"Sign": 0.0}
_REDUCTIONS = {"All", "Any", "EuclideanNorm", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
# Operations whose result has a shape that depends on values.
_UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
_SIZED_BY_VALUES = {"RaggedTensorToTensor", "Where", *_UNIQUE}
# Operations whose rows depend on their positions, or on which other rows there are.
_BY_POSITION = {"DynamicPartition", "DynamicStitch", "GatherNd", "ListDiff", "Range", "ScatterNd"}
_SEGMENTS = {"UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentSum"}
_TENSOR_SCATTERS = {f"TensorScatter{name}" for name in ("Add", "Max", "Min", "Sub", "Update")}
_BY_POSITION |= {"ParallelDynamicStitch", *_TENSOR_SCATTERS, *_SEGMENTS, *_SIZED_BY_VALUES}
_BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}
# Operations that combine rows which have the same number, and follow each other.
_OF_SORTED_SEGMENTS = {f"Segment{name}" for name in ("Max", "Mean", "Min", "Prod", "Sum")}
_OF_SORTED_SEGMENTS |= {f"{name}V2" for name in ("SegmentMax", "SegmentMin", "SegmentProd")}
_OF_SORTED_SEGMENTS |= {"SegmentSumV2", "SparseSegmentMean", "SparseSegmentSum"}
# Operations that commute with a sum over replicas, if their other inputs are not gradients.
_LINEAR_IN_GRADIENTS = {"BroadcastTo", "ConcatV2", "ExpandDims", "GatherV2", "Mean", "Pack"}
_LINEAR_IN_GRADIENTS |= {"Reshape", "Split", "SplitV", "StridedSlice", "Sum", "Tile", "Transpose"}
_LINEAR_IN_GRADIENTS |= {"Add", "AddN", "AddV2", "Sub", "Unpack", *_LINEAR} - {"Abs", "Relu"}
_ELEMENTWISE = {"Mul", "SquaredDifference", *_QUOTIENTS, *_SUMS} - {"AddN"}
_COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr"}
_COMPARISONS |= {"NotEqual", "Pow", "SelectV2"}
_CUMULATIVE = {"Cumprod", "Cumsum", "CumulativeLogsumexp"}
_BILINEAR = {"BatchMatMulV2", "Einsum", "MatMul", "Mul"}
_JOINS = {"AddN", "ConcatV2", "Pack", *_BILINEAR, *_COMPARISONS, *_ELEMENTWISE}
_WITH_CONSTANTS_OF_ROWS = {"InTopKV2", "SoftmaxCrossEntropyWithLogits", *_JOINS}
_WITH_CONSTANTS_OF_ROWS |= {"Select", "SparseSoftmaxCrossEntropyWithLogits", "GatherV2", "Tile"}
_WITH_CONSTANTS_OF_ROWS |= {*_BRANCHES, *_SEGMENTS}
_ON_NUMBERS = {"Add": np.add, "AddV2": np.add, "Range": np.arange, "Sub": np.subtract}
_ON_NUMBERS |= {"ConcatV2": lambda *parts: np.concatenate(parts[:-1])}
_ON_NUMBERS |= {"Pack": lambda *parts: np.stack(parts)}
# Operations that lead from a shape to a number of rows.
_OF_COUNTS = {"Cast", "Const", "GatherV2", "Identity", "Mul", "Pack", "Prod", "Reshape", "Shape"}
_OF_COUNTS |= {"Size", "Squeeze", "StridedSlice"}
# Operations on the last two axes.
_OF_MATRICES = {"Cholesky", "LogMatrixDeterminant", "MatrixDeterminant", "MatrixInverse"}
_OF_MATRICES |= {"MatrixSolve", "MatrixTriangularSolve", "Qr", "SelfAdjointEigV2", "Svd"}
# Fourier transforms, and the number of their last axes that they combine.
_FOURIER = {
    f"{kind}FFT{suffix}": axes
    for kind in ("", "I", "R", "IR")
    for suffix, axes in (("", 1), ("2D", 2), ("3D", 3))
}
# Operations that combine neighbors along all axes but the first one.
_OF_NEIGHBORS = {"AvgPool", "AvgPool3D", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D"}
_OF_NEIGHBORS |= {"ExtractImagePatches", "LRN", "MaxPool", "MaxPool3D", "MaxPoolV2"}
_OF_NEIGHBORS |= {"ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"}
_FUSED_BATCH_NORMS = {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"}
# Operations on the diagonals of matrices, which are positions if rows are along these.
_OF_DIAGONALS = {"MatrixBandPart", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"}
_OF_DIAGONALS |= {"MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3"}
# With the number of rows, these change the positions of rows.
_MOVING_POSITIONS = {"FloorDiv", "FloorMod", "Maximum", "Minimum", "Mod", "Sub"}
_OF_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
_PADDING = {"MirrorPad", "Pad", "PadV2"}
# Other operations that may leave no axis of rows.
_SUMMARIES = {"ArgMax", "ArgMin", "ReduceJoin", "ScatterNd", "StridedSlice", *_UNIQUE}
_SUMMARIES |= _TENSOR_SCATTERS
_COUNTING = {"Bincount", "DenseBincount", "HistogramFixedWidth"}
_LOOPS = {"StatelessWhile", "While"}
_CONTROL_FLOW = {*_BRANCHES, *_LOOPS}
# Operations that do not compute with their inputs, but choose or collect them.
_COLLECTING = {"ConcatV2", "IdentityN", "Pack", "TensorListFromTensor", "TensorListPushBack"}
_COLLECTING |= {"TensorListSetItem", *_CALLS, *_CONTROL_FLOW}
_STATEFUL_AND_FIXED = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}


@dataclasses.dataclass(frozen=True)
class Dependence:
    """Dependence of one tensor on the rows of the batch.

    Attributes:
        degree: the power by which it grows with repeated rows; None if that is unknown.
        axis: position of the axis of rows; None without one, -1 if its position is unknown.
        is_fixed: it does not depend on the batch, and is equal on all replicas.
        may_be_divided: a constant factor may have been computed from the number of rows.
        is_sized_by_values: its shape may depend on values of the batch.
        is_of_gradient: it was computed from the gradient of a tape.
        is_of_weights: it was computed from the gradient with respect to variables.
        is_nonlinear: it is not a linear function of gradients with respect to variables, except for
            reduced ones.
        is_reduced: it was computed from gradients of the whole batch.
        is_over_rows: it has no axis of rows, and was computed from a sum, mean, … over rows.
        mixes_rows: a row was combined with all other rows, or with such a sum or mean.
        is_permuted: its rows have other positions than in the batch.
        is_position: it consists of the positions of rows, or was computed from these: integers or
            truth values.
        is_random: it was computed from random numbers.
        counts_rows: it was computed from the number of rows alone.
        is_one_row: it was computed from one row, in a loop.
        is_chosen: its rows are some of the batch, whose number depends on values.
        is_by_row: its first axis is that of rows, and each is computed from the same row of the
            batch, so that the rows of all replicas together are those of one device.
        elements: the dependence of each element, if it is a vector such as a shape.
    """

    degree: float | None = 0.0
    axis: int | None = None
    is_fixed: bool = False
    may_be_divided: bool = False
    is_sized_by_values: bool = False
    is_of_gradient: bool = False
    is_of_weights: bool = False
    is_nonlinear: bool = False
    is_reduced: bool = False
    is_over_rows: bool = False
    mixes_rows: bool = False
    is_permuted: bool = False
    is_position: bool = False
    is_random: bool = False
    counts_rows: bool = False
    is_one_row: bool = False
    is_chosen: bool = False
    is_by_row: bool = False
    elements: tuple["Dependence", ...] | None = None

    @property
    def summed_degree(self) -> float | None:
        """Degree of the sum over all elements, which is what a gradient differentiates."""
        if self.degree is None or self.axis is None:
            return self.degree
        return self.degree + 1


FIXED = Dependence(is_fixed=True)
MEAN = Dependence()
SUM = Dependence(degree=1.0)
_NUMBER_OF_ROWS = Dependence(degree=1.0, counts_rows=True)
_UNKNOWN_OVER_ROWS = Dependence(degree=None, is_over_rows=True)
ROWS = Dependence(axis=0, is_by_row=True)
UNKNOWN = Dependence(degree=None)
_ROWS_OF_UNKNOWN_DEGREE = Dependence(degree=None, axis=0, is_by_row=True)


class BatchDependence:
    """Finds how tensors depend on the rows of the batch.

    Args:
        data: tensors of shape (rows, …), dense, ragged, or sparse: the replica's part of the batch.
        rows: the number of rows, if it is known before the step runs, else None.
        batch_rows: the number of rows of all replicas, if it is known, else None.
        rows_are_known: False gives everything computed from values of the rows an unknown degree.
            Defaults to True.
    """

    def __init__(self, data, rows: int | None, batch_rows: int | None, rows_are_known: bool = True):
        self._rows, self._batch_rows = rows, batch_rows
        self._leaf = ROWS if rows_are_known else _ROWS_OF_UNKNOWN_DEGREE
        self._unknown = dataclasses.replace(self._leaf, is_by_row=False)
        self._known: dict[tuple, Dependence] = {}
        self._noted: dict[tuple, Dependence] = {}
        self._kept: list = []  # ids of eager tensors are unique as long as these exist
        self._frames: dict[tuple, _Frame] = {}
        for tensor in data:
            parts = tf.nest.flatten(tensor, expand_composites=True)
            dependence = self._leaf if parts[0] is tensor else self._unknown
            for part in parts:
                self.note(part, dependence if part.shape.rank else FIXED)

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
                self._known[key] = self._unknown if here[0].shape.rank != 0 else UNKNOWN
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
        if kind in _QUOTIENTS and inputs[1].shape.rank == 0 and self.of(inputs[1]).is_fixed:
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
        if operation.type in _CALLS:
            inner = self._frame(operation, frame)
            if inner:
                return [(inner.outputs[tensor.value_index], inner)]
        return [(source, frame) for source in operation.inputs]

    def _frame(self, operation, frame):
        key = (id(operation.graph), operation.name, id(frame))
        if key not in self._frames:
            self._frames[key] = _Frame.of(operation, frame)
            self._kept.append(frame)
        return self._frames[key]

    # Rules.

    def _rule(self, tensor, inputs):
        if not hasattr(tensor, "graph"):  # a constant or a handle from outside of the function
            return FIXED if tf.executing_eagerly() is False else UNKNOWN
        kind = tensor.op.type
        if kind == "Placeholder" or kind in _CALLS:
            if inputs and (kind == "Placeholder" or len(inputs) == 1):
                return inputs[0]
            return self._unknown if tensor.shape.rank != 0 else UNKNOWN
        if kind == "PlaceholderWithDefault":
            return UNKNOWN  # such as the index of the row of which a Jacobian is computed
        if "Random" in kind or kind in ("Fill", "BroadcastTo"):
            found = self._filled(tensor, kind, inputs)
            is_over_rows = _repeats_over_rows(kind, inputs)
            return dataclasses.replace(
                found,
                is_over_rows=is_over_rows and found.axis is None,
                mixes_rows=any(i.mixes_rows for i in inputs)
                or (is_over_rows and found.axis is not None),
                is_random="Random" in kind,
            )
        if kind == "ConcatV2" and tensor.shape.rank == 1 and any(i.elements for i in inputs):
            parts = zip(inputs[:-1], tensor.op.inputs, strict=False)
            return _vector([e for part in parts for e in _elements(*part)])
        if kind == "Shape":
            return self._shape(tensor.op.inputs[0], inputs[0])
        if kind == "Size" and not inputs[0].is_fixed:
            if inputs[0].axis is None:
                return _UNKNOWN_OVER_ROWS if inputs[0].is_sized_by_values else MEAN
            return SUM if inputs[0].is_sized_by_values else _NUMBER_OF_ROWS
        if all(i.is_fixed for i in inputs):
            if inputs and not _is_equal_on_all(tensor.op):
                return self._unknown if tensor.shape.rank != 0 else UNKNOWN
            return FIXED
        result = self._varying(tensor, kind, inputs)
        sized = kind in _SIZED_BY_VALUES or any(i.is_sized_by_values for i in inputs)
        divided = result.may_be_divided or any(i.may_be_divided for i in inputs)
        mixes_rows = (
            _mixes_rows(tensor, kind, inputs)
            or self._mixes_rows_inside(tensor.op, inputs)
            or self._has_constants_of_rows(tensor, kind, inputs)
            or _loses_degree(result, inputs)
        )
        return dataclasses.replace(
            result,
            is_sized_by_values=sized,
            may_be_divided=divided,
            is_of_gradient=any(i.is_of_gradient for i in inputs),
            is_of_weights=any(i.is_of_weights for i in inputs),
            is_nonlinear=any(i.is_nonlinear for i in inputs) or _changes_gradients(kind, inputs),
            is_reduced=any(i.is_reduced for i in inputs),
            is_over_rows=result.axis is None
            and (result.is_over_rows or _is_over_rows(kind, inputs)),
            mixes_rows=mixes_rows or any(i.mixes_rows for i in inputs),
            is_permuted=(result.axis is not None or result.is_one_row)
            and _is_permuted(tensor, kind, inputs),
            is_position=result.axis is not None and _is_position(tensor, kind, inputs),
            is_random=any(i.is_random for i in inputs),
            counts_rows=result.counts_rows or _counts_rows(result, kind, inputs),
            is_one_row=result.is_one_row or any(i.is_one_row for i in inputs),
            is_chosen=result.axis is not None and _is_chosen(kind, inputs),
            is_by_row=result.axis == 0
            and not (mixes_rows or any(i.mixes_rows for i in inputs))
            and self._is_by_row(tensor, kind, inputs),
        )

    def _varying(self, tensor, kind, inputs):
        """Returns the dependence of a result of which at least one input depends on the batch."""
        if kind in _REDUCTIONS:
            return _reduced(tensor, kind, inputs[0])
        if kind in ("Mul", *_QUOTIENTS) and len(inputs) == 2:
            return self._product(tensor, kind, inputs)
        if kind in _RULES:
            return _RULES[kind](tensor, inputs)
        if kind in _SUMS:
            return Dependence(_sum_degree(tensor, inputs), _broadcast_axis(tensor, inputs))
        if kind in ("SelectV2", "Select"):
            return Dependence(_sum_degree(tensor, inputs, 1), _broadcast_axis(tensor, inputs))
        if kind in _LINEAR or kind in _POWERS:
            degree = inputs[0].degree
            power = _POWERS.get(kind, 1.0)
            degree = None if degree is None else degree * power
            axis = self._kept_axis(tensor, inputs)
            elements = inputs[0].elements if kind in ("Cast", "Identity") else None
            return Dependence(degree, axis, elements=elements)
        has_rows = any(i.axis is not None for i in inputs)
        if has_rows and tensor.shape.rank == 0 and tensor.dtype.is_floating:
            return UNKNOWN  # control flow, or another operation that may reduce rows
        # Next to rows, a vector of numbers is a shape, as of a transposed convolution's output.
        is_loop = "While" in kind or kind.startswith("TensorList")
        is_simple = all(
            i.degree == 0 or (has_rows and i.elements) or (is_loop and _is_number(operand))
            for i, operand in zip(inputs, tensor.op.inputs, strict=True)
        )
        return Dependence(0.0 if is_simple else None, self._kept_axis(tensor, inputs))

    def _product(self, tensor, kind, inputs):
        a, b = inputs
        axis = _broadcast_axis(tensor, inputs)
        if a.degree is None or b.degree is None:
            return Dependence(None, axis)
        degree = a.degree + b.degree if kind == "Mul" else a.degree - b.degree
        divided = False
        for place in (1,) if kind != "Mul" else (1, 0):
            if not inputs[place].is_fixed:
                continue
            other, whose = tensor.op.inputs[1 - place], inputs[1 - place]
            divisor = self._divisor(tensor.op.inputs[place], kind)
            if divisor is None and axis is not None and kind == "Mul":
                divisor = self._divisor(tensor.op.inputs[place], "RealDiv")  # multiplies by it
            if divisor is None or (
                whose.degree == 1 and divisor == self._batch_rows != _size(other)
            ):
                continue  # also a sum, divided by the size of the whole batch
            if divisor != _SOME_NUMBER and divisor not in self._sizes(other):
                continue  # another constant
            counts = (*self._numbers_of_rows(other), _size(other))
            if kind != "Mul" and whose.degree == 1 and divisor in counts:
                return Dependence(0.0, axis)  # a sum, divided by the number of this replica's rows
            divided = True
        return Dependence(degree, axis, may_be_divided=divided)

    def _sizes(self, tensor):
        """Returns the number of rows, and its products with sizes of what is summed."""
        tensor = _summed(tensor)
        found = {*self._numbers_of_rows(tensor)}
        for size in tensor.shape.as_list()[1:] if tensor.shape.rank else ():
            found |= {number * size for number in found if size}
        return found

    def _numbers_of_rows(self, tensor):
        """Returns the number of rows, and that of a tensor that may have several for each."""
        summed = _summed(tensor)
        leading = summed.shape[0] if summed.shape.rank else None
        return self._rows, leading or self._rows

    def _divisor(self, factor, kind):
        """Returns the number by which a constant divides, if it may come from that of the rows."""
        if not self._rows or factor.shape.rank != 0:
            return None
        value = _static_value(factor)
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
        if kind == "BroadcastTo" and values.axis not in (None, _SOME_AXIS):
            axes = [values.axis + (tensor.shape.rank or 0) - (tensor.op.inputs[0].shape.rank or 0)]
        if axes:
            return Dependence(values.degree, axes[0], is_by_row=axes[0] == 0 and "Random" in kind)
        if shape.is_fixed:
            dims = tensor.shape.as_list() if tensor.shape.rank else []
            if kind != "BroadcastTo" and self._rows is not None and self._rows in dims[:1]:
                return Dependence(values.degree, 0)
            return FIXED if values.is_fixed and "Random" not in kind else values
        return Dependence(values.degree, _SOME_AXIS if tensor.shape.rank != 0 else None)

    def _is_by_row(self, tensor, kind, inputs):
        """Returns True if each row of a result whose first axis is that of rows follows from one.

        As with the axis of rows, operations that are not known in detail count as such.
        """
        with_rows = [i for i in inputs if i.axis is not None]
        if not with_rows or not all(i.is_by_row for i in with_rows) or kind in _BY_POSITION:
            return False
        if any(i.is_over_rows for i in inputs):
            return False
        if kind == "Reshape":
            return self._begins_with_rows(tensor, inputs[1])
        return kind not in _KEEPS_ROWS or _KEEPS_ROWS[kind](tensor, inputs)

    def _mixes_rows_inside(self, operation, inputs):
        """Returns True if the functions of a branch or a loop combine rows with each other."""
        is_loop = operation.type in _LOOPS
        given = inputs if is_loop else inputs[1:]
        if operation.type not in _CONTROL_FLOW or all(i.axis is None for i in given):
            return False
        if any(i.is_one_row for i in given):
            return True  # a loop in another loop, which combines one row with all
        if not is_loop:
            functions = [(graph, given) for graph in _function_graphs(operation)]
            return any(any(o.mixes_rows for o in self._outputs(*one)) for one in functions)
        condition, body = (
            operation.graph._get_function(operation.get_attr(name).name).graph
            for name in ("cond", "body")
        )
        for _ in range(2):  # over several iterations
            outputs = self._outputs(body, given)
            (goes_on,) = self._outputs(condition, given)
            if goes_on.is_over_rows or any(output.mixes_rows for output in outputs):
                return True
            given = [
                after if before.is_fixed else before
                for before, after in zip(given, outputs, strict=True)
            ]
        return False

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
        if (self._rows or 0) < 2 or kind not in _WITH_CONSTANTS_OF_ROWS:
            return False
        operands = list(tensor.op.inputs)
        if kind in _BRANCHES:
            return _is_computed_from_constants(operands[0])
        if kind == "Tile":
            sizes = zip(tensor.shape, operands[0].shape, strict=True)
            is_repeated = any(new and old and new == old * self._rows for new, old in sizes)
            return inputs[0].axis is not None and is_repeated
        if kind == "GatherV2" and not tensor.op.get_attr("batch_dims"):
            return False
        if kind in _BILINEAR - {"Mul"}:
            places = _contracted_places(tensor, inputs)
        elif None in [operand.shape.rank for operand in operands]:
            return False
        else:
            rank = max(operand.shape.rank for operand in operands)
            # Others compare the first axes.
            ends = [rank - o.shape.rank if kind in _JOINS else 0 for o in operands]
            axes = {
                i.axis + end
                for i, end in zip(inputs, ends, strict=True)
                if i.axis not in (None, _SOME_AXIS)
            }
            places = [(n, axis - end) for n, end in enumerate(ends) for axis in axes]
        return any(
            inputs[n].is_fixed
            and 0 <= place < operands[n].shape.rank
            and operands[n].shape[place] == self._rows
            and not _repeats_along(operands[n], place)
            for n, place in places
        )

    def _begins_with_rows(self, tensor, shape):
        """Returns True if the first axis after a reshape is that of rows, or of parts of these."""
        size, operand = (tensor.shape[0] if tensor.shape.rank else 0), tensor.op.inputs[1]
        if size is not None:
            return bool(self._rows) and size % self._rows == 0
        if shape.elements and shape.elements[0].degree == 1:
            return True
        return _first_number(operand) == -1

    def _shape(self, tensor, dependence):
        rank = tensor.shape.rank
        if dependence.is_fixed:
            return FIXED
        if rank is None or dependence.axis == _SOME_AXIS:
            return UNKNOWN
        is_known = not dependence.is_sized_by_values
        unknown = _UNKNOWN_OVER_ROWS if dependence.axis is None else UNKNOWN
        others = [
            FIXED if is_known and (size is not None or not dependence.mixes_rows) else unknown
            for size in tensor.shape
        ]  # of all pairs of rows, another axis grows, too
        rows = _NUMBER_OF_ROWS if is_known else SUM
        return _vector([rows if n == dependence.axis else other for n, other in enumerate(others)])

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
            return _SOME_AXIS
        if tensor.shape.rank == 1:
            return 0
        sizes = tensor.shape.as_list()
        fits = [axis for axis, size in enumerate(sizes) if size is None or size == self._rows]
        return fits[0] if len(fits) == 1 else _SOME_AXIS


class _Frame:
    """One call of a function: its outputs, and what its arguments are."""

    def __init__(self, graph, operation, frame):
        self.outputs = graph.outputs
        self._arguments = {
            id(inner.op): (outer, frame)
            for inner, outer in zip(graph.inputs, operation.inputs, strict=True)
        }
        self._graph = graph

    @classmethod
    def of(cls, operation, frame) -> "_Frame | None":
        """Returns the frame of a call, or None if its function is not known here."""
        try:
            function = operation.graph._get_function(operation.get_attr("f").name)
            return cls(function.graph, operation, frame)
        except (AttributeError, KeyError, ValueError):
            return None

    def argument(self, placeholder):
        """Returns (tensor, frame) that the call passes for a placeholder, or None."""
        return self._arguments.get(id(placeholder.op))


def _is_equal_on_all(operation):
    """Returns True if replicas compute the same from the same inputs, in functions, too."""
    if operation.type not in _CONTROL_FLOW:
        is_stateful = operation.op_def is not None and operation.op_def.is_stateful
        return not is_stateful or operation.type in _STATEFUL_AND_FIXED
    return all(
        "Random" not in inner.type and _is_equal_on_all(inner)
        for graph in _function_graphs(operation)
        for inner in graph.get_operations()
        if inner.type != "Placeholder"
    )


def _function_graphs(operation):
    """Returns the graphs of the functions of a branch or a loop."""
    attributes = operation.node_def.attr.values()
    names = [a.func.name for a in attributes if a.func.name]
    names += [function.name for a in attributes for function in a.list.func]
    return [operation.graph._get_function(name).graph for name in names]


def _multiplies_pairs(tensor, kind, inputs):
    """Returns True for a product of each row of one matrix with each row of another one."""
    operands, axes = tensor.op.inputs, [i.axis for i in inputs]
    if None in axes or _SOME_AXIS in axes:
        return kind == "MatMul" and None not in axes  # or adds up products of rows
    if any(operand.shape.rank is None for operand in operands):
        return False
    if kind == "Einsum":
        terms, _, result = tensor.op.get_attr("equation").decode().partition("->")
        labels = {term[i.axis] for i, term in zip(inputs, terms.split(","), strict=True)}
        return len(labels) == 2 and bool(labels & set(result)) and "." not in terms
    return all(
        i.axis >= operand.shape.rank - 2 and i.axis != _contracted_axis(tensor, place)
        for place, (i, operand) in enumerate(zip(inputs, operands, strict=True))
    )


def _contracted_axis(tensor, place):
    """Returns the axis of a product's factor over which it adds up."""
    attributes = {"MatMul": ("transpose_a", "transpose_b")}.get(tensor.op.type, ("adj_x", "adj_y"))
    is_transposed = tensor.op.get_attr(attributes[place])
    rank = tensor.op.inputs[place].shape.rank
    return rank - 1 if bool(is_transposed) == bool(place) else rank - 2


def _mixes_rows(tensor, kind, inputs):
    """Returns True if an operation combines a row with other rows, or with a mean over rows.

    Rows that are taken by their positions in the batch count as well: the first of each replica are
    not those of the batch.
    """
    if _takes_positions(tensor, kind, inputs) or _uses_positions(tensor, kind, inputs):
        return True
    if kind == "Tile" and not inputs[1].is_fixed:
        of_pairs = inputs[0].axis is not None and _has_counts(inputs[1])
        return of_pairs or _repeats_over_rows(kind, inputs)
    if kind in (*_ELEMENTWISE, *_COMPARISONS) and _has_pairs(tensor, inputs):
        return True
    if kind == "Reshape" and (inputs[0].axis or 0) > 0:
        return _divides_other_axes(tensor, inputs[0].axis)
    is_with_rows = any(i.axis is not None for i in inputs)
    if kind in _LOOPS:
        return _passes_rows_on(tensor.op, inputs)
    if kind in _OF_ALL_ROWS:
        return _OF_ALL_ROWS[kind](tensor, inputs)
    if kind == "OneHot" and inputs[0].is_over_rows and inputs[1].degree == 1:
        return True  # such as of the row that has the largest value
    if kind in _BRANCHES:
        is_check = tensor.op.inputs[0].op.type in ("All", "Any")  # such as of the labels of hinge
        is_of_rows = (inputs[0].is_over_rows and not is_check) or inputs[0].counts_rows
        return is_with_rows and is_of_rows
    if is_with_rows and kind in (*_ELEMENTWISE, *_COMPARISONS) and tensor.dtype.is_floating:
        # Not only scaled by the number of rows.
        is_scale = {i.degree is not None and kind != "SelectV2" for i in inputs if i.counts_rows}
        if False in is_scale:
            return True
    if kind in _OF_MATRICES:
        return any(
            i.axis == _SOME_AXIS or i.axis >= operand.shape.rank - 2
            for i, operand in zip(inputs, tensor.op.inputs, strict=True)
            if i.axis is not None
        )
    if kind in _JOINS and not any(i.is_random for i in inputs):
        is_permuted = {i.is_permuted for i in inputs if i.axis is not None or i.is_one_row}
        if len(is_permuted) == 2 and (kind != "ConcatV2" or _is_along_others(-1)(tensor, inputs)):
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
        return _adds_padding(tensor)
    if kind in ("LogSoftmax", "Softmax", "TopKV2"):
        return inputs[0].axis == (tensor.shape.rank or 0) - 1
    if kind in _CUMULATIVE:
        place = tf.get_static_value(tensor.op.inputs[1])
        return place is not None and inputs[0].axis == place % tensor.shape.rank
    return (
        kind not in _COLLECTING
        and (is_with_rows or any(i.is_one_row for i in inputs))
        and any(
            i.is_over_rows and (operand.dtype.is_floating or kind == "SelectV2")
            for i, operand in zip(inputs, tensor.op.inputs, strict=True)
        )
    )


def _is_position(tensor, kind, inputs):
    """Returns True for integers or truth values that depend on the positions of rows."""
    if tensor.dtype.is_floating:
        return False
    if kind == "Range":
        return any(i.degree == 1 or i.counts_rows for i in inputs)
    if kind in _UNIQUE and tensor.value_index == 1:
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
        return inputs[0].is_fixed and any(map(_has_counts, inputs[1:3]))
    if kind in _SEGMENTS:
        return inputs[1].is_position and inputs[0].axis == 0 and not _keeps_positions(tensor)
    if kind in _OF_DIAGONALS:
        axis = inputs[0].axis
        return axis not in (None, _SOME_AXIS) and axis >= tensor.shape.rank - 2
    if kind == "GatherV2" and tensor.op.get_attr("batch_dims"):
        return inputs[1].is_position
    if kind in ("GatherV2", "ResourceGather"):
        if inputs[1].is_position and inputs[0].is_by_row and not _gathers_by_row(tensor, inputs):
            return not _keeps_positions(tensor)
        return inputs[1].is_position and inputs[0].axis is None
    places = {"Select": [0], "SelectV2": [0], "Cast": [0], "OneHot": [0]}.get(kind, ())
    return tensor.dtype.is_floating and any(inputs[place].is_position for place in places)


def _passes_rows_on(operation, inputs):
    """Returns True for a loop over rows that passes what it computes from one to the next."""
    lists = [place for place, given in enumerate(operation.inputs) if given.dtype == tf.variant]
    rows = {place for place in lists if inputs[place].axis == 0}
    if not rows:
        return False
    body = operation.graph._get_function(operation.get_attr("body").name).graph
    places = {tensor.name: place for place, tensor in enumerate(body.inputs)}
    sources = [_inputs_of(output, places) for output in body.outputs]
    for _ in sources:  # over several iterations
        sources = [found.union(*(sources[place] for place in found)) for found in sources]
    return any(
        place in found and found & rows and output is not given and place not in lists
        for place, (found, output, given) in enumerate(
            zip(sources, body.outputs, body.inputs, strict=True)
        )
    )


def _inputs_of(tensor, places):
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


def _repeats_over_rows(kind, inputs):
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
        if i.axis not in (None, _SOME_AXIS)
    }
    return len(axes) > 1


def _is_along_others(place):
    """Returns a function: True if the axis in input number `place` of an operation is not 0."""

    def is_along_others(tensor, inputs):
        axes, rank = tf.get_static_value(tensor.op.inputs[place]), tensor.op.inputs[0].shape.rank
        return axes is not None and bool(rank) and not np.any(np.asarray(axes) % rank == 0)

    return is_along_others


def _slices_others(tensor, inputs):
    """Returns True if a slice holds all rows."""
    operation = tensor.op
    if operation.type == "Slice":
        begin, size = (_first_number(operation.inputs[n]) for n in (1, 2))
        sizes = inputs[2].elements
        return begin == 0 and (size == -1 or bool(sizes and sizes[0].degree == 1))
    masks = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask")]
    strides = tf.get_static_value(operation.inputs[3])
    is_whole = all(masks) and strides is not None and strides[0] == 1
    others = operation.get_attr("shrink_axis_mask") | operation.get_attr("new_axis_mask")
    return (is_whole and not others & 1) or bool(operation.get_attr("ellipsis_mask") & 1)


def _pads_others(tensor, inputs):
    """Returns True if no rows are added before or after others."""
    return not _is_padded(tensor, 0)


def _is_padded(tensor, axis):
    """Returns True if an axis is padded, or may be."""
    padding = tf.get_static_value(tensor.op.inputs[1], partial=True)
    return padding is None or any(size is None or size for size in np.ravel(padding[axis]))


def _takes_positions(tensor, kind, inputs):
    """Returns True if an operation takes some rows of the batch by their positions."""
    if kind in (*_TENSOR_SCATTERS, "GatherNd", "XlaDynamicUpdateSlice"):
        return inputs[0].axis == 0 and inputs[1].axis is None and not inputs[1].is_over_rows
    place = {"Split": 1, "SplitV": 0, "GatherV2": 0, "Slice": 0, "StridedSlice": 0, "Unpack": 0}
    if kind not in place or not inputs[place[kind]].is_by_row:
        return False
    if kind == "GatherV2" and (inputs[1].axis is not None or tensor.op.get_attr("batch_dims")):
        return False
    return not _KEEPS_ROWS[kind](tensor, inputs)


def _first_number(tensor):
    """Returns the first number of a shape or a position, if it is constant, else None."""
    value = tf.get_static_value(tensor.op.inputs[0] if tensor.op.type == "Pack" else tensor)
    return None if value is None else int(value.reshape(-1)[0])


def _gathers_by_row(tensor, inputs):
    """Returns True if no row is gathered from others."""
    if inputs[0].axis is None or tensor.op.get_attr("batch_dims"):
        return True
    return _is_along_others(2)(tensor, inputs)


def _adds_padding(tensor):
    """Returns True for a mean or sum over an axis whose size the longest row of the batch has."""
    operand, axes = tensor.op.inputs[0], tf.get_static_value(tensor.op.inputs[1])
    if axes is None or not operand.shape.rank or _is_masked(operand):
        return False
    axes = {int(axis) % operand.shape.rank for axis in axes.reshape(-1)}
    return 0 not in axes and any(operand.shape[axis] is None for axis in axes)


def _is_masked(tensor):
    """Returns True for a product with numbers that come from truth values, or for these."""
    if tensor.op.type == "Mul":
        return any(map(_is_masked, tensor.op.inputs))
    while tensor.op.type in ("Cast", "ExpandDims", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype == tf.bool


def _is_permuted(tensor, kind, inputs):
    """Returns True if rows of the batch have changed their positions."""
    is_moved = kind in ("ReverseV2", "Roll", "Slice", "StridedSlice")
    is_moved = is_moved and inputs[0].axis == 0 and not _KEEPS_ROWS[kind](tensor, inputs)
    is_moved = is_moved and not _takes_joined_rows(tensor, kind, inputs)
    if kind in _MOVING_POSITIONS and any(i.is_position for i in inputs):
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
    masks[0] |= _first_number(tensor.op.inputs[1]) == 0
    bounds = [i.elements[0].degree if i.elements else None for i in inputs[1:3]]
    return all(mask or degree == 1 for mask, degree in zip(masks, bounds, strict=True))


def _is_over_rows(kind, inputs):
    """Returns True for a result without rows that comes from a reduction over these."""
    reduces = kind in (*_REDUCTIONS, *_BILINEAR, *_COUNTING, *_SEGMENTS, *_SUMMARIES)
    reduces |= kind in _CONTROL_FLOW
    has_rows = any(i.axis not in (None, _SOME_AXIS) for i in inputs)
    return (reduces and has_rows) or any(i.is_over_rows for i in inputs)


def _counts_rows(result, kind, inputs):
    """Returns True for a number that is computed from the number of rows alone."""
    if result.axis is not None or result.elements is not None:
        return False
    counts = [i.counts_rows or (kind == "Prod" and _has_counts(i)) for i in inputs]
    return any(counts) and all(c or i.is_fixed for c, i in zip(counts, inputs, strict=True))


def _has_counts(dependence):
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


def _is_chosen(kind, inputs):
    """Returns True for rows that a mask keeps, or for what is computed from each of them."""
    if kind == "GatherV2" and inputs[0].axis == 0 and inputs[1].is_sized_by_values:
        return True
    return kind == "DynamicPartition" or any(i.is_chosen for i in inputs)


def _loses_degree(result, inputs):
    """Returns True if rows are not only scaled by their number, but added to others, as a bias."""
    if result.axis is None or result.degree is not None:
        return False
    return any(i.axis is not None and i.degree not in (0, None) for i in inputs)


def _keeps_positions(tensor):
    """Returns True if rows are gathered in their order, or several parts of each."""
    table, indices = tensor.op.inputs[:2]
    while indices.op.type in ("Cast", "Identity", "SelectV2"):  # chosen if there are any rows
        indices = indices.op.inputs[indices.op.type == "SelectV2"]
    bounds = [tf.get_static_value(bound) for bound in indices.op.inputs]
    is_whole = indices.op.type == "Range" and (bounds[0], bounds[2]) == (0, 1)
    return is_whole or table.op.type == "Reshape"


def _contracted_places(tensor, inputs):
    """Returns (input, axis) of what a product multiplies with rows before it adds them up."""
    rows = next((n for n, i in enumerate(inputs) if i.axis not in (None, _SOME_AXIS)), None)
    if rows is None or len(inputs) != 2:
        return []
    other, axis = 1 - rows, inputs[rows].axis
    if tensor.op.type == "Einsum":
        terms = tensor.op.get_attr("equation").decode().partition("->")[0].split(",")
        label = terms[rows][axis : axis + 1]
        return [(other, terms[other].index(label))] if label in terms[other] else []
    is_contracted = axis == _contracted_axis(tensor, rows)
    return [(other, _contracted_axis(tensor, other))] if is_contracted else []


def _is_computed_from_constants(tensor):
    """Returns True for a number, such as a condition, of constants that are compared."""
    kind, operands = tensor.op.type, tensor.op.inputs
    return kind == "Const" or (
        kind in {"Cast", "Identity", "LogicalNot", "StridedSlice", *_COMPARISONS, *_ELEMENTWISE}
        and all(map(_is_computed_from_constants, operands))
    )


def _repeats_along(tensor, axis):
    """Returns True if a constant has the same values at all positions of an axis."""
    value = tf.get_static_value(tensor)
    return value is not None and bool(np.all(value == np.take(value, [0], axis)))


def _changes_gradients(kind, inputs):
    """Returns True if an operation is not linear in gradients that are not of the whole batch."""
    places = [place for place, i in enumerate(inputs) if i.is_of_weights and not i.is_reduced]
    if not places or kind in _LINEAR_IN_GRADIENTS:
        return False
    if kind in ("Select", "SelectV2"):
        return 0 in places
    return places != [0] if kind in _QUOTIENTS else kind not in _BILINEAR or len(places) > 1


def _key(tensor, frame):
    if hasattr(tensor, "graph"):
        return id(frame), id(tensor.graph), tensor.name
    return id(None), None, id(tensor)


def _static_value(tensor):
    """Returns the value of a scalar that is computed from constants, or None."""
    value = tf.get_static_value(tensor)
    kind, operands = tensor.op.type, tensor.op.inputs
    if value is not None or kind not in ("Cast", "Identity", "Prod", "StridedSlice"):
        return value
    if kind in ("Cast", "Identity"):
        return _static_value(operands[0])
    whole, place = tf.get_static_value(operands[0]), tf.get_static_value(operands[1])
    if whole is None or place is None or whole.ndim != 1:
        return None
    return whole.prod() if kind == "Prod" else whole[int(place.reshape(-1)[0])]


def _order(tensor):
    """Returns the constant order of axes; TensorFlow's softmax computes it by operations."""
    value, operands = tf.get_static_value(tensor), tensor.op.inputs
    if value is None and tensor.op.type in _ON_NUMBERS:
        numbers = [_order(operand) for operand in operands]
        return None if any(n is None for n in numbers) else _ON_NUMBERS[tensor.op.type](*numbers)
    return value


def _summed(tensor):
    """Returns the tensor whose elements a sum adds up."""
    while tensor.op.inputs and (not tensor.shape.rank or tensor.op.type == "Sum"):
        tensor = tensor.op.inputs[0]
    return tensor


def _size(tensor):
    """Returns the number of terms of a sum over all axes, if it is known before the step runs."""
    is_sum = tensor.op.type == "Sum" and tensor.shape.rank == 0
    return tensor.op.inputs[0].shape.num_elements() if is_sum else None


def _elements(dependence, operand):
    """Returns the dependence of each element of a vector."""
    return dependence.elements or [dependence] * operand.shape[0]


def _vector(elements):
    is_fixed = all(e.is_fixed for e in elements)
    return FIXED if is_fixed else Dependence(degree=None, elements=tuple(elements))


def _sum_degree(tensor, inputs, first=0):
    """Returns the degree that all terms have; negligible terms have any.

    Zero is negligible, and so is a small constant that is added to a number of rows. Added to a sum
    of weights it is not: a sum divided by that is no mean over rows, which has to be reported.
    """
    operands = list(tensor.op.inputs)[first:]
    limit = _LARGEST_EPSILON if any(map(is_count, operands)) else 0
    degrees = {
        i.degree
        for i, operand in zip(inputs[first:], operands, strict=True)
        if not (i.is_fixed and _is_at_most(operand, limit))
    }
    return degrees.pop() if len(degrees) == 1 else None


def is_count(tensor, dependence: "BatchDependence | None" = None) -> bool:
    """Returns True if a tensor is computed from shapes alone, such as a number of rows.

    Args:
        tensor: a tensor.
        dependence: excludes numbers of the rows that a mask keeps. Defaults to None.
    """
    waiting, is_of_shape = [tensor], False
    while waiting:
        operation = getattr(waiting.pop(), "op", None)
        if operation is None or operation.type not in _OF_COUNTS:
            return False
        if operation.type in ("Shape", "Size"):
            is_of_shape = True
            if dependence is not None and dependence.of(operation.inputs[0]).is_chosen:
                return False
        else:
            waiting.extend(operation.inputs)
    return is_of_shape


def _is_at_most(tensor, limit):
    value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
    return value is not None and abs(value) <= limit


def _broadcast_axis(tensor, inputs):
    """Returns the axis of rows of an elementwise operation, which broadcasts its inputs."""
    rank, axes = tensor.shape.rank, set()
    for i, operand in zip(inputs, tensor.op.inputs, strict=True):
        if i.axis is None:
            continue
        if rank is None or operand.shape.rank is None or i.axis == _SOME_AXIS:
            axes.add(_SOME_AXIS)
        else:
            axes.add(i.axis + rank - operand.shape.rank)
    if len(axes) > 1:
        return _SOME_AXIS
    return axes.pop() if axes else None


def _reduced(tensor, kind, dependence):
    degree, axis = dependence.degree, dependence.axis
    if dependence.elements and kind == "Prod":
        degrees = [e.degree for e in dependence.elements]
        return Dependence(None if None in degrees else sum(degrees))
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
        return Dependence(degree if kind == "Mean" else None, _SOME_AXIS)
    grows = {"Sum": 1.0, "L2Loss": 1.0, "Mean": 0.0, "Max": 0.0, "Min": 0.0}.get(kind)
    if is_whole or axis in axes:
        known = degree is not None and grows is not None
        return Dependence(degree + grows if known else None)
    if axis == _SOME_AXIS:
        return Dependence(degree if kind == "Mean" else None, _SOME_AXIS)
    is_kept = tensor.shape.rank == rank
    return Dependence(degree, axis if is_kept else axis - sum(a < axis for a in axes))


def _power(tensor, inputs):
    exponent = tf.get_static_value(tensor.op.inputs[1])
    axis, degree = _broadcast_axis(tensor, inputs), inputs[0].degree
    if degree is None or (degree and (exponent is None or exponent.size != 1)):
        return Dependence(None, axis)
    return Dependence(degree * float(exponent.reshape(-1)[0]) if degree else 0.0, axis)


def _squared_difference(tensor, inputs):
    degree = _sum_degree(tensor, inputs)
    return Dependence(None if degree is None else 2 * degree, _broadcast_axis(tensor, inputs))


def _reshaped(tensor, inputs):
    i, rank = inputs[0], tensor.shape.rank
    if i.elements:
        return i if rank == 1 else UNKNOWN
    if i.counts_rows and rank == 1:
        return _vector([i])
    if i.axis is None:
        return Dependence(i.degree)
    if i.axis != 0 or not rank:
        return Dependence(i.degree if rank else None, _SOME_AXIS if rank else None)
    rows = tensor.op.inputs[0].shape[0]
    if rows == 1:
        return Dependence(i.degree, 0)
    axes = [axis for axis, size in enumerate(inputs[1].elements or ()) if size.degree == 1]
    if len(axes) == 1:
        return Dependence(i.degree, axes[0])
    if rows is None and tensor.shape[0] not in (None, 1):
        return Dependence(i.degree, _SOME_AXIS)
    ones = 0
    for size in tensor.shape.as_list():
        if size != 1:
            break
        ones += 1
    return Dependence(i.degree, ones if ones < rank else 0)


def _transposed(tensor, inputs):
    i, order = inputs[0], _order(tensor.op.inputs[1])
    if i.axis is None or i.axis == _SOME_AXIS:
        return Dependence(i.degree, i.axis)
    return Dependence(i.degree, _SOME_AXIS if order is None else order.tolist().index(i.axis))


def _expanded(tensor, inputs):
    i, place = inputs[0], tf.get_static_value(tensor.op.inputs[1])
    if i.axis is None or i.axis == _SOME_AXIS or place is None or tensor.shape.rank is None:
        return Dependence(i.degree, None if i.axis is None else _SOME_AXIS)
    place = int(place.reshape(-1)[0]) % tensor.shape.rank
    return Dependence(i.degree, i.axis + (place <= i.axis))


def _packed(tensor, inputs):
    if tensor.shape.rank == 1:
        if len({i.degree for i in inputs}) == 1:
            return Dependence(inputs[0].degree, elements=tuple(inputs))
        return _vector(inputs)
    axes = {i.axis for i in inputs if i.axis is not None}
    axis = axes.pop() if len(axes) == 1 else (_SOME_AXIS if axes else None)
    place = tensor.op.get_attr("axis") % (tensor.shape.rank or 1)
    if axis is not None and axis >= 0:
        axis += place <= axis
    return Dependence(_sum_degree(tensor, inputs), axis)


def _concatenated(tensor, inputs):
    axes = {i.axis for i in inputs if i.axis is not None}
    axis = axes.pop() if len(axes) == 1 else (_SOME_AXIS if axes else None)
    degrees = {i.degree for i in inputs[:-1]}
    if (
        axis == 0
        and any(i.is_fixed for i in inputs[:-1])
        and not _is_along_others(-1)(tensor, inputs)
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
        return _vector(i.elements[first : last : int(strides[0])])
    if i.is_fixed and tensor.shape.rank:
        return Dependence(0.0, 0 if any(map(_has_counts, inputs[1:3])) else None)
    if i.axis is None or i.axis == _SOME_AXIS:
        return Dependence(i.degree, i.axis if tensor.shape.rank != 0 else None)
    if operation.get_attr("ellipsis_mask"):
        rank, new = operation.inputs[0].shape.rank, operation.get_attr("new_axis_mask")
        same = tensor.shape.rank == rank or i.axis == 0
        if operation.get_attr("ellipsis_mask") == 1 and rank is not None:
            others = (operation.inputs[1].shape[0] or rank) - 1 - bin(new).count("1")
            same |= i.axis < rank - others
        return Dependence(i.degree, i.axis if same and not new & 1 else _SOME_AXIS)
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
        return elements[0] if numbers.ndim == 0 else _vector(elements)
    if table.axis is None and table.degree == 0 and (len(inputs) == 2 or inputs[2].is_fixed):
        place = 0 if len(inputs) == 2 else tf.get_static_value(tensor.op.inputs[2])
        if indices.axis is None or indices.axis == _SOME_AXIS or place is None:
            return Dependence(0.0, indices.axis)
        return Dependence(0.0, indices.axis + int(place))
    if tensor.op.type == "GatherV2" and tensor.op.get_attr("batch_dims") and table.axis == 0:
        return Dependence(table.degree, 0)
    same = table.axis is not None and indices.is_fixed and len(inputs) == 3
    place = tf.get_static_value(tensor.op.inputs[2]) if same else None
    if place is not None and int(place) > (table.axis or 0) >= 0:
        return Dependence(table.degree, table.axis)
    if table.axis == indices.axis == 0 and _is_along_first(tensor):
        return Dependence(None if table.degree != 0 else 0.0, 0)  # such as those of a mask
    return Dependence(None if table.degree != 0 else 0.0, _SOME_AXIS if tensor.shape.rank else None)


def _is_along_first(tensor):
    """Returns True if rows are gathered, and not parts of them."""
    return tensor.op.type != "GatherV2" or tf.get_static_value(tensor.op.inputs[2]) == 0


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
    if i.axis in (None, _SOME_AXIS) or place is None or rank is None:
        return Dependence(0.0, i.axis if tensor.shape.rank else None)
    place = int(place) % rank
    return Dependence(0.0, None if place == i.axis else i.axis - (place < i.axis))


def _encoded(tensor, inputs):
    """Returns the dependence of one-hot codes."""
    i, rank = inputs[0], tensor.shape.rank
    place = tensor.op.get_attr("axis") % rank
    if i.axis is None:
        return Dependence(0.0, place if inputs[1].degree == 1 else None)
    return Dependence(0.0, i.axis if i.axis == _SOME_AXIS else i.axis + (place <= i.axis))


def _padded_along(tensor, inputs):
    """Returns the dependence of a padded tensor, whose mean over rows is none if these are more."""
    i = inputs[0]
    if i.axis is None or i.axis == _SOME_AXIS:
        return Dependence(i.degree, i.axis)
    return Dependence(None if _is_padded(tensor, i.axis) else i.degree, i.axis)


def _listed(tensor, inputs):
    """Returns the dependence of a list, which is that of the tensor whose parts it contains."""
    return Dependence(inputs[0].degree, inputs[0].axis)


def _reduced_sparse(tensor, inputs):
    """Returns the dependence of sums or maxima of a sparse tensor."""
    axes, shape = tf.get_static_value(tensor.op.inputs[3]), tensor.op.inputs[2].shape[0]
    if axes is None or shape is None or 0 in np.reshape(axes, -1) % shape:
        return _UNKNOWN_OVER_ROWS
    return Dependence(None, 0)


def _element(tensor, inputs):
    """Returns the dependence of an element of a list, such as a row, or a step of a sequence."""
    i = inputs[0]
    if i.axis == 0:
        return Dependence(i.degree, is_one_row=True)
    return Dependence(i.degree, i.axis if i.axis in (None, _SOME_AXIS) else i.axis - 1)


def _counted(tensor, inputs):
    """Returns the dependence of numbers of values: of the batch, or of each row."""
    return Dependence(0.0, 0) if tensor.shape.rank == 2 else Dependence(1.0)


def _is_number(tensor):
    """Returns True for an integer, such as the number of rows over which a loop runs."""
    return tensor.shape.rank == 0 and tensor.dtype.is_integer


def _is_one(tensor):
    """Returns True if a tile does not repeat the rows."""
    multiples = tf.get_static_value(tensor.op.inputs[1])
    return multiples is not None and multiples[0] == 1


def _padded(tensor, inputs):
    """Returns the dependence of ragged rows that have been padded to the longest one."""
    return Dependence(0.0, 0)


def _ranged(tensor, inputs):
    counts_rows = any(i.degree == 1 for i in inputs)  # and not the steps of the longest row
    return Dependence(0.0, 0 if counts_rows else _SOME_AXIS)


def _tiled(tensor, inputs):
    i, multiples = inputs[0], inputs[1]
    if i.axis is not None:
        return Dependence(i.degree, i.axis)
    axes = [number for number, e in enumerate(multiples.elements or ()) if not e.is_fixed]
    if not axes:
        return Dependence(i.degree, None if multiples.is_fixed else _SOME_AXIS)
    return Dependence(i.degree, axes[0])


def _product_of_matrices(tensor, inputs):
    """Returns the dependence of a product, which may be a sum over rows."""
    degrees = [i.degree for i in inputs[:2]]
    degree = None if None in degrees else sum(degrees)
    axes = []
    for place, (i, operand) in enumerate(zip(inputs, tensor.op.inputs, strict=True)):
        rank = operand.shape.rank
        if i.axis is None:
            continue
        if i.axis == _SOME_AXIS or rank is None:
            return Dependence(degree, _SOME_AXIS)
        if i.axis == _contracted_axis(tensor, place):
            return Dependence(None if degree is None else degree + 1)
        offset = (tensor.shape.rank or rank) - rank
        last_two = i.axis >= rank - 2
        axes.append(rank - 2 + place + offset if last_two else i.axis + offset)
    return Dependence(degree, axes[0] if axes else None)


def _contracted(tensor, inputs):
    """Returns the dependence of an Einstein sum."""
    degrees = [i.degree for i in inputs]
    degree = None if None in degrees else sum(degrees)
    terms, _, result = tensor.op.get_attr("equation").decode().partition("->")
    labels = set()
    for i, term in zip(inputs, terms.split(","), strict=True):
        if i.axis is None:
            continue
        if i.axis == _SOME_AXIS or "." in term[: i.axis + 1]:
            return Dependence(degree, _SOME_AXIS if i.axis else 0)
        labels.add(term[i.axis])
    summed = len(labels - set(result))
    degree = None if degree is None else degree + summed
    if len(labels) == summed:
        return Dependence(degree)
    place = min(map(result.index, labels & set(result)))
    return Dependence(degree, _SOME_AXIS if "." in result[:place] else place)


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
    **{kind: _transforms_rows(axes) for kind, axes in _FOURIER.items()},
    **dict.fromkeys(_OF_NEIGHBORS, lambda tensor, inputs: (inputs[0].axis or 0) > 0),
    **dict.fromkeys(_OF_PYTHON, lambda tensor, inputs: any(i.axis is not None for i in inputs)),
    **dict.fromkeys(_OF_SORTED_SEGMENTS, lambda tensor, inputs: inputs[0].is_by_row),
    **dict.fromkeys(_FUSED_BATCH_NORMS, lambda tensor, inputs: tensor.op.get_attr("is_training")),
    "ReverseSequence": lambda tensor, inputs: inputs[0].axis == tensor.op.get_attr("seq_dim"),
    "SparseTensorDenseMatMul": lambda tensor, inputs: inputs[3].axis is not None,
    **{f"QuantizeAndDequantizeV{version}": _finds_range for version in (2, 3, 4)},
}

# Whether a result is by row if its inputs are.
_KEEPS_ROWS: dict[str, Callable] = {
    "ArgMax": _is_along_others(1),
    "ArgMin": _is_along_others(1),
    "ConcatV2": _is_along_others(-1),
    **dict.fromkeys(_CUMULATIVE, _is_along_others(1)),
    "GatherV2": _gathers_by_row,
    "LogSoftmax": lambda tensor, inputs: tensor.shape.rank != 1,
    **dict.fromkeys(_PADDING, _pads_others),
    "ReverseV2": _is_along_others(1),
    "Roll": _is_along_others(2),
    "Slice": _slices_others,
    "Softmax": lambda tensor, inputs: tensor.shape.rank != 1,
    "Split": lambda tensor, inputs: tf.get_static_value(tensor.op.inputs[0]) != 0,
    "SplitV": _is_along_others(2),
    "StridedSlice": _slices_others,
    "Tile": lambda tensor, inputs: inputs[0].axis == 0 and inputs[1].is_fixed and _is_one(tensor),
    "TopKV2": lambda tensor, inputs: tensor.shape.rank != 1,
    "Unpack": lambda tensor, inputs: tensor.op.get_attr("axis") != 0,
}

_RULES: dict[str, Callable] = {
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
    **dict.fromkeys(("ScatterNd", *_TENSOR_SCATTERS), _scattered),
    **dict.fromkeys(_COUNTING, _counted),
    **dict.fromkeys(_PADDING, _padded_along),
    **dict.fromkeys(_UNIQUE, _distinct),
    **dict.fromkeys(_SEGMENTS, _segmented),
}
