"""Split plans that say, of variables, which of their axes are divided.

    {".*/ffn_up/kernel": (None, "model"), ".*/ffn_down/kernel": ("model", None)}

is what LayoutMaps of `keras.distribution` say as well. Here it becomes a division of layers.
"""

import re
from collections.abc import Mapping

import keras

from kdist.parallel.split_plan import (
    Division,
    SplitPlan,
    Stage,
    match_names,
    operations_by_name,
)

AXIS = "model"

# Of an attention layer's variables, the axis of the heads.
_HEADS = {
    **{f"{part}/kernel": 1 for part in ("query", "key", "value", "gate")},
    **{f"{part}/bias": 0 for part in ("query", "key", "value", "gate")},
    "attention_output/kernel": 0,
}


def on_layers(model: keras.Model, plan: Mapping) -> SplitPlan:
    """The plan with patterns on names of layers alone.

    Args:
        model: functional or Sequential, built.
        plan: as `kdist.parallel.split` takes it.

    Raises:
        ValueError: a pattern matches no variable, or two match one; axes that are not as many as
            the variable has, of which none or several are "model", or that no layer divides so;
            variables of one layer that are divided differently.
    """
    axes = {pattern: where for pattern, where in plan.items() if isinstance(where, tuple)}
    if not axes:
        return plan
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
                f"{pattern!r} divides {path!r} by {how}, and another pattern its layer by "
                f"{divided[name]}: let them agree"
            )
    others = {pattern: where for pattern, where in plan.items() if pattern not in axes}
    return _together(list(operations), others, divided)


def _name_in(layer, variable):
    """A variable's name within its layer, such as `query/kernel`."""
    return variable.path.removeprefix(f"{layer.path}/")


def _division(layer, variable, path, pattern, axes):
    """By what a layer is divided if a variable is, on the axis that is called "model"."""
    rank = len(variable.shape)
    if len(axes) != rank or any(axis not in (None, AXIS) for axis in axes) or not any(axes):
        raise ValueError(
            f"{pattern!r}: {axes!r}: {path!r} has the shape {tuple(variable.shape)}; say None or "
            f'"{AXIS}" for each of its {rank} axes, and "{AXIS}" for one'
        )
    divided = [number for number, axis in enumerate(axes) if axis]
    if isinstance(layer, keras.layers.MultiHeadAttention):
        ways = {_HEADS.get(_name_in(layer, variable)): "heads"}
    else:
        ways = {rank - 1: "column", rank - 2: "row"}
    if len(divided) > 1 or divided[0] not in ways:
        raise ValueError(
            f"{pattern!r}: {axes!r}: {path!r} cannot be divided so; a kernel is divided by its "
            "last axis (column) or the one before it (row), attention by its heads"
        )
    return ways[divided[0]]


def _together(names, others, divided):
    """A plan in which divided layers are named one by one, on the stage that others say."""
    plan = {}
    for name, pattern in match_names(names, others, "layer").items():
        where = others[pattern]
        if name in divided and not isinstance(where, Stage):
            raise ValueError(
                f"{pattern!r} and a pattern on its variables both say where {name!r} goes: leave "
                "one out"
            )
        plan[re.escape(name)] = where
    for name, how in divided.items():
        stage = plan.get(re.escape(name))
        plan[re.escape(name)] = Division(how, stage.number if stage else None)
    return plan
