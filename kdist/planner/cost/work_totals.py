"""A workload's layers added up by kind: all that the time of a step depends on."""

import dataclasses
import functools

from kdist.planner.workload import Workload

KINDS = ("convolution", "depthwise", "matmul", "elementwise")


@dataclasses.dataclass(frozen=True)
class KindTotals:
    """All layers of one kind, for one example.

    Attributes:
        kind: as `LayerWork.kind`.
        layers: how many.
        flops: of both passes.
        moved_bytes: by both passes, in float32.
    """

    kind: str
    layers: int
    flops: float
    moved_bytes: float


@dataclasses.dataclass(frozen=True)
class WorkTotals:
    """A workload, for one example.

    Attributes:
        kinds: those that it has.
        parameters: numbers in its weights.
        training_flops: of all layers in both passes.
        proposes_regions: whether it is a two-stage detector, that picks regions without arithmetic
            that counts.
    """

    kinds: tuple[KindTotals, ...]
    parameters: float
    training_flops: float
    proposes_regions: bool

    @property
    def layers(self) -> int:
        """How many there are."""
        return sum(kind.layers for kind in self.kinds)


@functools.lru_cache(maxsize=256)
def work_totals(workload: Workload) -> WorkTotals:
    """The workload's layers, added up."""
    found = []
    for kind in KINDS:
        layers = [layer for layer in workload.layers if layer.kind == kind]
        if layers:
            flops = sum(layer.forward_flops + layer.backward_flops for layer in layers)
            moved = sum(layer.moved_bytes for layer in layers)
            found.append(KindTotals(kind, len(layers), flops, moved))
    regions = any(kind.startswith("NonMaxSuppression") for kind in workload.uncounted)
    return WorkTotals(tuple(found), workload.parameters, workload.training_flops, regions)
