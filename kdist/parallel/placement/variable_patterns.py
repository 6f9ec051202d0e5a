"""Placements that name variables and the axes along which they are divided.

    {".*/ffn_up/kernel": (None, "model"), ".*/ffn_down/kernel": ("model", None)}

`keras.distribution.LayoutMap` uses the same form. Here it is converted to divisions of layers.
"""

import re
from collections.abc import Mapping

import keras

from kdist.parallel.placement.patterns import (
    Division,
    Placement,
    Stage,
    match_names,
    operations_by_name,
)

AXIS = "model"

# Axis of the heads in an attention layer's variables.
_HEADS = {
    **{f"{part}/kernel": 1 for part in ("query", "key", "value", "gate")},
    **{f"{part}/bias": 0 for part in ("query", "key", "value", "gate")},
    "attention_output/kernel": 0,
}


def layer_placement(model: keras.Model, placement: Mapping) -> Placement:
    """Returns an equivalent placement with patterns on names of layers alone.

    Raises ValueError if a pattern matches no variable, or two patterns match one; if the number of
    axes is not the variable's, not exactly one of them is "model", or no layer can be divided along
    it; or if variables of one layer are divided differently.
    """
    axes = {pattern: where for pattern, where in placement.items() if isinstance(where, tuple)}
    if not axes:
        return placement
    operations = operations_by_name(model)
    variables = {
        f"{name}/{_name_in(layer, variable)}": (name, variable)
        for name, layer in operations.items()
        if isinstance(layer, keras.layers.Layer) and not isinstance(layer, keras.Model)
        for variable in layer.variables
    }
    divided: dict[str, str] = {}
    for path, pattern in match_names(list(variables), axes, "variable").items():
        name, variable = variables[path]
        how = _division(operations[name], variable, path, pattern, axes[pattern])
        if divided.setdefault(name, how) != how:
            raise ValueError(
                f"{pattern!r} divides {path!r} by {how}, and another pattern divides its layer by "
                f"{divided[name]}. Divide all variables of a layer in the same way"
            )
    others = {pattern: where for pattern, where in placement.items() if pattern not in axes}
    return _combine(list(operations), others, divided)


def _name_in(layer, variable):
    """Returns a variable's name within its layer, such as `query/kernel`."""
    return variable.path.removeprefix(f"{layer.path}/")


def _division(layer, variable, path, pattern, axes):
    """Returns the division of a layer whose variable is divided along the axis "model"."""
    rank = len(variable.shape)
    if len(axes) != rank or any(axis not in (None, AXIS) for axis in axes) or not any(axes):
        raise ValueError(
            f"{pattern!r}: {axes!r}: {path!r} has the shape {tuple(variable.shape)}. Write None or "
            f'"{AXIS}" for each of its {rank} axes, and "{AXIS}" for one'
        )
    divided = [number for number, axis in enumerate(axes) if axis]
    if isinstance(layer, keras.layers.MultiHeadAttention):
        ways = {_HEADS.get(_name_in(layer, variable)): "heads"}
    else:
        ways = {rank - 1: "column", rank - 2: "row"}
    if len(divided) > 1 or divided[0] not in ways:
        raise ValueError(
            f"{pattern!r}: {axes!r}: {path!r} cannot be divided in this way. A kernel is divided "
            "by its last axis (column) or the one before it (row), attention by its heads"
        )
    return ways[divided[0]]


def _combine(names, others, divided):
    """Returns a placement that names each divided layer, on the stage that `others` specify."""
    placement = {}
    for name, pattern in match_names(names, others, "layer").items():
        where = others[pattern]
        if name in divided and not isinstance(where, Stage):
            raise ValueError(
                f"{pattern!r} and a pattern on its variables both place {name!r}. Remove one"
            )
        placement[re.escape(name)] = where
    for name, how in divided.items():
        stage = placement.get(re.escape(name))
        placement[re.escape(name)] = Division(how, stage.number if stage else None)
    return placement
