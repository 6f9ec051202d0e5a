"""Trace of one training step of a Keras model as a graph that never runs, and its operations.

A multiplication and an addition are two floating-point operations. The formulas follow from the
definitions of the operations (https://www.tensorflow.org/api_docs/python/tf/raw_ops). TensorFlow's
own profiler has them as well, but not for einsum and for the gradients of depthwise and
three-dimensional convolutions.
"""

import contextlib
import math

import keras
import tensorflow as tf


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
    """Returns the floating-point operations of one `tf.Operation`.

    It is 0 if the operation computes nothing, or a shape is unknown.
    """
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


class TracedStep:
    """Forward and backward pass of a built Keras model on inputs of the given `tf.TensorSpec`s.

    The loss is the sum of the squares of all outputs and of the model's own losses. The gradient of
    a plain sum would be a constant, which takes no memory.

    Attributes:
        operations: All operations in the order of the graph.
        needed: Operations that remain after TensorFlow prunes the graph.
        results: Tensors that a step returns: gradients of weights, and the loss.
        inputs: Operations that are the model's inputs.
        forward_end: Index after the last operation of the forward pass.
    """

    def __init__(self, model, specs):
        self.model = model
        self._calls: list[tuple[int, int, str]] = []  # first operation, end, layer
        self._outer = None

        def step(inputs):
            self._outer = tf.compat.v1.get_default_graph()
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(model(inputs, training=True))
                squares = [tf.reduce_sum(tf.square(tf.cast(y, tf.float32))) for y in outputs]
                loss = tf.add_n(squares + [tf.cast(x, tf.float32) for x in model.losses])
            self.forward_end = len(self._outer.get_operations())
            gradients = tape.gradient(loss, model.trainable_variables)
            return [tf.convert_to_tensor(g) for g in gradients if g is not None] + [loss]

        with self._recorded_calls(), _inlined_functions():
            try:
                traced = tf.function(step, autograph=False).get_concrete_function(specs)
            finally:
                model._clear_losses()  # those of the trace are symbolic
        self._graph = traced.graph  # operations hold their graph by a weak reference only
        self.operations = traced.graph.get_operations()
        captured = {placeholder.op for _, placeholder in traced.graph.captures}
        self.inputs = {
            op for op in self.operations if op.type == "Placeholder" and op not in captured
        }
        self.results = {base_tensor(tensor).ref() for tensor in traced.graph.outputs}
        self.needed = _needed(self.operations, traced.graph.outputs)
        self._index = {op: index for index, op in enumerate(self.operations)}
        self._layer_of = self._layers()

    def is_forward(self, operation):
        """Returns whether an operation belongs to the forward pass."""
        return self._index[operation] < self.forward_end

    def is_constant(self, operation):
        """Returns whether an operation is a weight, a constant, or the like, but not an example."""
        return operation.type in INPUTS and operation not in self.inputs

    def index(self, operation):
        """Returns the index of an operation in the order of the graph."""
        return self._index[operation]

    def layer(self, operation):
        """Returns the path of an operation's innermost layer; "" without one."""
        return self._layer_of[operation]

    def layers(self):
        """Returns the paths of all called layers, in the order of their first operations."""
        return list(dict.fromkeys(layer for _, _, layer in sorted(self._calls)))

    def last_use(self, tensor):
        """Returns the index of the last operation that reads this memory; -1 without one."""
        last = -1
        for reader in tensor.consumers():
            if reader not in self.needed or reader.type in INPUTS:
                continue
            if reader.type in VIEWS:
                last = max([last, *(self.last_use(out) for out in reader.outputs)])
            else:
                last = max(last, self._index[reader])
        return last

    @contextlib.contextmanager
    def _recorded_calls(self):
        """Records the range of operations of each call of a layer, the innermost first."""
        layers = [x for x in sublayers(self.model) if not isinstance(x, keras.Model)]
        before = [(layer, vars(layer).get("call")) for layer in layers]
        try:
            for layer in layers:
                object.__setattr__(layer, "call", self._recording(layer, layer.call))
            yield
        finally:
            for layer, own in before:
                if own is not None:
                    object.__setattr__(layer, "call", own)
                elif "call" in vars(layer):
                    object.__delattr__(layer, "call")

    def _recording(self, layer, call):
        def recorded(*args, **kwargs):
            graph = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            outputs = call(*args, **kwargs)
            if graph is self._outer:  # not the body of a loop, whose operations are its own
                self._calls.append((start, len(graph.get_operations()), layer_path(layer)))
            return outputs

        return recorded

    def _layers(self):
        """Returns the layer of each operation; a gradient has the layer of its operation.

        TensorFlow names gradients "gradient_tape/" and the scope of the operation. A sum of several
        gradients of one tensor has no such name and belongs to the layer of the first of them.
        """
        forward = dict.fromkeys((op.name for op in self.operations[: self.forward_end]), "")
        seen: set[str] = set()
        for start, end, layer in self._calls:
            names = {op.name for op in self.operations[start:end]} - seen
            forward.update(dict.fromkeys(names, layer))
            seen |= names
        scopes: dict[str, str] = {}
        for name, layer in forward.items():
            scope = name.rpartition("/")[0]
            while scope:
                scopes[scope] = layer if scopes.get(scope, layer) == layer else ""
                scope = scope.rpartition("/")[0]
        found = {op: forward[op.name] for op in self.operations[: self.forward_end]}
        for op in self.operations[self.forward_end :]:
            name = op.name.removeprefix("gradient_tape/")
            while name and name not in forward and name not in scopes:
                name = name.rpartition("/")[0]
            found[op] = forward.get(name) or scopes.get(name, "")
            if not found[op] and op.type == "AddN":
                found[op] = found[op.inputs[0].op]
        return found


def sublayers(model):
    """Returns all layers in a model, outer layers before inner ones."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def layer_path(layer):
    """Returns a layer's path within its model; "" for the model itself."""
    return "" if isinstance(layer, keras.Model) else layer.path or layer.name


def base_tensor(tensor):
    """Returns the tensor whose memory this one shares."""
    while tensor.op.type in VIEWS:
        several = tensor.op.type == "IdentityN"
        tensor = tensor.op.inputs[tensor.value_index if several else 0]
    return tensor


@contextlib.contextmanager
def _inlined_functions():
    """Inlines functions that layers call into the graph, where they can be read."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _needed(all_operations, outputs):
    """Returns the operations on which outputs and assignments depend, in order."""
    wanted = [tensor.op for tensor in outputs] + [
        op for op in all_operations if op.type.startswith("Assign")
    ]
    seen = set()
    while wanted:
        op = wanted.pop()
        if op not in seen:
            seen.add(op)
            wanted.extend(tensor.op for tensor in op.inputs)
    return dict.fromkeys(op for op in all_operations if op in seen)
