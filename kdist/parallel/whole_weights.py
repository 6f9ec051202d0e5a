"""Along which axis the weights of a plain layer are divided.

As `kdist.parallel.tensor` divides them into variables of their own, for JAX, where a variable stays
one and its devices hold parts of it.
"""

from collections.abc import Iterator

import keras


def divided_axes(layer, how: str) -> Iterator[tuple[keras.Variable, int]]:
    """(variable, axis) of what is divided; other weights of the layer are whole on each device.

    Args:
        layer: one with which `check_division` finds no fault, for the same `how`.
        how: "column", "row" or "heads".
    """
    if how == "heads":
        return _of_attention(layer)
    if isinstance(layer, keras.layers.Embedding):
        return iter([(layer._embeddings, 0 if how == "row" else 1)])
    return _of_linear(layer, how)


def _of_linear(layer, how):
    """Of `Dense` and convolutions, whose kernels are (…, inputs, outputs)."""
    yield layer._kernel, -2 if how == "row" else -1
    if how == "column" and layer.use_bias:
        yield layer.bias, 0


def _of_attention(layer):
    """Of `MultiHeadAttention`, by heads.

    Kernels of queries, keys, values and gates are (features, heads, size), their biases
    (heads, size), that of the output is (heads, size, features).
    """
    projections = [layer._query_dense, layer._key_dense, layer._value_dense]
    if layer._use_gate:
        projections.append(layer._gate_dense)
    for projection in projections:
        yield projection._kernel, 1
        if layer._use_bias:
            yield projection.bias, 0
    yield layer._output_dense._kernel, 0
