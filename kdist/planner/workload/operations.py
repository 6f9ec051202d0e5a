"""Floating-point operations of one TensorFlow operation, from the shapes of its tensors.

A multiplication and an addition are two. The formulas follow from the definitions of the operations
(https://www.tensorflow.org/api_docs/python/tf/raw_ops). TensorFlow's own profiler has them as well,
but not for einsum and for the gradients of depthwise and three-dimensional convolutions.
"""

import math


def _kinds(names):
    return frozenset(names.split())


# Operations that only rename or reshape a tensor: they neither compute nor move anything.
VIEWS = _kinds(
    "Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot"
)
# Operations that are inputs of a step, not part of its computation.
INPUTS = _kinds(
    "Const Placeholder ReadVariableOp VarHandleOp NoOp Shape ShapeN Size BroadcastGradientArgs"
)
# Functions in functions: the graph does not tell how often their bodies run.
UNCOUNTED = _kinds(
    "While StatelessWhile If StatelessIf PartitionedCall StatefulPartitionedCall XlaCall "
    "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackpropV3"
)
# Operations per number, as TensorFlow's profiler counts: activations, exponentials, and copies are
# not counted as arithmetic. Their time is that of their memory.
_ONE = _kinds(
    "Add AddV2 Sub Mul RealDiv Maximum Minimum Neg Square Log Pow Reciprocal BiasAdd "
    "Greater GreaterEqual Less LessEqual Equal NotEqual"
)
_PER_NUMBER_OUT = {
    **dict.fromkeys(_ONE, 1),
    "Rsqrt": 2,
    "SquaredDifference": 2,
    "RsqrtGrad": 4,
    "Softmax": 5,
}
_ONE_PER_NUMBER_IN = _kinds("Sum Mean BiasAddGrad ArgMax ArgMin")
_IN_PLACE = _kinds(
    "Add AddV2 Sub Mul RealDiv Maximum Minimum Relu Relu6 ReluGrad Relu6Grad Elu Selu Tanh Sigmoid "
    "TanhGrad SigmoidGrad Neg Square Sqrt Rsqrt Exp Log BiasAdd AddN Softplus Erf Erfc"
)


def flops(operation) -> float:
    """Returns those of one `tf.Operation`; 0 if it computes nothing, or a shape is unknown."""
    kind = operation.type
    if not all(x.shape.is_fully_defined() for x in [*operation.inputs, *operation.outputs]):
        return 0.0
    if kind in _FORMULAS:
        return 2.0 * _FORMULAS[kind](operation)
    if kind in _PER_NUMBER_OUT:
        return float(_numbers(operation.outputs[0]) * _PER_NUMBER_OUT[kind])
    if kind in _ONE_PER_NUMBER_IN:
        return float(_numbers(operation.inputs[0]))
    if kind == "AddN":
        return float(_numbers(operation.outputs[0]) * (len(operation.inputs) - 1))
    if kind in ("MaxPool", "AvgPool"):
        return float(_numbers(operation.outputs[0]) * math.prod(operation.get_attr("ksize")))
    if kind in ("MaxPoolGrad", "AvgPoolGrad"):
        return float(_numbers(operation.inputs[-1]) * math.prod(operation.get_attr("ksize")))
    return 0.0


def family(operation) -> str:
    """Returns the kind of an operation: convolution, depthwise, matmul, or elementwise."""
    kind = operation.type
    if kind.startswith("DepthwiseConv"):
        return "depthwise"
    if kind.startswith("Conv"):
        return "convolution" if kind in _FORMULAS else "elementwise"
    return "matmul" if kind in _FORMULAS else "elementwise"


def writes_in_place(operation) -> bool:
    """Returns whether TensorFlow may reuse an input's memory for the output."""
    return operation.type in _IN_PLACE


def _numbers(tensor):
    return math.prod(tensor.shape.as_list()) if tensor.shape.rank else 1


def _shape(tensor):
    return tensor.shape.as_list()


def _filtered(multiplied, filters, axes):
    """Returns multiplications: each number with the first `axes` axes of the filters."""
    return _numbers(multiplied) * math.prod(_shape(filters)[:axes])


def _output(axes):
    """Returns the formula of a convolution: each output sums over the filter's input axes."""
    return lambda operation: _filtered(operation.outputs[0], operation.inputs[1], axes)


def _input_gradient(axes):
    return lambda operation: _filtered(operation.inputs[2], operation.inputs[1], axes)


def _filter_gradient(axes):
    return lambda operation: _filtered(operation.inputs[2], operation.outputs[0], axes)


def _matrix_product(operation):
    transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    summed = _shape(operation.inputs[0])[-2 if transposed else -1]
    return _numbers(operation.outputs[0]) * summed


def _einsum(operation):
    """Returns multiplications: one for each combination of all labels."""
    sizes: dict[str, int] = {}
    terms = operation.get_attr("equation").decode().split("->")[0].split(",")
    for term, tensor in zip(terms, operation.inputs, strict=True):
        shape = _shape(tensor)
        before, dots, after = term.partition("...")
        if dots:
            free = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(free))
            shape = shape[: len(before)] + shape[len(shape) - len(after) :]
        sizes.update(zip(before + after, shape, strict=True))
    return math.prod(sizes.values())


_FORMULAS = {
    **dict.fromkeys(("Conv2D", "Conv3D"), _output(-1)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _input_gradient(-1)),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"), _filter_gradient(-1)),
    "DepthwiseConv2dNative": _output(2),
    "DepthwiseConv2dNativeBackpropInput": _input_gradient(2),
    "DepthwiseConv2dNativeBackpropFilter": _filter_gradient(2),
    **dict.fromkeys(_kinds("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3"), _matrix_product),
    "Einsum": _einsum,
}
