"""Floating-point operations of one TensorFlow operation, from the shapes that it works on.

A multiplication and an addition are two. The formulas are the definitions of the operations
(https://www.tensorflow.org/api_docs/python/tf/raw_ops); TensorFlow's own profiler has them as well,
but neither for einsum nor for the gradients of depthwise and three-dimensional convolutions.
"""

import math


def _kinds(names):
    return frozenset(names.split())


# Those that only give a tensor another name or shape: they neither compute nor move anything.
VIEWS = _kinds(
    "Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot"
)
# Those that stand for what a step is given, not for what it computes.
GIVEN = _kinds(
    "Const Placeholder ReadVariableOp VarHandleOp NoOp Shape ShapeN Size BroadcastGradientArgs"
)
# Functions in functions: how often their bodies run stands nowhere in the graph.
UNCOUNTED = _kinds(
    "While StatelessWhile If StatelessIf PartitionedCall StatefulPartitionedCall XlaCall "
    "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackpropV3"
)
# As TensorFlow's profiler counts, for each number: activations, exponentials and what only moves
# numbers are no arithmetic. Their time is that of their memory.
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
    """Those of one `tf.Operation`; 0 where it computes nothing, or a shape is not known."""
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
    """ "convolution", "depthwise", "matmul" or "elementwise": what makes operations as fast."""
    kind = operation.type
    if kind.startswith("DepthwiseConv"):
        return "depthwise"
    if kind.startswith("Conv"):
        return "convolution" if kind in _FORMULAS else "elementwise"
    return "matmul" if kind in _FORMULAS else "elementwise"


def writes_in_place(operation) -> bool:
    """Whether TensorFlow gives the output an input's memory where nobody else reads that input."""
    return operation.type in _IN_PLACE


def _numbers(tensor):
    return math.prod(tensor.shape.as_list()) if tensor.shape.rank else 1


def _shape(tensor):
    return tensor.shape.as_list()


def _convolution(operation):
    """Each number that comes out sums over the filter but for its last axis, the channels out."""
    return _numbers(operation.outputs[0]) * math.prod(_shape(operation.inputs[1])[:-1])


def _convolution_input_gradient(operation):
    _, filters, gradient = operation.inputs
    return _numbers(gradient) * math.prod(_shape(filters)[:-1])


def _convolution_filter_gradient(operation):
    gradient = operation.inputs[2]
    return _numbers(gradient) * math.prod(_shape(operation.outputs[0])[:-1])


def _depthwise(operation):
    return _numbers(operation.outputs[0]) * math.prod(_shape(operation.inputs[1])[:2])


def _depthwise_input_gradient(operation):
    _, filters, gradient = operation.inputs
    return _numbers(gradient) * math.prod(_shape(filters)[:2])


def _depthwise_filter_gradient(operation):
    return _numbers(operation.inputs[2]) * math.prod(_shape(operation.outputs[0])[:2])


def _matrix_product(operation):
    turned = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    summed = _shape(operation.inputs[0])[-2 if turned else -1]
    return _numbers(operation.outputs[0]) * summed


def _einsum(operation):
    """One multiplication for each combination of all labels."""
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
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "Conv2DBackpropInput": _convolution_input_gradient,
    "Conv2DBackpropFilter": _convolution_filter_gradient,
    "Conv3DBackpropInputV2": _convolution_input_gradient,
    "Conv3DBackpropFilterV2": _convolution_filter_gradient,
    "DepthwiseConv2dNative": _depthwise,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_input_gradient,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_filter_gradient,
    "MatMul": _matrix_product,
    "BatchMatMul": _matrix_product,
    "BatchMatMulV2": _matrix_product,
    "BatchMatMulV3": _matrix_product,
    "Einsum": _einsum,
}
