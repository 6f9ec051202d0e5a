"""Which layers can be divided, and into how many parts."""

import math

import keras

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_HOW = {
    keras.layers.Dense: ("column", "row"),
    **dict.fromkeys(_CONVOLUTIONS, ("column", "row")),
    keras.layers.Embedding: ("column", "row"),
    keras.layers.MultiHeadAttention: ("heads",),
}

# The others are more than a sum over elements, or look at more than one element.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_ELEMENTWISE = (keras.constraints.NonNeg,)


def check_division(name: str, layer, how: str, degree: int):
    """Raises unless the weights of `layer` can be divided.

    Args:
        name: the layer's, with those of the models that it is in.
        layer: an operation of a model.
        how: "column", "row" or "heads".
        degree: over how many devices.

    Raises:
        TypeError: a kind of layer that cannot be divided, or not so.
        ValueError: it is not built; its size is no multiple of `degree`; or it has a regularizer,
            a constraint or a way of computing that would act on parts otherwise than on the whole.
    """
    _check_kind(name, layer, how)
    if not layer.built:
        raise ValueError(f"{name!r} is not built: call the model on a batch, or `build` it, first")
    what, size = _size(layer, how)
    if size % degree:
        raise ValueError(
            f"{name!r} has {size} {what}, which tensor={degree} does not divide: take a multiple "
            f"of {degree}, another layout, or leave the layer whole"
        )
    for kind, refused in (
        ("regularizer", lambda value: type(value) not in _SUMS),
        ("constraint", lambda value: type(value) not in _ELEMENTWISE),
    ):
        for argument, value in _arguments(layer, kind, how):
            if value is not None and refused(value):
                raise ValueError(_on_parts(name, argument, value, kind))
    _check_computation(name, layer)
    if len({variable.trainable for variable in layer.weights}) > 1:
        raise ValueError(
            f"only some of the variables of {name!r} are trainable: freeze the layer with "
            "trainable=False, or leave it whole"
        )


def possible_divisions(name: str, layer, degree: int) -> list[str]:
    """How the weights of a layer could be divided; of most operations, in no way.

    Args:
        name: and `layer` and `degree`, as `check_division` takes them.
    """
    return [how for how in _HOW.get(type(layer), ()) if _is_possible(name, layer, how, degree)]


def _is_possible(name, layer, how, degree):
    try:
        check_division(name, layer, how, degree)
    except ValueError:
        return False
    return True


def divided_numbers(layer, how: str) -> int:
    """How many numbers of a layer's weights are divided; a bias that is added to a sum is not.

    Args:
        layer: one that can be divided.
        how: "column", "row" or "heads".
    """
    bias = None
    if how == "heads":
        bias = layer._output_dense.bias
    elif how == "row":
        bias = getattr(layer, "bias", None)
    whole = 0 if bias is None else math.prod(bias.shape)
    return sum(math.prod(weight.shape) for weight in layer.weights) - whole


def _check_kind(name, layer, how):
    if type(layer) not in _HOW:
        kinds = ", ".join(kind.__name__ for kind in _HOW)
        raise TypeError(
            f"{name!r} is a {type(layer).__name__}, which cannot be divided; what can: {kinds}"
        )
    if how not in _HOW[type(layer)]:
        ways = " or ".join(f"{way}()" for way in _HOW[type(layer)])
        raise TypeError(f"{name!r} is a {type(layer).__name__}: it is divided by {ways}")


def _size(layer, how):
    """(what there is to divide, how many)."""
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
    """(argument, value) of what a layer is given of a kind for the weights that are divided."""
    divided = ("kernel", "embeddings") if how == "row" else ("kernel", "bias", "embeddings")
    for what in divided:
        argument = f"{what}_{kind}"
        private = getattr(layer, f"_{argument}", None)
        yield argument, getattr(layer, argument, private)


def _on_parts(name, argument, value, kind):
    what = type(value).__name__
    if kind == "regularizer":
        return (
            f"{name!r} has {argument}={what}, which is not known to be a sum over elements, and "
            "would be another one on parts: take L1, L2 or L1L2, or leave the layer whole"
        )
    return (
        f"{name!r} has {argument}={what}, which looks at a whole variable, and a device has a part "
        "of it: take NonNeg, or leave the layer whole"
    )


def _check_computation(name, layer):
    if getattr(layer, "groups", 1) != 1:
        raise ValueError(
            f"{name!r} has groups={layer.groups}, which tie output channels to input channels: "
            "leave it whole"
        )
    if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
        raise ValueError(
            f"{name!r} has LoRA or quantized weights, which are not divided: leave it whole"
        )
    if isinstance(layer, keras.layers.MultiHeadAttention) and layer._activity_regularizer:
        raise ValueError(
            f"{name!r} has an activity_regularizer, which looks at the sum over all heads: leave "
            "it out, or the layer whole"
        )
