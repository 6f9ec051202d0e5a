"""Replicas that divide training state (ZeRO): what each device holds, sends, and updates.

    layout = Layout(data=4, shard="optimizer")
    parts = divide_state(known_workload("resnet50"), layout, number_bytes=4)
    parts.updated        # numbers that one device updates: about a quarter of all

Rules and sizes of parts are those of `kdist.training.sharding.sizes`. Traffic: Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (arXiv:1910.02054),
section 7.
"""

import dataclasses
import math

from kdist.layout import Layout
from kdist.planner.workload.layers import Workload
from kdist.training.sharding.sizes import PartSizes, gathered_bytes, is_large


@dataclasses.dataclass(frozen=True)
class DividedState:
    """Trained numbers of a model whose replicas divide training state.

    Attributes:
        shard: What is divided, as in `Layout`.
        trained: Numbers in all trained weights.
        divided: Numbers in the weights that are divided.
        own: Numbers in one replica's parts of these, with padding.
        gathered: Numbers of divided weights that a step gathers and holds at a time.
        own_of_layers: Numbers of each layer that one replica updates, in the order of the layers.
    """

    shard: str
    trained: float
    divided: float
    own: float
    gathered: float
    own_of_layers: tuple[float, ...] = dataclasses.field(hash=False)

    @property
    def small(self) -> float:
        """Numbers in the trained weights that stay whole on each device."""
        return self.trained - self.divided

    @property
    def updated(self) -> float:
        """Numbers that one replica updates."""
        return self.small + self.own

    @property
    def divides_gradients(self) -> bool:
        """True if micro-steps add up parts of gradients."""
        return self.shard != "optimizer"

    @property
    def divides_weights(self) -> bool:
        """True if no device holds all weights."""
        return self.shard == "weights"

    def transfers(self, accumulate: int) -> int:
        """Returns how often the divided weights or their gradients are sent in an update.

        Each time, a device sends and receives (N - 1) / N of their bytes. An all-reduce counts as
        two. `"optimizer"` reduce-scatters gradients and gathers weights once. `"gradients"`
        reduce-scatters in each micro-step. `"weights"` gathers twice in each micro-step, too.
        Nodes of several devices do all of that within, and exchange the sums in an all-reduce of
        their own.
        """
        if self.divides_weights:
            return 3 * accumulate
        return 1 + (accumulate if self.divides_gradients else 1)

    def exchanged_share(self, accumulate: int) -> float:
        """Returns the traffic of an update, relative to an all-reduce of all gradients."""
        return (self.small + self.divided * self.transfers(accumulate) / 2) / self.trained

    def merges(self, accumulate: int) -> float:
        """Returns how often a micro-step merges the parts of divided weights, on average."""
        return 2 if self.divides_weights else 1 / accumulate


def undividable_tables(
    workload: Workload, layout: Layout, number_bytes: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns layer and shape of large looked-up tables whose rows have no equal parts.

    Training refuses to divide them. The arguments are those of `divide_state`.
    """
    return [
        (layer.name, shape)
        for layer in workload.layers
        if layer.is_table
        for shape in layer.trained_shapes
        if is_large(shape, number_bytes, layout.num_parts, layout.min_shard_bytes)
        and len(shape) > 1
        and not PartSizes(shape, layout.num_parts).is_by_rows
    ]


def divide_state(workload: Workload, layout: Layout, number_bytes: int) -> DividedState | None:
    """Returns the trained numbers of a device; None if the replicas divide nothing.

    Args:
        workload: Work of the whole model.
        layout: Degrees of parallelism.
        number_bytes: Bytes of one weight.

    Raises:
        ValueError: If training refuses to divide a table of which rows are looked up.
    """
    if layout.shard is None or layout.data == 1:
        return None
    for name, (rows, *others) in undividable_tables(workload, layout, number_bytes):
        size = rows * math.prod(others) * number_bytes
        raise ValueError(
            f"{name} has {rows} rows, which are looked up, and which {layout.num_parts} devices "
            f"cannot divide evenly; keep it whole by min_shard_bytes={size + 1}"
        )
    divided: list[tuple[int, ...]] = []
    own_of_layers = []
    own = 0
    for layer in workload.layers:
        large = [
            shape
            for shape in layer.trained_shapes
            if is_large(shape, number_bytes, layout.num_parts, layout.min_shard_bytes)
        ]
        parts = sum(math.prod(PartSizes(shape, layout.num_parts).part_shape) for shape in large)
        own_of_layers.append(layer.trainable_parameters - sum(map(math.prod, large)) + parts)
        own += parts
        divided += large
    return DividedState(
        shard=layout.shard,
        trained=workload.trainable_parameters,
        divided=float(sum(map(math.prod, divided))),
        own=float(own),
        gathered=float(gathered_bytes((shape, 1) for shape in divided)),
        own_of_layers=tuple(own_of_layers),
    )
