"""Which layers are worth dividing over the devices of a stage, and how.

    divisions = chosen_divisions(model, degree=4)
    divisions.how                        # {"block1_ffn_up": "column", "block1_ffn_down": "row", …}
    divisions.gathered                   # ["token_embedding"]: columns that are joined

The largest layers are. As many of them as can be are put together as Megatron-LM does (Shoeybi et
al., 2019, section 3): columns, then rows, with nothing but elementwise layers between, where no
features need be gathered. Of the others each is divided in the way that moves fewer bytes.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping

import keras

from kdist.parallel.split_plan import (
    functional_graph,
    is_nested,
    nodes_of,
    operations_by_name,
)
from kdist.parallel.tensor.activations import stay_divided
from kdist.parallel.tensor.checks import divided_numbers, possible_divisions
from kdist.parallel.tensor.elementwise import is_by_feature

# Layers are divided, the largest first, until the others hold no more than this of what could be.
_LEFT_WHOLE = 0.05
# Weights, gradients and two slots, of 4 bytes each.
STATE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Divisions:
    """How the layers of a model are divided, all by their names with those of nested models.

    Attributes:
        degree: over how many devices.
        how: layer -> "column", "row" or "heads".
        stay: operations whose output stays divided.
        meeting_bytes: layer -> what its devices send each other in a forward pass, for one example.
        spared_bytes: layer -> of its weights, their gradients and two slots, what its first device
            does not hold.
    """

    degree: int = 1
    how: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stay: frozenset[str] = frozenset()
    meeting_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    spared_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def gathered(self) -> list[str]:
        """Layers that are divided by column, and whose parts of an output are joined."""
        return [name for name, how in self.how.items() if how == "column" and name not in self.stay]

    def computed_share(self, name: str) -> float:
        """What one device computes of a layer, or of one within it."""
        divided = any(is_within(name, outer) for outer in (*self.how, *self.stay))
        return 1 / self.degree if divided else 1.0

    def kept_share(self, name: str) -> float:
        """What the first device keeps, at most, of a layer's activations, or of one within it."""
        in_parts = [name for name, how in self.how.items() if how == "heads"]
        divided = any(is_within(name, outer) for outer in (*in_parts, *self.stay))
        return 1 / self.degree if divided else 1.0


def is_within(name: str, outer: str) -> bool:
    """Whether a layer is `outer`, or in it."""
    return name == outer or name.startswith(f"{outer}/")


def chosen_divisions(
    model: keras.Model, degree: int, stages: Mapping[str, int] | None = None
) -> Divisions:
    """The layers of a model that are divided.

    Args:
        model: functional or Sequential, built.
        degree: over how many devices.
        stages: operation -> number of its stage; what crosses from stage to stage is gathered.
            None: all are on one.

    Raises:
        ValueError: there is no layer whose weights could be divided so.
    """
    layers = operations_by_name(model)
    ways = {name: possible_divisions(name, each, degree) for name, each in layers.items()}
    large = _large({name: _numbers(layers[name], how[0]) for name, how in ways.items() if how})
    if not large:
        raise ValueError(
            f"{model.name!r} has no layer whose weights tensor={degree} could divide: take Dense, "
            f"Conv, Embedding or MultiHeadAttention layers of sizes that {degree} divides, or "
            "leave tensor out"
        )
    how: dict[str, str] = {}
    stay: set[str] = set()
    meeting: dict[str, float] = {}
    for prefix, graph in _graphs(functional_graph(model), ""):
        divided = _Graph(prefix, graph, ways, stages, degree)
        divided.divide(large)
        how.update(divided.how)
        stay |= divided.stay()
        meeting.update(divided.meeting_bytes())
    spared = {
        name: STATE_BYTES * _numbers(layers[name], each) * (1 - 1 / degree)
        for name, each in how.items()
    }
    return Divisions(degree, how, frozenset(stay), meeting, spared)


def _graphs(graph, prefix):
    """(prefix of its names, graph) of a graph and those nested in it."""
    yield prefix, graph
    for operation in dict.fromkeys(node.operation for node in nodes_of(graph)):
        if is_nested(operation):
            yield from _graphs(functional_graph(operation), f"{prefix}{operation.name}/")


def _numbers(layer, how):
    """Of the numbers in its weights, slots and gradients that are divided, those in weights."""
    share = 1.0 if layer.trainable else 0.25
    return share * divided_numbers(layer, how)


