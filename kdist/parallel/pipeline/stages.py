"""A model cut into pipeline stages, and the tensors that pass through them.

Any number of tensors may cross a cut, to the next stage or to a later one. A nested model whose
layers are on several stages is cut as if they belonged to the outer model.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.compat.keras import Functional, attach, attached_to, with_call_context
from kdist.layout import Layout
from kdist.parallel.placement import functional_graph, is_nested, nodes_of

# A tensor of the model. The model's inputs come first, in order.
Key = int


@dataclasses.dataclass(frozen=True)
class OperationCall:
    """One call of a Keras operation of the model."""

    operation: Any
    place: int  # number of its device within a replica's group
    inputs: tuple[Key, ...]  # in the order of the node's tensors
    outputs: tuple[Key, ...]
    _node: Any
    _run: Callable

    def __call__(self, values: dict[Key, Any]) -> list:
        """Returns the outputs for `values`, computed on the operation's device in training mode."""
        tensors = self._node.input_tensors
        given = {id(tensor): values[key] for tensor, key in zip(tensors, self.inputs, strict=True)}
        args, kwargs = self._node.arguments.fill_in(given)
        operation = with_call_context(self.operation, training=True)
        return keras.tree.flatten(self._run(self.operation.name, operation, *args, **kwargs))

    def added_losses(self) -> list:
        """Returns the losses that the operation's layers added during the last call."""
        if not isinstance(self.operation, keras.layers.Layer):
            return []
        layers = self.operation._flatten_layers()
        return [loss for layer in layers for loss in layer._get_own_losses()]


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """The computation of one stage, numbered from 0."""

    number: int
    calls: tuple[OperationCall, ...]  # in the order of computation
    # tensor of an earlier stage or of the model's inputs -> device of its first use
    inputs: dict[Key, int]
    outputs: dict[Key, int]  # tensor that later stages or the model's outputs need -> its device

    @property
    def last_place(self) -> int:
        """Number of the device of the last call."""
        return self.calls[-1].place


@dataclasses.dataclass(frozen=True)
class CutModel:
    """A functional model as stages, in order, and its flat outputs."""

    graph: Functional
    stages: tuple[StageGraph, ...]
    outputs: tuple[Key, ...]

    def is_input(self, key: Key) -> bool:
        """Returns whether a tensor is an input of the model."""
        return key < len(self.graph.inputs)


@dataclasses.dataclass
class StagePass:
    """Tensors of a micro-batch's forward pass through a stage."""

    inputs: dict  # on the stage's devices
    masks: dict  # of the inputs; MultiHeadAttention detaches them from the tensors
    # tensor for later stages -> (its value, number of its device)
    sends: dict = dataclasses.field(default_factory=dict)
    outputs: list = dataclasses.field(default_factory=list)  # the model's; only for the last stage
    loss: tf.Tensor | None = None  # only for the last stage
    # (variable, its value before) for each variable that was written
    state: list = dataclasses.field(default_factory=list)

    @property
    def ends(self) -> list:
        """Tensors that are computed when the pass has finished."""
        return [self.loss, *(tensor for tensor, _ in self.sends.values())]


def copy_here(tensor):
    """Returns a copy of a tensor, with what Keras attaches, on the current device; or None."""
    if tensor is None:
        return None
    copy = tf.nest.map_structure(tf.identity, tensor, expand_composites=True)
    attached = attached_to(tensor) if isinstance(tensor, tf.Tensor) else {}
    return attach(copy, **tf.nest.map_structure(tf.identity, attached))


def cut(model: keras.Model, places: dict[str, int], layout: Layout) -> CutModel:
    """Returns the stages of a copy that `split` created, whose operations are placed.

    `places` is operation -> number of its device, as `places_by_name` returns; each stage has
    `layout.tensor` devices. Raises ValueError if a stage needs something from a later one.
    """
    graph = functional_graph(model)
    numbers = itertools.count()
    inputs = [next(numbers) for _ in graph.inputs]
    calls: list[OperationCall] = []
    outputs = _follow(graph, "", inputs, places, layout.tensor, numbers, calls)
    source = dict.fromkeys(inputs, -1)  # tensor -> its stage
    source.update((key, call.place // layout.tensor) for call in calls for key in call.outputs)
    needed: list[dict[Key, int]] = [{} for _ in range(layout.pipeline)]
    for call in calls:
        stage = call.place // layout.tensor
        for key in call.inputs:
            if source[key] > stage:
                raise ValueError(
                    f"{call.operation.name!r} on stage {stage} has an input from stage "
                    f"{source[key]}. Stages can only pass tensors to later stages"
                )
            if source[key] < stage:
                needed[stage].setdefault(key, call.place)
    by_stage = [
        tuple(call for call in calls if call.place // layout.tensor == stage)
        for stage in range(layout.pipeline)
    ]
    for key in outputs:  # the loss is computed at the end of the last stage
        if source[key] < layout.pipeline - 1:
            needed[-1].setdefault(key, by_stage[-1][-1].place)
    crossing = {key for keys in needed for key in keys} | set(outputs)
    stages = [
        StageGraph(
            stage,
            by_stage[stage],
            needed[stage],
            {
                key: call.place
                for call in by_stage[stage]
                for key in call.outputs
                if key in crossing
            },
        )
        for stage in range(layout.pipeline)
    ]
    return CutModel(graph, tuple(stages), tuple(outputs))


def _follow(graph, prefix, inputs, places, tensor, numbers, calls):
    """Adds the calls of a graph to `calls`; returns the keys of its outputs.

    `prefix` begins the graph's names in `places`, `inputs` are the keys of its inputs, and
    `numbers` is an iterator of new keys.
    """
    keys = {id(x): key for x, key in zip(graph.inputs, inputs, strict=True)}
    for node in nodes_of(graph):
        name, operation = prefix + node.operation.name, node.operation
        sources = tuple(keys[id(x)] for x in node.input_tensors)
        if is_nested(operation) and _is_on_several_stages(f"{name}/", places, tensor):
            inner = functional_graph(operation)
            results = _follow(inner, f"{name}/", sources, places, tensor, numbers, calls)
        else:
            results = tuple(next(numbers) for _ in node.outputs)
            call = OperationCall(operation, places[name], sources, results, node, graph.calls_on)
            calls.append(call)
        keys.update((id(x), key) for x, key in zip(node.outputs, results, strict=True))
    return tuple(keys[id(x)] for x in graph.outputs)


def _is_on_several_stages(prefix, places, tensor):
    return len({at // tensor for name, at in places.items() if name.startswith(prefix)}) > 1
