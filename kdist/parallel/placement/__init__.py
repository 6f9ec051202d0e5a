"""Placements: patterns on names of layers, each with a stage, a device, or a division.

    {"stage1/.*": stage(0), "stage2/.*": stage(1)}      # stages of a pipeline
    {"branch_b.*": device(1)}                           # devices of a replica's group
    {".*_up": column(), ".*_down": row(), ".*_attention": heads()}  # divided weights
    {".*_up/kernel": (None, "model"), ".*_down/kernel": ("model", None)}  # axes of variables

A pattern is a regular expression that matches a whole name. The name of a layer in a nested model
includes the name of that model: `block/conv`. A pattern that matches the nested model applies to
all of its layers that no other pattern matches. A layer that nothing matches is placed with its
inputs: on the highest number among them, or on 0 at the start of the model.

Axes of variables are in the form of `keras.distribution.LayoutMap`, and are converted to divisions
of layers.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

import keras

from kdist.compat.keras import Functional
from kdist.layout import Layout

_MAX_LISTED_NAMES = 12
AXIS = "model"

# Axis of the heads in an attention layer's variables.
_HEADS = {
    **{f"{part}/kernel": 1 for part in ("query", "key", "value", "gate")},
    **{f"{part}/bias": 0 for part in ("query", "key", "value", "gate")},
    "attention_output/kernel": 0,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline, from 0."""

    number: int


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of each replica's group, from 0."""

    number: int


@dataclasses.dataclass(frozen=True)
class Division:
    """A division of layers' weights over the devices of a stage."""

    how: str  # "column", "row" or "heads"
    stage: int | None = None  # from 0; None for the stage of the inputs


def column(stage: int | None = None) -> Division:
    """Divides the output features of layers over the devices of a stage.

    Args:
        stage: number of the stage, from 0. Defaults to the stage of the inputs.

    Returns:
        A value of a placement, for `kdist.parallel.split`.

    Example:
        placement = {".*_up": kdist.parallel.column(), ".*_down": kdist.parallel.row()}
    """
    return Division("column", stage)


def row(stage: int | None = None) -> Division:
    """Divides the input features of layers over the devices of a stage.

    Args:
        stage: number of the stage, from 0. Defaults to the stage of the inputs.

    Returns:
        A value of a placement, for `kdist.parallel.split`.

    Example:
        placement = {".*_up": kdist.parallel.column(), ".*_down": kdist.parallel.row()}
    """
    return Division("row", stage)


def heads(stage: int | None = None) -> Division:
    """Divides the heads of attention layers over the devices of a stage.

    Args:
        stage: number of the stage, from 0. Defaults to the stage of the inputs.

    Returns:
        A value of a placement, for `kdist.parallel.split`.

    Example:
        placement = {".*_attention": kdist.parallel.heads()}
    """
    return Division("heads", stage)


def stage(number: int) -> Stage:
    """Places layers on a stage of a pipeline.

    Args:
        number: number of the stage, from 0.

    Returns:
        A value of a placement, for `kdist.parallel.split`.

    Example:
        placement = {"block[34].*|head": kdist.parallel.stage(1)}
    """
    return Stage(number)


def device(number: int) -> Device:
    """Places layers on a device of each replica's group.

    Args:
        number: number of the device, from 0.

    Returns:
        A value of a placement, for `kdist.parallel.split`.

    Example:
        placement = {"branch_b.*": kdist.parallel.device(1)}
    """
    return Device(number)


Placement = Mapping[str, Stage | Device | Division | tuple]


