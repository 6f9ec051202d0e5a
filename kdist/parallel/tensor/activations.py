"""Tensors whose features stay divided over devices between a column and a row division.

The output of a layer that is divided by column needs no gather if its only consumers are layers
divided by row, possibly through layers that treat each feature separately.
"""

import collections
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
from keras.tree import flatten, map_structure

_ELEMENTWISE_NAMES = (
    *("celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu"),
    *("hard_tanh", "leaky_relu", "linear", "log_sigmoid", "mish", "relu", "relu6", "selu"),
    *("sigmoid", "silu", "soft_shrink", "softplus", "softsign", "sparse_plus", "squareplus"),
    *("tanh", "tanh_shrink", "threshold"),
)
_ELEMENTWISE = frozenset(getattr(keras.activations, name) for name in _ELEMENTWISE_NAMES)

_LAYER_NAMES = (
    *("Activation", "ReLU", "LeakyReLU", "ELU", "Dropout", "GaussianDropout", "GaussianNoise"),
    *("Rescaling", "Identity", "Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract"),
)
_PER_FEATURE_LAYERS = tuple(getattr(keras.layers, name) for name in _LAYER_NAMES)
_POOLING_NAMES = (
    *("AveragePooling", "GlobalAveragePooling", "GlobalMaxPooling", "MaxPooling", "ZeroPadding"),
)
# These treat each channel separately if channels come last.
_PER_CHANNEL_LAYERS = tuple(
    getattr(keras.layers, f"{name}{rank}D") for name in _POOLING_NAMES for rank in (1, 2, 3)
)


def is_elementwise(activation) -> bool:
    """Returns whether an activation function is known to act on each element separately."""
    return activation is None or activation in _ELEMENTWISE


def is_per_feature(layer) -> bool:
    """Returns whether a layer is known to act on each feature (the last axis) separately."""
    if type(layer) in _PER_CHANNEL_LAYERS:
        is_channels_last = getattr(layer, "data_format", "channels_last") == "channels_last"
        return is_channels_last and not getattr(layer, "keepdims", False)
    if type(layer) not in _PER_FEATURE_LAYERS or layer.activity_regularizer is not None:
        return False
    if isinstance(layer, keras.layers.Activation):
        return is_elementwise(layer.activation)
    if isinstance(layer, keras.layers.Rescaling):
        return all(getattr(value, "ndim", 0) == 0 for value in (layer.scale, layer.offset))
    return getattr(layer, "noise_shape", None) is None


_keeps_parts = contextvars.ContextVar("_keeps_parts", default=False)


@dataclasses.dataclass(frozen=True, eq=False)
class DividedTensor:
    """A tensor whose features (last axis) are divided equally over devices.

    It is not a tuple, so that Keras treats it as one leaf of a structure.
    """

    parts: tuple


def divided_outputs(
    nodes: Collection, outputs: Collection, how: Mapping[str, str], stages: Mapping[str, int]
) -> set[str]:
    """Returns the names of the operations whose output stays divided.

    `nodes` are the calls of a graph's operations. `how` is name of each divided layer -> "column",
    "row" or "heads". `stages` is name -> number of the stage; tensors that cross stages are
    gathered.
    """
    calls = collections.Counter(node.operation.name for node in nodes)
    called_once = {node.operation.name: node for node in nodes if calls[node.operation.name] == 1}
    graph_outputs = {id(tensor) for tensor in outputs}
    consumers: dict[int, list] = {}
    for node in nodes:
        for tensor in node.input_tensors:
            consumers.setdefault(id(tensor), []).append(node.operation.name)

    def still_divided(name):
        node = called_once[name]
        sources = [tensor._keras_history.operation.name for tensor in node.input_tensors]
        if how.get(name) != "column" and not all(source in divided for source in sources):
            return False
        ends = [id(tensor) for tensor in node.outputs]
        consumed_by = [consumer for end in ends for consumer in consumers.get(end, ())]
        return (
            bool(consumed_by)
            and graph_outputs.isdisjoint(ends)
            and all(accepts_parts(each) and stages[each] == stages[name] for each in consumed_by)
        )

    def accepts_parts(name):
        by_feature = name in divided and name not in how
        return by_feature or (how.get(name) == "row" and name in called_once)

    divided = {
        name for name, node in called_once.items() if _can_be_divided(node.operation, how.get(name))
    }
    while gathered := {name for name in divided if not still_divided(name)}:
        divided -= gathered
    return divided


def _can_be_divided(operation, how):
    """Returns whether the output is divided by column, or the operation acts per feature."""
    if how == "column":
        return (
            is_elementwise(getattr(operation, "activation", None))
            and getattr(operation, "data_format", "channels_last") == "channels_last"
            and operation.activity_regularizer is None
        )
    return how is None and is_per_feature(operation)


def call_divided(
    call: Callable, on: Callable, divides_output: bool, args: tuple, kwargs: dict
) -> Any:
    """Returns the outputs of an operation whose inputs or outputs may be `DividedTensor`s.

    `call` is the operation, and `on` returns the context of the device of part number n.
    """
    counts = {len(x.parts) for x in flatten((args, kwargs)) if isinstance(x, DividedTensor)}
    if counts and divides_output:  # the operation acts on each feature separately
        outputs = []
        for number in range(*counts):
            with on(number):
                outputs.append(call(*_part_of(args, number), **_part_of(kwargs, number)))
        return DividedTensor(tuple(outputs))
    if counts:  # a layer that is divided by row accepts a tuple of parts
        args, kwargs = map_structure(_as_tuple, (args, kwargs))
    if not divides_output:
        return call(*args, **kwargs)
    token = _keeps_parts.set(True)
    try:
        return DividedTensor(call(*args, **kwargs))
    finally:
        _keeps_parts.reset(token)


def keeps_parts() -> bool:
    """Returns whether a layer that is divided by column returns a tuple with its parts.

    Another model that calls the layer, such as one that extracts features, needs one tensor.
    """
    return _keeps_parts.get()


def _part_of(structure, number):
    return map_structure(
        lambda x: x.parts[number] if isinstance(x, DividedTensor) else x, structure
    )


def _as_tuple(x):
    return x.parts if isinstance(x, DividedTensor) else x
