"""Between layers: features that stay divided over the devices, from a column to a row.

What is divided by column and taken by nothing but layers that are divided by row, or that treat
each feature by itself on the way to them, need not be gathered.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from keras.tree import flatten, map_structure

from kdist.parallel.tensor.elementwise import is_by_feature, is_elementwise


@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
    """A tensor's features (its last axis), an equal part a device; Keras takes it for one thing."""

    parts: tuple


def stay_divided(
    nodes: Collection, outputs: Collection, how: Mapping[str, str], stages: Mapping[str, int]
) -> set[str]:
    """The names of the operations whose output stays divided.

    Args:
        nodes: the calls of a graph's operations.
        outputs: the graph's.
        how: name -> "column", "row" or "heads", of the divided layers.
        stages: name -> number of the stage; what is handed to another stage is gathered.
    """
    calls = collections.Counter(node.operation.name for node in nodes)
    once = {node.operation.name: node for node in nodes if calls[node.operation.name] == 1}
    given_out = {id(tensor) for tensor in outputs}
    takers: dict[int, list] = {}
    for node in nodes:
        for tensor in node.input_tensors:
            takers.setdefault(id(tensor), []).append(node.operation.name)

    def still_stays(name):
        node = once[name]
        sources = [tensor._keras_history.operation.name for tensor in node.input_tensors]
        if how.get(name) != "column" and not all(source in stay for source in sources):
            return False
        ends = [id(tensor) for tensor in node.outputs]
        taken_by = [taker for end in ends for taker in takers.get(end, ())]
        return (
            bool(taken_by)
            and given_out.isdisjoint(ends)
            and all(takes_parts(taker) and stages[taker] == stages[name] for taker in taken_by)
        )

    def takes_parts(name):
        by_feature = name in stay and name not in how
        return by_feature or (how.get(name) == "row" and name in once)

    stay = {name for name, node in once.items() if _could_stay(node.operation, how.get(name))}
    while gone := {name for name in stay if not still_stays(name)}:
        stay -= gone
    return stay


def _could_stay(operation, how):
    """Whether an operation's output can be divided: it is by column, or keeps features apart."""
    if how == "column":
        return (
            is_elementwise(getattr(operation, "activation", None))
            and getattr(operation, "data_format", "channels_last") == "channels_last"
            and operation.activity_regularizer is None
        )
    return how is None and is_by_feature(operation)


def call_divided(call: Callable, on: Callable, stays: bool, args: tuple, kwargs: dict) -> Any:
    """Calls an operation of a split model, of which some have `Divided` inputs or outputs.

    Args:
        call: the operation.
        on: number of a part -> context of its device.
        stays: whether the output is divided.
        args: and `kwargs`, the operation's.
    """
    counts = {len(x.parts) for x in flatten((args, kwargs)) if isinstance(x, Divided)}
    if counts and stays:  # each feature by itself
        outputs = []
        for number in range(*counts):
            with on(number):
                outputs.append(call(*_parts(args, number), **_parts(kwargs, number)))
        return Divided(tuple(outputs))
    if counts:  # a layer that is divided by row takes a tuple
        return call(*map_structure(_as_tuple, args), **kwargs)
    outputs = call(*args, **kwargs)
    return Divided(outputs) if stays else outputs


def _parts(structure, number):
    return map_structure(lambda x: x.parts[number] if isinstance(x, Divided) else x, structure)


def _as_tuple(x):
    return x.parts if isinstance(x, Divided) else x
