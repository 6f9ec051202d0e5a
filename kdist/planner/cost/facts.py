"""What the equations of an update need to know, as numbers, or as arrays of many set-ups."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kdist.planner.cost.setup import Gradients, InputWork, Setup


@dataclasses.dataclass(frozen=True)
class Facts:
    """Numbers, or arrays of them, that the time of an update depends on.

    Flags are 1.0 or 0.0. Names are those of `Setup`, `Gradients`, `InputWork` and `Machine`.
    """

    devices: Any
    devices_in_node: Any
    gpus_per_node: Any
    nodes: Any
    slowest_node: Any
    local_batch: Any
    accumulate: Any
    local_steps: Any
    servers: Any
    on_host: Any
    on_devices: Any
    on_servers: Any
    asynchronous: Any
    horovod: Any
    in_graph: Any
    nccl1: Any
    overlap: Any
    gradient_bytes: Any
    weight_bytes: Any
    largest_share: Any
    tensors: Any
    source_megapixels: Any
    model_megapixels: Any
    policy: Any
    masks: Any
    bytes_to_device: Any
    input_threads: Any
    decoded: Any
    dali: Any
    numpy: Any
    nvlink: Any
    cube_mesh: Any
    direct: Any
    paired_dies: Any
    ring_bytes_per_s: Any
    pcie_bytes_per_s: Any
    network_bytes_per_s: Any
    cores: Any
    vcpus: Any
    recent_host: Any

    @property
    def node_examples(self):
        """Examples of one update that a node has to prepare."""
        return self.devices_in_node * self.local_batch * self.accumulate


_OF_MACHINE = (
    "gpus_per_node",
    "nvlink",
    "cube_mesh",
    "direct",
    "paired_dies",
    "ring_bytes_per_s",
    "pcie_bytes_per_s",
    "network_bytes_per_s",
    "cores",
    "vcpus",
)
_OF_SETUP = (
    "devices",
    "devices_in_node",
    "nodes",
    "slowest_node",
    "local_batch",
    "accumulate",
    "local_steps",
    "servers",
    "asynchronous",
    "in_graph",
    "nccl1",
    "overlap",
)
_OF_INPUT = ("source_megapixels", "model_megapixels", "policy", "masks", "bytes_to_device")


def facts_of(setup: Setup, gradients: Gradients, input_work: InputWork) -> Facts:
    """The facts of one set-up."""
    machine, work = setup.machine, input_work
    weights = gradients.bytes if gradients.weight_bytes is None else gradients.weight_bytes
    return Facts(
        **{name: float(getattr(machine, name)) for name in _OF_MACHINE},
        **{name: float(getattr(setup, name)) for name in _OF_SETUP},
        **{name: float(getattr(work, name)) for name in _OF_INPUT},
        on_host=float(setup.update == "server_on_host"),
        on_devices=float(setup.update == "server_on_devices"),
        on_servers=float(setup.update == "parameter_servers"),
        horovod=float(setup.library == "horovod"),
        gradient_bytes=float(gradients.bytes),
        weight_bytes=float(weights),
        largest_share=float(gradients.largest_share),
        tensors=float(gradients.tensors),
        input_threads=float(work.threads or np.inf),
        decoded=float(work.decoder in ("tf.data", "dali")),
        dali=float(work.decoder == "dali"),
        numpy=float(work.decoder == "numpy"),
        recent_host=float(machine.pcie_generation >= 4),
    )


def stack(facts: Sequence[Facts]) -> Facts:
    """Arrays of the facts of many set-ups."""
    names = [field.name for field in dataclasses.fields(Facts)]
    return Facts(**{name: np.array([getattr(one, name) for one in facts]) for name in names})
