"""Which layer goes where: patterns on the names of layers.

    {"stage1/.*": stage(0), "stage2/.*": stage(1)}      # stages of a pipeline
    {"branch_b.*": device(1)}                           # devices of a replica's group
    {".*_up": column(), ".*_down": row(), ".*_attention": heads()}  # weights that are divided
    {".*_up/kernel": (None, "model"), ".*_down/kernel": ("model", None)}  # the same, of variables

A pattern is a regular expression that matches a whole name. A layer within a nested model has the
names of both, `block/conv`; a pattern that matches the nested model is for all of it that no
pattern of its own matches. What nothing matches goes where its inputs come from: to the highest
number among them, and to 0 at the beginning.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

import keras

from kdist.layout import Layout
from kdist.training.keras_internals import Functional

_SHOWN = 12


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
    """How the weights of layers are divided over the devices of a stage.

    Attributes:
        how: "column", "row" or "heads".
        stage: from 0; None for the one that the inputs come from.
    """

    how: str
    stage: int | None = None


def column(stage: int | None = None) -> Division:
    """Output features are divided over the devices of `stage`, by default that of the inputs."""
    return Division("column", stage)


def row(stage: int | None = None) -> Division:
    """Input features are divided over the devices of `stage`, by default that of the inputs."""
    return Division("row", stage)


def heads(stage: int | None = None) -> Division:
    """Attention heads are divided over the devices of `stage`, by default that of the inputs."""
    return Division("heads", stage)


def stage(number: int) -> Stage:
    """Stage `number` of a pipeline, from 0."""
    return Stage(number)


def device(number: int) -> Device:
    """Device `number` of each replica's group, from 0."""
    return Device(number)


SplitPlan = Mapping[str, Stage | Device | Division | tuple]


def places_by_name(model: keras.Model, plan: SplitPlan, layout: Layout) -> dict[str, int]:
    """The number of the device of each operation of `model`, and of its nested models.

    Args:
        model: functional or Sequential, built.
        plan: as above.
        layout: says how many stages and devices there are.

    Returns:
        `{"stem": 0, "block/conv": 1, …}`, in the order in which they are computed.

    Raises:
        ValueError: a pattern matches nothing, or is no regular expression; two match one name; a
            stage or device that the layout does not have; a stage that nothing is on, or that
            hands on to an earlier one; or layers are divided and the layout has tensor=1.
        TypeError: the model is neither functional nor Sequential, or the plan says something else
            than stages, devices and divisions.
    """
    graph = functional_graph(model)
    numbers = {pattern: _number(pattern, where, layout) for pattern, where in plan.items()}
    patterns = match_names(list(_names(graph)), numbers)
    divided = {name for name in patterns if isinstance(plan[patterns[name]], Division)}
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


def divisions_by_name(model: keras.Model, plan: SplitPlan, layout: Layout) -> dict[str, str]:
    """How layers are divided, where they are: `{"block1_ffn_up": "column", …}`.

    Args:
        model: and `plan` and `layout`, as `places_by_name` has taken them.

    Raises:
        ValueError: the layout is for divided layers, and the plan names none.
    """
    patterns = match_names(list(_names(functional_graph(model))), plan)
    where = {name: plan[pattern] for name, pattern in patterns.items()}
    divisions = {name: each.how for name, each in where.items() if isinstance(each, Division)}
    if layout.tensor > 1 and not divisions:
        raise ValueError(
            f"{layout} is for layers whose weights are divided, and the plan names none: say "
            "column(), row() or heads() of some, or leave tensor out"
        )
    return divisions


def operations_by_name(model: keras.Model) -> dict:
    """The operations of a model, and of its nested models, by name."""
    return dict(_operations(functional_graph(model), ""))


def functional_graph(model: keras.Model) -> Functional:
    """The graph of operations that a functional or Sequential model is.

    Raises:
        TypeError: it is another one.
        ValueError: it is not built.
    """
    if isinstance(model, Functional):
        return model
    if not isinstance(model, keras.Sequential):
        raise TypeError(
            f"{model.name!r} is a {type(model).__name__}; a model can be split where its layers "
            "are known before it runs: functional and Sequential ones"
        )
    if not model.built:
        raise ValueError(f"{model.name!r} is not built: begin it with keras.Input(shape)")
    return model._functional


