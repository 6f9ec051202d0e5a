"""Chooses the layers to divide over the devices of a stage, and how.

    divisions = choose_divisions(model, degree=4)
    divisions.how                        # {"block1_ffn_up": "column", "block1_ffn_down": "row", …}
    divisions.gathered                   # ["token_embedding"]: columns that are gathered

The largest layers are divided. As in Megatron-LM (Shoeybi et al., 2019, section 3), as many as
possible are paired: a column division, then a row division, with only elementwise layers between,
so that no features need be gathered. Each other layer is divided in the way that moves fewer bytes.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping

import keras

from kdist.parallel.placement import (
    functional_graph,
    is_nested,
    nodes_of,
    operations_by_name,
)
from kdist.parallel.tensor.activations import divided_outputs, is_per_feature
from kdist.parallel.tensor.divisibility import divided_parameters, possible_divisions
from kdist.planner.cost.split import MAX_WHOLE_FRACTION

# Weight, gradient and two slots, of 4 bytes each.
STATE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Divisions:
    """Divisions of the layers of a model, by names that include those of nested models."""

    degree: int = 1  # number of devices
    # layer -> "column", "row" or "heads"
    how: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stay: frozenset[str] = frozenset()  # operations whose output stays divided
    # layer -> bytes between its devices in a forward pass of one example
    exchanged_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # layer -> bytes of weights, gradients and two slots that its first device lacks
    saved_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def gathered(self) -> list[str]:
        """Layers divided by column whose output is gathered."""
        return [name for name, how in self.how.items() if how == "column" and name not in self.stay]

    def computed_fraction(self, name: str) -> float:
        """Returns the fraction of a layer, or of a layer in it, that one device computes."""
        divided = any(is_within(name, outer) for outer in (*self.how, *self.stay))
        return 1 / self.degree if divided else 1.0

    def kept_fraction(self, name: str) -> float:
        """Returns the maximum fraction of a layer's activations that the first device keeps."""
        by_heads = [name for name, how in self.how.items() if how == "heads"]
        divided = any(is_within(name, outer) for outer in (*by_heads, *self.stay))
        return 1 / self.degree if divided else 1.0


def is_within(name: str, outer: str) -> bool:
    """Returns whether a layer is `outer` or a layer in it."""
    return name == outer or name.startswith(f"{outer}/")


def choose_divisions(
    model: keras.Model, degree: int, stages: Mapping[str, int] | None = None
) -> Divisions:
    """Returns the divisions of a built model's largest layers over `degree` devices.

    `stages` is operation -> number of its stage, None if all are on one. Tensors that cross stages
    are gathered. Raises ValueError if no layer can be divided over that many devices.
    """
    layers = operations_by_name(model)
    ways = {name: possible_divisions(name, each, degree) for name, each in layers.items()}
    large = _largest(
        {name: _state_parameters(layers[name], how[0]) for name, how in ways.items() if how}
    )
    if not large:
        raise ValueError(
            f"{model.name!r} has no layer whose weights tensor={degree} could divide. Use Dense, "
            f"Conv, Embedding or MultiHeadAttention layers with sizes that {degree} divides, or "
            "remove tensor"
        )
    how: dict[str, str] = {}
    stay: set[str] = set()
    exchanged: dict[str, float] = {}
    for prefix, graph in _graphs(functional_graph(model), ""):
        divided = _Graph(prefix, graph, ways, stages, degree)
        divided.divide(large)
        how.update(divided.how)
        stay |= divided.stay()
        exchanged.update(divided.exchanged_bytes())
    saved = {
        name: STATE_BYTES * _state_parameters(layers[name], each) * (1 - 1 / degree)
        for name, each in how.items()
    }
    return Divisions(degree, how, frozenset(stay), exchanged, saved)


def _graphs(graph, prefix):
    """Yields (prefix of its names, graph) for a graph and those nested in it."""
    yield prefix, graph
    for operation in dict.fromkeys(node.operation for node in nodes_of(graph)):
        if is_nested(operation):
            yield from _graphs(functional_graph(operation), f"{prefix}{operation.name}/")


def _state_parameters(layer, how):
    """Returns the divided parameters; frozen ones count a quarter, without gradient and slots."""
    share = 1.0 if layer.trainable else 0.25
    return share * divided_parameters(layer, how)


