"""A model cut into the stages of a pipeline: what each computes, takes and gives.

Any number of tensors may cross a cut, to the next stage or to a later one. A nested model whose
layers are on several stages is cut as though they were the outer model's own.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras

from kdist.layout import Layout
from kdist.parallel.split_plan import functional_graph, is_nested, nodes_of
from kdist.training.keras_internals import Functional, with_call_context

# A tensor of the model: inputs of the model come first, in their order.
Key = int


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation of the model, called once.

    Attributes:
        operation: Keras's.
        place: the number of its device within a replica's group.
        takes: what it is called with, in the order of the node's tensors.
        gives: what it gives, in order.
    """

    operation: Any
    place: int
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    _node: Any
    _run: Callable

    def __call__(self, values: dict[Key, Any]) -> list:
        """What it computes of `values`, on its device, in training; in the order of `gives`."""
        tensors = self._node.input_tensors
        given = {id(tensor): values[key] for tensor, key in zip(tensors, self.takes, strict=True)}
        args, kwargs = self._node.arguments.fill_in(given)
        operation = with_call_context(self.operation, training=True)
        return keras.tree.flatten(self._run(self.operation.name, operation, *args, **kwargs))

    def added_losses(self) -> list:
        """What the operation's layers added to the loss when it was called last."""
        if not isinstance(self.operation, keras.layers.Layer):
            return []
        layers = self.operation._flatten_layers()
        return [loss for layer in layers for loss in layer._get_own_losses()]


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """What one stage computes.

    Attributes:
        number: from 0.
        calls: in the order in which they are computed.
        takes: what it takes from earlier stages or from the model's inputs -> the place of the
            first call that does.
        gives: what later stages or the model's outputs take of it -> the place it comes from.
    """

    number: int
    calls: tuple[Call, ...]
    takes: dict[Key, int]
    gives: dict[Key, int]

    @property
    def last_place(self) -> int:
        """The number of the device of its last call."""
        return self.calls[-1].place


@dataclasses.dataclass(frozen=True)
class CutModel:
    """A model as stages.

    Attributes:
        graph: the functional graph of the model.
        stages: in order.
        outputs: the model's outputs, flat.
    """

    graph: Functional
    stages: tuple[StageGraph, ...]
    outputs: tuple[Key, ...]

    def is_input(self, key: Key) -> bool:
        """Whether it is an input of the model."""
        return key < len(self.graph.inputs)


def cut(model: keras.Model, places: dict[str, int], layout: Layout) -> CutModel:
    """The stages of a model whose operations are placed.

    Args:
        model: the copy that `split` made; its graphs call their operations on their devices.
        places: operation -> number of its device, as `places_by_name` gives.
        layout: says how many stages there are, each of `layout.tensor` devices.

    Raises:
        ValueError: a stage takes something from a later one.
    """
    graph = functional_graph(model)
    numbers = itertools.count()
    inputs = [next(numbers) for _ in graph.inputs]
    calls: list[Call] = []
    outputs = _follow(graph, "", inputs, places, layout.tensor, numbers, calls)
    source = dict.fromkeys(inputs, -1)  # the stage that each tensor comes from
    source.update((key, call.place // layout.tensor) for call in calls for key in call.gives)
    taken: list[dict[Key, int]] = [{} for _ in range(layout.pipeline)]
    for call in calls:
        stage = call.place // layout.tensor
        for key in call.takes:
            if source[key] > stage:
                raise ValueError(
                    f"{call.operation.name!r} on stage {stage} takes something from stage "
                    f"{source[key]}: stages hand on to later ones only"
                )
            if source[key] < stage:
                taken[stage].setdefault(key, call.place)
    by_stage = [
        tuple(call for call in calls if call.place // layout.tensor == stage)
        for stage in range(layout.pipeline)
    ]
    for key in outputs:  # the loss is computed at the end of the last stage
        if source[key] < layout.pipeline - 1:
            taken[-1].setdefault(key, by_stage[-1][-1].place)
    crossing = {key for keys in taken for key in keys} | set(outputs)
    stages = [
        StageGraph(
            stage,
            by_stage[stage],
            taken[stage],
            {key: call.place for call in by_stage[stage] for key in call.gives if key in crossing},
        )
        for stage in range(layout.pipeline)
    ]
    return CutModel(graph, tuple(stages), tuple(outputs))


def _follow(graph, prefix, inputs, places, tensor, numbers, calls):
    """Notes the calls of a graph; gives the keys of its outputs.

    Args:
        inputs: the keys of its inputs.
        tensor: devices of a stage.
        numbers: gives the next key.
        calls: to be added to.
    """
    keys = {id(x): key for x, key in zip(graph.inputs, inputs, strict=True)}
    for node in nodes_of(graph):
        name, operation = prefix + node.operation.name, node.operation
        takes = tuple(keys[id(x)] for x in node.input_tensors)
        if is_nested(operation) and _is_on_several_stages(f"{name}/", places, tensor):
            inner = functional_graph(operation)
            gives = _follow(inner, f"{name}/", takes, places, tensor, numbers, calls)
        else:
            gives = tuple(next(numbers) for _ in node.outputs)
            calls.append(Call(operation, places[name], takes, gives, node, graph.calls_on))
        keys.update((id(x), key) for x, key in zip(node.outputs, gives, strict=True))
    return tuple(keys[id(x)] for x in graph.outputs)


def _is_on_several_stages(prefix, places, tensor):
    return len({at // tensor for name, at in places.items() if name.startswith(prefix)}) > 1
