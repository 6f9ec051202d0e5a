"""Which functions and layers treat each feature by itself, so that a part of them is enough."""

import keras

_ACTIVATIONS = (
    "celu",
    "elu",
    "exponential",
    "gelu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softplus",
    "softsign",
    "sparse_plus",
    "squareplus",
    "tanh",
    "tanh_shrink",
    "threshold",
)
_FUNCTIONS = frozenset(getattr(keras.activations, name) for name in _ACTIVATIONS)

_LAYERS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Rescaling,
    keras.layers.Identity,
    keras.layers.Add,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.Subtract,
)
# These treat each channel by itself, where it is last.
_OF_CHANNELS = tuple(
    getattr(keras.layers, f"{name}{rank}D")
    for name in (
        "AveragePooling",
        "GlobalAveragePooling",
        "GlobalMaxPooling",
        "MaxPooling",
        "ZeroPadding",
    )
    for rank in (1, 2, 3)
)


def is_elementwise(activation) -> bool:
    """Whether an activation function is known to treat each element by itself."""
    return activation is None or activation in _FUNCTIONS


def is_by_feature(layer) -> bool:
    """Whether a layer is known to treat each feature (the last axis) by itself."""
    if type(layer) in _OF_CHANNELS:
        return getattr(layer, "data_format", "channels_last") == "channels_last" and not getattr(
            layer, "keepdims", False
        )
    if type(layer) not in _LAYERS or layer.activity_regularizer is not None:
        return False
    if isinstance(layer, keras.layers.Activation):
        return is_elementwise(layer.activation)
    if isinstance(layer, keras.layers.Rescaling):
        return all(getattr(value, "ndim", 0) == 0 for value in (layer.scale, layer.offset))
    return getattr(layer, "noise_shape", None) is None
