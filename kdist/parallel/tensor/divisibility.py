"""Layers and optimizers that allow divided weights: which kinds, degrees, and axes.

The classes that compute divided layers are in `kdist.parallel.tensor.layers`.
"""

import math
from collections.abc import Iterable, Iterator

import keras

from kdist.training.optimizers import check_elementwise, unwrapped

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
# Each layer class also needs an entry in `_SHARDED_CLASSES` of `kdist.parallel.tensor.layers`.
_HOW = {
    keras.layers.Dense: ("column", "row"),
    **dict.fromkeys(CONVOLUTIONS, ("column", "row")),
    keras.layers.Embedding: ("column", "row"),
    keras.layers.MultiHeadAttention: ("heads",),
}

# Other regularizers are not sums over elements; other constraints depend on several elements.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_ELEMENTWISE = (keras.constraints.NonNeg,)


def check_division(name: str, layer, how: str, degree: int):
    """Raises an error unless the weights of `layer` can be divided over `degree` devices.

    The name is the layer's path, including the names of enclosing models; `how` is "column", "row"
    or "heads". Raises TypeError if this kind of layer cannot be divided, or not in this way, and
    ValueError if the layer is not built, its size is not a multiple of `degree`, or it has a
    regularizer, a constraint or an option that would act differently on parts.
    """
    _check_kind(name, layer, how)
    if not layer.built:
        raise ValueError(f"{name!r} is not built. Call the model on a batch, or `build` it, first")
    what, size = _size(layer, how)
    if size % degree:
        raise ValueError(
            f"{name!r} has {size} {what}, which tensor={degree} does not divide. Use a multiple "
            f"of {degree} or another layout, or do not divide the layer"
        )
    for kind, is_refused in (
        ("regularizer", lambda value: type(value) not in _SUMS),
        ("constraint", lambda value: type(value) not in _ELEMENTWISE),
    ):
        for argument, value in _arguments(layer, kind, how):
            if value is not None and is_refused(value):
                raise ValueError(_on_parts(name, argument, value, kind))
    _check_options(name, layer)
    if len({variable.trainable for variable in layer.weights}) > 1:
        raise ValueError(
            f"only some of the variables of {name!r} are trainable. Freeze the layer with "
            "trainable=False, or do not divide it"
        )


def possible_divisions(name: str, layer, degree: int) -> list[str]:
    """Returns the ways to divide the weights of a layer; an empty list for most operations."""
    return [how for how in _HOW.get(type(layer), ()) if _is_possible(name, layer, how, degree)]


def _is_possible(name, layer, how, degree):
    try:
        check_division(name, layer, how, degree)
    except ValueError:
        return False
    return True


def divided_parameters(layer, how: str) -> int:
    """Returns the number of parameters that are divided, without a bias that is added to a sum."""
    bias = None
    if how == "heads":
        bias = layer._output_dense.bias
    elif how == "row":
        bias = getattr(layer, "bias", None)
    whole = 0 if bias is None else math.prod(bias.shape)
    return sum(math.prod(weight.shape) for weight in layer.weights) - whole


def divided_axes(layer, how: str) -> Iterator[tuple[keras.Variable, int]]:
    """Yields (variable, axis) for each divided weight; each device holds all other weights whole.

    The layer passes `check_division` for the same `how`. On JAX a variable stays one object, and
    its devices hold parts of it along this axis.
    """
    if how == "heads":
        yield from _attention_axes(layer)
    elif isinstance(layer, keras.layers.Embedding):
        yield layer._embeddings, 0 if how == "row" else 1
    else:  # kernels of Dense and convolutions are (…, inputs, outputs)
        yield layer._kernel, -2 if how == "row" else -1
        if how == "column" and layer.use_bias:
            yield layer.bias, 0


def _attention_axes(layer):
    """Yields the axis of the heads for the variables of a `MultiHeadAttention`.

    Kernels of queries, keys, values and gates are (features, heads, size), their biases
    (heads, size). The kernel of the output is (heads, size, features).
    """
    projections = [layer._query_dense, layer._key_dense, layer._value_dense]
    if layer._use_gate:
        projections.append(layer._gate_dense)
    for projection in projections:
        yield projection._kernel, 1
        if layer._use_bias:
            yield projection.bias, 0
    yield layer._output_dense._kernel, 0


def _check_kind(name, layer, how):
    if type(layer) not in _HOW:
        kinds = ", ".join(kind.__name__ for kind in _HOW)
        raise TypeError(
            f"{name!r} is a {type(layer).__name__}, which cannot be divided. Use one of {kinds}"
        )
    if how not in _HOW[type(layer)]:
        ways = " or ".join(f"{way}()" for way in _HOW[type(layer)])
        raise TypeError(f"{name!r} is a {type(layer).__name__}. Place it with {ways}")


def _size(layer, how):
    """Returns (name of the divided quantity, its size)."""
    if how == "heads":
        return "heads", layer.num_heads
    if isinstance(layer, keras.layers.Embedding):
        if how == "row":
            return "tokens in its vocabulary (input_dim)", layer.input_dim
        return "features (output_dim)", layer.output_dim
    if isinstance(layer, keras.layers.Dense):
        rows, columns = layer.kernel.shape
        return ("input features", rows) if how == "row" else ("units", columns)
    *_, inputs, filters = layer.kernel.shape
    return ("input channels", inputs) if how == "row" else ("filters", filters)


def _arguments(layer, kind, how):
    """Yields (argument, value) of a layer's regularizers or constraints of divided weights."""
    divided = ("kernel", "embeddings") if how == "row" else ("kernel", "bias", "embeddings")
    for what in divided:
        argument = f"{what}_{kind}"
        private = getattr(layer, f"_{argument}", None)
        yield argument, getattr(layer, argument, private)


def _on_parts(name, argument, value, kind):
    what = type(value).__name__
    if kind == "regularizer":
        return (
            f"{name!r} has {argument}={what}, which is not known to be a sum over elements and "
            "could differ on parts. Use L1, L2 or L1L2, or do not divide the layer"
        )
    return (
        f"{name!r} has {argument}={what}, which needs the whole variable, and each device has a "
        "part of it. Use NonNeg, or do not divide the layer"
    )


def _check_options(name, layer):
    if getattr(layer, "groups", 1) != 1:
        raise ValueError(
            f"{name!r} has groups={layer.groups}, which tie output channels to input channels. "
            "Do not divide the layer"
        )
    if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
        raise ValueError(
            f"{name!r} has LoRA or quantized weights, which cannot be divided. Do not divide the "
            "layer"
        )
    if isinstance(layer, keras.layers.MultiHeadAttention) and layer._activity_regularizer:
        raise ValueError(
            f"{name!r} has an activity_regularizer, which needs the sum over all heads. Remove "
            "it, or do not divide the layer"
        )


def check_optimizer(optimizers: Iterable[keras.optimizers.Optimizer], layers: Iterable[str]):
    """Raises ValueError if an optimizer of a model with divided `layers` needs whole weights.

    An optimizer that is not known to act on each element separately is refused as well. Wrapped
    optimizers are also checked.
    """
    where = f"the weights of {', '.join(list(layers)[:3])} … are divided"
    for optimizer in optimizers:
        check_elementwise(optimizer, where, "do not divide the layers")
        for each in unwrapped(optimizer):
            if each.clipnorm:
                raise ValueError(
                    f"{where}, and clipnorm={each.clipnorm} would clip each part by its own norm. "
                    "Use global_clipnorm, which is the norm of all weights, or clipvalue"
                )