def _largest(sizes):
    """Returns the names of the largest layers, which hold nearly everything, with all ties."""
    left, least = sum(sizes.values()) * (1 - MAX_WHOLE_FRACTION), math.inf
    for size in sorted(sizes.values(), reverse=True):
        if left <= 0 or not size:
            break
        left, least = left - size, size
    return {name for name, size in sizes.items() if size >= least}


class _Graph:
    """The operations of one graph, and their divisions over `degree` devices.

    `prefix` begins the graph's names, `ways` is operation -> possible divisions, and `stages`
    operation -> number of its stage, None for one stage.
    """

    def __init__(self, prefix, graph, ways, stages, degree):
        self._prefix, self._graph, self._ways = prefix, graph, ways
        self._degree = degree
        self._nodes = {prefix + node.operation.name: node for node in nodes_of(graph)}
        self._stages = dict.fromkeys(self._nodes, 0) if stages is None else stages
        self._consumers = collections.defaultdict(list)
        for node in nodes_of(graph):
            for source in self._sources(node):
                self._consumers[source].append(prefix + node.operation.name)
        self.how: dict[str, str] = {}

    def divide(self, large):
        """Divides the layers in `large`, and small ones where that avoids a gather."""
        for name in self._nodes:
            if name in large and name not in self.how:
                self.how.update(self._columns_and_rows(name, large))
        for name in self._nodes:
            if name in large and name not in self.how:
                self.how[name] = min(
                    self._ways[name], key=lambda how: (self._moved(name, how), how == "column")
                )

    def stay(self, how=None):
        """Returns the operations whose output stays divided."""
        own = {name.removeprefix(self._prefix): each for name, each in (how or self.how).items()}
        stages = {name.removeprefix(self._prefix): self._stages[name] for name in self._nodes}
        nodes = list(nodes_of(self._graph))
        divided = divided_outputs(nodes, self._graph.outputs, own, stages)
        return {self._prefix + name for name in divided}

    def exchanged_bytes(self):
        """Returns, per layer, the bytes between its devices in a forward pass of one example."""
        stay = self.stay()
        return {name: self._moved(name, how, stay) for name, how in self.how.items()}

    def _sources(self, node):
        names = (tensor._keras_history.operation.name for tensor in node.input_tensors)
        return [self._prefix + name for name in names]

    def _columns_and_rows(self, first, large):
        """Returns {layer: division} from a column to its rows; {} if a gather would be needed."""
        found: dict[str, str] = {}
        waiting = [first]  # operations with divided outputs
        seen = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if not is_per_feature(self._nodes[name].operation):
                if not self._can_be(name, "column", found) or name not in large:
                    return {}
                found[name] = "column"
            else:
                sources = self._sources(self._nodes[name])
                if any(source not in self._nodes for source in sources):  # the graph's inputs
                    return {}
                waiting += sources
            for consumer in self._consumers[name]:
                if is_per_feature(self._nodes[consumer].operation):
                    waiting.append(consumer)
                elif self._can_be(consumer, "row", found):
                    found[consumer] = "row"
                else:
                    return {}
        stay = self.stay({**self.how, **found})
        return found if all(how == "row" or name in stay for name, how in found.items()) else {}

    def _can_be(self, name, how, found):
        decided = self.how.get(name, found.get(name, how))
        return how in self._ways[name] and decided == how

    def _moved(self, name, how, stay=frozenset()):
        """Returns the bytes of one example to and from the first device, which holds the whole."""
        node, others = self._nodes[name], self._degree - 1
        # A tensor counts once, even if it is queries, keys and values at the same time.
        tensors = {id(tensor): tensor for tensor in node.input_tensors}.values()
        inputs = sum(tensor_bytes(tensor) for tensor in tensors) * others
        outputs = sum(map(tensor_bytes, node.outputs)) * others
        if how == "row":
            is_divided = stay.issuperset(self._sources(node))
            return (0 if is_divided else inputs / self._degree) + outputs
        if how == "column":
            return inputs + (0 if name in stay else outputs / self._degree)
        return inputs + outputs


def tensor_bytes(tensor) -> int:
    """Returns a tensor's bytes per example in float32; an unknown axis counts as one."""
    return 4 * math.prod(size or 1 for size in tensor.shape[1:])