def _large(sizes):
    """The names of the largest, which hold nearly all; those of one size go together."""
    left, least = sum(sizes.values()) * (1 - _LEFT_WHOLE), math.inf
    for size in sorted(sizes.values(), reverse=True):
        if left <= 0 or not size:
            break
        left, least = left - size, size
    return {name for name, size in sizes.items() if size >= least}


class _Graph:
    """The operations of one graph, and how they are divided.

    Args:
        prefix: of its names.
        graph: the graph.
        ways: operation -> how it can be divided.
        stages: operation -> number of its stage; None for one stage.
        degree: over how many devices.
    """

    def __init__(self, prefix, graph, ways, stages, degree):
        self._prefix, self._graph, self._ways = prefix, graph, ways
        self._degree = degree
        self._nodes = {prefix + node.operation.name: node for node in nodes_of(graph)}
        self._stages = dict.fromkeys(self._nodes, 0) if stages is None else stages
        self._takers = collections.defaultdict(list)  # of each operation's outputs
        for node in nodes_of(graph):
            for source in self._sources(node):
                self._takers[source].append(prefix + node.operation.name)
        self.how: dict[str, str] = {}

    def divide(self, large):
        """Divides those of `large`, and small ones where that spares a gather."""
        for name in self._nodes:
            if name in large and name not in self.how:
                self.how.update(self._columns_and_rows(name, large))
        for name in self._nodes:
            if name in large and name not in self.how:
                self.how[name] = min(
                    self._ways[name], key=lambda how: (self._moved(name, how), how == "column")
                )

    def stay(self, how=None):
        """The operations whose output stays divided."""
        own = {name.removeprefix(self._prefix): each for name, each in (how or self.how).items()}
        stages = {name.removeprefix(self._prefix): self._stages[name] for name in self._nodes}
        nodes = list(nodes_of(self._graph))
        return {
            self._prefix + name for name in stay_divided(nodes, self._graph.outputs, own, stages)
        }

    def meeting_bytes(self):
        """Of each layer, what its devices send each other in a forward pass, for one example."""
        stay = self.stay()
        return {name: self._moved(name, how, stay) for name, how in self.how.items()}

    def _sources(self, node):
        names = (tensor._keras_history.operation.name for tensor in node.input_tensors)
        return [self._prefix + name for name in names]

    def _columns_and_rows(self, first, large):
        """Layers between which all stays divided, how each is, from a column on; {} if none are."""
        found: dict[str, str] = {}
        waiting = [first]  # what gives divided features
        given = set()
        while waiting:
            name = waiting.pop()
            if name in given:
                continue
            given.add(name)
            if not is_by_feature(self._nodes[name].operation):
                if not self._can_be(name, "column", found) or name not in large:
                    return {}
                found[name] = "column"
            else:
                sources = self._sources(self._nodes[name])
                if any(source not in self._nodes for source in sources):  # the graph's inputs
                    return {}
                waiting += sources
            for taker in self._takers[name]:
                if is_by_feature(self._nodes[taker].operation):
                    waiting.append(taker)
                elif self._can_be(taker, "row", found):
                    found[taker] = "row"
                else:
                    return {}
        stay = self.stay({**self.how, **found})
        return found if all(how == "row" or name in stay for name, how in found.items()) else {}

    def _can_be(self, name, how, found):
        decided = self.how.get(name, found.get(name, how))
        return how in self._ways[name] and decided == how

    def _moved(self, name, how, stay=frozenset()):
        """Bytes of one example that go from and to the first device, which has what is whole."""
        node, others = self._nodes[name], self._degree - 1
        # Once, where it is queries, keys and values at the same time.
        tensors = {id(tensor): tensor for tensor in node.input_tensors}.values()
        taken = sum(bytes_of(tensor) for tensor in tensors) * others
        given = sum(map(bytes_of, node.outputs)) * others
        if how == "row":
            is_divided = stay.issuperset(self._sources(node))
            return (0 if is_divided else taken / self._degree) + given
        if how == "column":
            return taken + (0 if name in stay else given / self._degree)
        return taken + given


def bytes_of(tensor) -> int:
    """Of one example's part of a tensor, at 4 bytes a number; an open axis counts as one."""
    return 4 * math.prod(size or 1 for size in tensor.shape[1:])
