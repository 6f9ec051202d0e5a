"""What the operations of a model cost, and what of it falls to a device that has a part of them.

    work = ModelWork(model)
    work.pieces()                                            # each operation whole
    work.pieces(chosen_divisions(model, degree=4))           # some divided over four devices

Seconds are computed (`kdist.planner.read_workload`) for a device whose arithmetic, memory and links
are in the proportions of a V100 with NVLink, and only these proportions matter; or they are given,
as `kdist.parallel.measure_costs` measures them.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping

import keras

from kdist.parallel.dividing import Divisions, bytes_of, is_within
from kdist.parallel.split_plan import functional_graph, nodes_of
from kdist.planner.reading import read_workload
from kdist.training.together import in_another_thread

# Of a V100: https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf
_FLOPS_PER_SECOND = 15.7e12
BYTES_PER_SECOND = 900e9
LINK_BYTES_PER_SECOND = 25e9  # one NVLink, one way


@dataclasses.dataclass(frozen=True)
class Piece:
    """An operation of a model, as a plan places it.

    Of one whose weights are divided, all is what the first of its devices does and holds: none has
    more.

    Attributes:
        name: of the operation.
        seconds: forward and backward, for one example.
        state_bytes: of its weights, their gradients and two slots.
        kept_bytes: that its forward pass leaves for the backward pass, for one example.
        out_bytes: of what it hands on, for one example.
        sources: numbers of the pieces that it takes something from; of a layer that is called
            again, also of later ones.
    """

    name: str
    seconds: float
    state_bytes: float
    kept_bytes: float
    out_bytes: float
    sources: tuple[int, ...]


class ModelWork:
    """The work of a model, operation by operation; nested models are one.

    Args:
        model: functional or Sequential, built.
        costs: seconds of each operation, forward and backward, for one example; None to compute
            them.

    Attributes:
        model: the same.

    Raises:
        ValueError: `costs` lacks an operation of the model.
    """

    def __init__(self, model: keras.Model, costs: Mapping[str, float] | None = None):
        self.model = model
        # It is the work of one replica, also where this is called in the scope of a strategy.
        workload = in_another_thread(functools.partial(read_workload, model))
        prefix = f"{model.name}/" if isinstance(model, keras.Sequential) else ""
        self._works = collections.defaultdict(list)  # of each operation, with what is nested in it
        for layer in workload.layers:
            name = layer.name.removeprefix(prefix)
            self._works[name.partition("/")[0]].append(dataclasses.replace(layer, name=name))
        self._costs = costs
        self._check_costs()

    def _check_costs(self):
        names = [node.operation.name for node in nodes_of(functional_graph(self.model))]
        missing = [] if self._costs is None else [n for n in names if n not in self._costs]
        if missing:
            raise ValueError(
                f"costs says nothing of {', '.join(missing[:3])}: give the seconds of each "
                "operation of the model, as kdist.parallel.measure_costs(model) does"
            )

    def pieces(self, divisions: Divisions | None = None) -> list[Piece]:
        """The operations in the order in which they are computed.

        Args:
            divisions: of layers; None: all are whole.
        """
        divisions = divisions or Divisions()
        numbers: dict[int, int] = {}
        made: dict[int, int] = {}  # tensor -> the piece that hands it on
        pieces: list[Piece] = []
        for node in nodes_of(functional_graph(self.model)):
            sources = {made[id(tensor)] for tensor in node.input_tensors if id(tensor) in made}
            number = numbers.setdefault(id(node.operation), len(pieces))
            if number == len(pieces):
                pieces.append(self._piece(node, tuple(sorted(sources)), divisions))
            else:
                both = tuple(sorted({*pieces[number].sources, *sources}))
                pieces[number] = dataclasses.replace(pieces[number], sources=both)
            made.update({id(tensor): number for tensor in node.outputs})
        return pieces

    def _piece(self, node, sources, divisions):
        name = node.operation.name
        works = self._works[name]
        state = sum(4 * work.parameters + 12 * work.trainable_parameters for work in works)
        meeting = 2 * _sum_within(divisions.meeting_bytes, name)  # forward and back
        return Piece(
            name,
            self._seconds(name, divisions) + meeting / LINK_BYTES_PER_SECOND,
            state - _sum_within(divisions.spared_bytes, name),
            sum(work.kept_bytes * divisions.kept_share(work.name) for work in works),
            sum(map(bytes_of, node.outputs)),
            sources,
        )

    def _seconds(self, name, divisions):
        """What one device computes."""
        whole = [_seconds(work) for work in self._works[name]]
        shares = [divisions.computed_share(work.name) for work in self._works[name]]
        seconds = sum(each * share for each, share in zip(whole, shares, strict=True))
        if self._costs is None:
            return seconds
        # Of nested models only the sum is measured.
        return self._costs[name] * (seconds / sum(whole) if sum(whole) else 1.0)


def _seconds(work):
    flops = work.forward_flops + work.backward_flops
    return flops / _FLOPS_PER_SECOND + work.moved_bytes / BYTES_PER_SECOND


def _sum_within(by_layer, name):
    return sum(size for layer, size in by_layer.items() if is_within(layer, name))
