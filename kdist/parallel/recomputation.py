"""What a second forward pass may do: compute the same again, and write nothing."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

# Stateful by name, that give the same again and write nothing. Keras calls cuDNN without dropout.
_REPEATABLE = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"),
    *("VarIsInitializedOp", "Assert", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"),
}


def check_written(state):
    """Refuses a forward pass that writes weights that are trained: which ones have the gradient?

    Args:
        state: (variable, its value before) of what was written.

    Raises:
        ValueError: it has such a weight.
    """
    for variable, _ in state:
        if variable.trainable:
            raise ValueError(
                f"{variable.path!r} is trained and written in the forward pass, which cannot be "
                "repeated: leave the layer out that writes it (such as SpectralNormalization), or "
                "recompute out of the layout"
            )


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Refuses operations, made meanwhile, that would give something else or write again.

    Seeds and variables of Keras are none of them: a step reads and writes them otherwise then.

    Raises:
        ValueError: such an operation was made.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[before:]:
        for kind in _types_of(operation.op_def, operation.node_def, graph):
            if kind not in _REPEATABLE:
                raise ValueError(
                    f"{operation.name!r} ({kind}) draws numbers of TensorFlow's own, or writes "
                    "something, and cannot be repeated: draw from a keras.random.SeedGenerator of "
                    "the layer, keep state in its weights, or leave recompute out of the layout"
                )


def _types_of(op_def, node_def, graph):
    """Types of the stateful operations that one is, or has in its functions."""
    names = [value.func.name for value in node_def.attr.values() if value.HasField("func")]
    functions = [graph._get_function(name) for name in names]
    if not any(functions):
        if op_def.is_stateful:
            yield op_def.name
        return
    for function in filter(None, functions):
        for inner in function.graph.get_operations():
            yield from _types_of(inner.op_def, inner.node_def, function.graph)