def places_by_name(model: keras.Model, placement: Placement, layout: Layout) -> dict[str, int]:
    """Returns the number of the device of each operation of `model` and of its nested models.

    The result, such as `{"stem": 0, "block/conv": 1, …}`, is in the order of computation. Raises
    TypeError for a model that is neither functional nor Sequential, and for a value of the
    placement that is not a stage, device or division. Raises ValueError if a pattern matches
    nothing, or is not a regular expression; if two patterns match one name; if the layout does not
    have a stage or device; if a stage is empty, or passes something to an earlier one; or if layers
    are divided and the layout has tensor=1.
    """
    graph = functional_graph(model)
    numbers = {pattern: _number(pattern, where, layout) for pattern, where in placement.items()}
    patterns = match_names(list(_names(graph)), numbers)
    divided = {name for name in patterns if isinstance(placement[patterns[name]], Division)}
    _check_degree(divided, layout)
    matched = {name: number for name in patterns if (number := numbers[patterns[name]]) is not None}
    places: dict[str, int] = {}
    _follow(graph, "", None, [0] * len(graph.inputs), matched, places, layout.tensor)
    for name in divided:
        places[name] -= places[name] % layout.tensor
    _check_all_are_used(places, layout)
    if layout.pipeline > 1:
        _check_order(graph, "", places, layout.tensor)
    return places


def divisions_by_name(model: keras.Model, placement: Placement, layout: Layout) -> dict[str, str]:
    """Returns the division of each divided layer: `{"block1_ffn_up": "column", …}`.

    `places_by_name` must accept the arguments. Raises ValueError if the layout is for divided
    layers, and the placement divides none.
    """
    patterns = match_names(list(_names(functional_graph(model))), placement)
    where = {name: placement[pattern] for name, pattern in patterns.items()}
    divisions = {name: each.how for name, each in where.items() if isinstance(each, Division)}
    if layout.tensor > 1 and not divisions:
        raise ValueError(
            f"{layout} is for layers whose weights are divided, and the placement divides none. "
            "Divide some layers by column(), row() or heads(), or remove tensor"
        )
    return divisions


def operations_by_name(model: keras.Model) -> dict:
    """Returns the operations of a model and of its nested models, by name."""
    return dict(_operations(functional_graph(model), ""))


def functional_graph(model: keras.Model) -> Functional:
    """Returns the graph of operations of a functional or Sequential model.

    Raises TypeError for other models, and ValueError if the model is not built.
    """
    if isinstance(model, Functional):
        return model
    if not isinstance(model, keras.Sequential):
        raise TypeError(
            f"{model.name!r} is a {type(model).__name__}. Only functional and Sequential models "
            "can be split, because their layers are known before they run"
        )
    if not model.built:
        raise ValueError(f"{model.name!r} is not built. Begin it with keras.Input(shape)")
    return model._functional


def is_nested(operation) -> bool:
    """Returns whether an operation of a model is itself a model that can be split."""
    return isinstance(operation, Functional | keras.Sequential)