def is_nested(operation) -> bool:
    """Whether an operation of a model is a model that can be split itself."""
    return isinstance(operation, Functional | keras.Sequential)


def nodes_of(graph: Functional) -> Iterator:
    """The calls of operations, each after those that it takes something from."""
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
    """The number of the (first) device that the plan says; None if it says none."""
    if isinstance(where, Stage):
        what, number, there_are, size = "stage", where.number, layout.pipeline, layout.tensor
    elif isinstance(where, Division):
        what, number, there_are, size = "stage", where.stage, layout.pipeline, layout.tensor
    elif isinstance(where, Device):
        what, number, there_are, size = "device", where.number, layout.group_size, 1
    else:
        raise TypeError(
            f"{pattern!r} goes to {where!r}: say kdist.parallel.stage(n), device(n), column(), "
            'row() or heads(); or, of a variable, its axes, such as (None, "model")'
        )
    if number is None:
        return None
    if not 0 <= number < there_are:
        raise ValueError(
            f"{pattern!r} goes to {what} {number}, and {layout} has {there_are}, from 0 on: "
            "take another, or a larger layout"
        )
    return number * size


def _check_degree(divided, layout):
    if divided and layout.tensor == 1:
        raise ValueError(
            f"{_listed(sorted(divided))}: to be divided, and {layout} has tensor=1: take a layout "
            "with tensor=2 or more, or leave column(), row() and heads() out"
        )


def match_names(names: list[str], patterns: Iterable[str], kind: str = "layer") -> dict[str, str]:
    """The pattern that matches each name that one matches.

    Raises:
        ValueError: a pattern matches nothing, or is no regular expression; two match one name.
    """
    by_name: dict[str, str] = {}
    for pattern in patterns:
        try:
            found = [name for name in names if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if not found:
            raise ValueError(f"{pattern!r} matches no {kind}; there are {_listed(names)}")
        for name in found:
            if name in by_name:
                raise ValueError(
                    f"{by_name[name]!r} and {pattern!r} both match {name!r}: make one of them "
                    "narrower"
                )
            by_name[name] = pattern
    return by_name


def _follow(graph, prefix, default, inputs, matched, places, tensor):
    """Notes where each operation of a graph is; gives where its outputs are.

    Args:
        default: where it is as a whole; None where only patterns and inputs say so.
        inputs: where each of its inputs comes from.
        tensor: devices of a stage; what no pattern matches is on the first of them.
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
                    "tensors: give it no others, such as a mask"
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
                f"no layer is on {what} {number} of {layout}: give it some, or take a smaller "
                f"layout; there are {_listed(places)}"
            )


def _check_order(graph, prefix, places, tensor):
    """Micro-batches go through the stages once, so none may hand on to an earlier one."""
    for node in nodes_of(graph):
        name = prefix + node.operation.name
        for taken in node.input_tensors:
            source = taken._keras_history.operation
            before = places.get(prefix + source.name, 0) // tensor
            if before > places[name] // tensor:
                raise ValueError(
                    f"{prefix + source.name!r} on stage {before} is taken by {name!r} on stage "
                    f"{places[name] // tensor}: stages hand on to later ones only"
                )
        if is_nested(node.operation):
            _check_inputs(node, name, places)
            _check_order(functional_graph(node.operation), f"{name}/", places, tensor)


def _check_inputs(node, name, places):
    """A nested model that is cut takes its inputs by their order, which names may not have."""
    inside = {place for inner, place in places.items() if inner.startswith(f"{name}/")}
    arguments = node.arguments
    if len(inside) > 1 and any(
        isinstance(argument, dict) for argument in (*arguments.args, *arguments.kwargs.values())
    ):
        raise ValueError(
            f"{name!r} is cut and called with names for its inputs: call it with a list of them in "
            "the order of its inputs, or put it on one stage"
        )


def _listed(names):
    names = list(names)
    more = f" … and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return ", ".join(names[:_SHOWN]) + more