def nodes_of(graph: Functional) -> Iterator:
    """Yields the calls of operations, each after the calls that its inputs come from."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if not node.is_input:
                yield node


def _names(graph):
    return (name for name, _ in _operations(graph, ""))


def _operations(graph, prefix):
    for operation in dict.fromkeys(node.operation for node in nodes_of(graph)):
        name = prefix + operation.name
        yield name, operation
        if is_nested(operation):
            yield from _operations(functional_graph(operation), f"{name}/")


def _number(pattern, where, layout):
    """Returns the number of the (first) device for a pattern; None if it specifies none."""
    if isinstance(where, Stage):
        what, number, count, size = "stage", where.number, layout.pipeline, layout.tensor
    elif isinstance(where, Division):
        what, number, count, size = "stage", where.stage, layout.pipeline, layout.tensor
    elif isinstance(where, Device):
        what, number, count, size = "device", where.number, layout.group_size, 1
    else:
        raise TypeError(
            f"{pattern!r} is placed on {where!r}. Use kdist.parallel.stage(n), device(n), "
            'column(), row() or heads(), or the axes of a variable, such as (None, "model")'
        )
    if number is None:
        return None
    if not 0 <= number < count:
        raise ValueError(
            f"{pattern!r} is placed on {what} {number}, and {layout} has {count}, numbered from 0. "
            f"Use another {what}, or a larger layout"
        )
    return number * size


def _check_degree(divided, layout):
    if divided and layout.tensor == 1:
        raise ValueError(
            f"{_listed(sorted(divided))}: cannot be divided, because {layout} has tensor=1. Use a "
            "layout with tensor=2 or more, or remove column(), row() and heads()"
        )


def match_names(names: list[str], patterns: Iterable[str], kind: str = "layer") -> dict[str, str]:
    """Returns the pattern that matches each name, without names that none matches.

    Raises ValueError if a pattern matches nothing, or is not a regular expression, or if two
    patterns match one name.
    """
    by_name: dict[str, str] = {}
    for pattern in patterns:
        try:
            found = [name for name in names if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        if not found:
            raise ValueError(f"{pattern!r} matches no {kind}. The {kind}s are {_listed(names)}")
        for name in found:
            if name in by_name:
                raise ValueError(
                    f"{by_name[name]!r} and {pattern!r} both match {name!r}. Make one of them "
                    "narrower"
                )
            by_name[name] = pattern
    return by_name


def _follow(graph, prefix, default, inputs, matched, places, tensor):
    """Adds the device of each operation of a graph to `places`; returns those of its outputs.

    `prefix` begins the graph's names. `default` is the device of the whole graph, or None if it
    depends on patterns and inputs. `inputs` are the devices of the inputs, and `matched` those of
    names that a pattern matches. Other operations are on the first of the `tensor` devices of their
    stage.
    """
    at = {id(tensor): place for tensor, place in zip(graph.inputs, inputs, strict=True)}
    for node in nodes_of(graph):
        name, operation = prefix + node.operation.name, node.operation
        sources = [at[id(tensor)] for tensor in node.input_tensors]
        own = matched.get(name, default)
        if name not in places:  # a layer that is called twice is on one device
            follows = max(sources, default=0) // tensor * tensor
            places[name] = follows if own is None else own
        ends = [places[name]] * len(node.outputs)
        if is_nested(operation):
            inner = functional_graph(operation)
            if len(sources) != len(inner.inputs):
                raise ValueError(
                    f"{name!r} has {len(inner.inputs)} inputs and is called with {len(sources)} "
                    "tensors. Pass no others, such as a mask"
                )
            ends = _follow(inner, f"{name}/", own, sources, matched, places, tensor)
            places[name] = ends[-1]
        at.update({id(tensor): end for tensor, end in zip(node.outputs, ends, strict=True)})
    return [at[id(tensor)] for tensor in graph.outputs]


def _check_all_are_used(places, layout):
    used = {place // layout.tensor for place in places.values()}
    for number in range(layout.group_size // layout.tensor):
        if number not in used:
            what = "stage" if layout.pipeline > 1 else "device"
            raise ValueError(
                f"no layer is on {what} {number} of {layout}. Place some layers on it, or use a "
                f"smaller layout. The layers are {_listed(places)}"
            )


def _check_order(graph, prefix, places, tensor):
    """Checks that no stage passes anything to an earlier one: micro-batches pass each once."""
    for node in nodes_of(graph):
        name = prefix + node.operation.name
        for tensor_in in node.input_tensors:
            source = tensor_in._keras_history.operation
            before = places.get(prefix + source.name, 0) // tensor
            if before > places[name] // tensor:
                raise ValueError(
                    f"{prefix + source.name!r} on stage {before} is an input of {name!r} on stage "
                    f"{places[name] // tensor}. Stages can only pass tensors to later stages"
                )
        if is_nested(node.operation):
            _check_inputs(node, name, places)
            _check_order(functional_graph(node.operation), f"{name}/", places, tensor)


def _check_inputs(node, name, places):
    """Checks the inputs of a nested model on several stages: they are passed by position."""
    inside = {place for inner, place in places.items() if inner.startswith(f"{name}/")}
    arguments = node.arguments
    if len(inside) > 1 and any(
        isinstance(argument, dict) for argument in (*arguments.args, *arguments.kwargs.values())
    ):
        raise ValueError(
            f"{name!r} is on several stages and is called with a dict of inputs. Call it with a "
            "list in the order of its inputs, or place it on one stage"
        )


def _listed(names):
    names = list(names)
    more = f" … and {len(names) - _MAX_LISTED_NAMES} more" * (len(names) > _MAX_LISTED_NAMES)
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more


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
    for name, pattern in match_names(names, others).items():
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
