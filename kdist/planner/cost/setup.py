"""Setup: what is trained, on which devices, and how they share the work of an update."""

import dataclasses
import math
import statistics
import types
from collections.abc import Sequence

from kdist.planner.tables.machines import Machine

UPDATES = ("all_reduce", "server_on_host", "server_on_devices", "parameter_servers")
DECODERS = ("tf.data", "dali", "none", "numpy")
LIBRARIES = ("tf.distribute", "horovod", "ddp")
BYTES_PER_PIXEL = 12  # three channels of float32


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients and weights that devices exchange.

    Attributes:
        bytes: Bytes of all gradients of one replica, in the precision of the exchange.
        largest_share: Fraction of `bytes` in the largest tensor.
        tensors: Number of tensors.
        weight_bytes: Bytes of the weights, which a parameter server sends back. `None`, the
            default, means `bytes`.
        bytes_between_nodes: Bytes that nodes exchange with each other. `None`, the default, means
            `bytes`.

    Raises:
        ValueError: If a size is negative, or a share is not between 0 and 1.
    """

    bytes: float
    largest_share: float = 0.1
    tensors: int = 200
    weight_bytes: float | None = None
    bytes_between_nodes: float | None = None

    def __post_init__(self):
        sizes = self.bytes, self.weight_bytes or 0, self.bytes_between_nodes or 0, self.tensors
        _check_sizes(self, *sizes)
        if not 0 <= self.largest_share <= 1:
            raise ValueError(f"largest_share is from 0 to 1, not {self.largest_share}")


@dataclasses.dataclass(frozen=True)
class InputWork:
    """Work of the host for one example.

    Example:

        >>> work = InputWork(source_megapixels=0.19, model_megapixels=0.05, decoder="tf.data")
        >>> work.bytes_to_device
        600000.0

    Args:
        source_megapixels: Size of the JPEG to decode in 10⁶ pixels. Defaults to 0: nothing is
            decoded.
        model_megapixels: Size of the model's input image in 10⁶ pixels. Defaults to 0.
        policy: Whether an augmentation policy (AutoAugment, RandAugment) is applied. Defaults to
            `False`.
        masks: Whether instance masks are decoded and resized. Defaults to `False`.
        host_bytes: Bytes that the host sends to a device. Defaults to the float32 pixels of the
            model's image with the decoders `"tf.data"` and `"numpy"`, else to nothing.
        decoder: `"tf.data"`, `"dali"` (mostly on the devices), `"numpy"` (arrays fed by one Python
            thread), or `"none"`, the default.
        threads: Threads that prepare examples: 1 if `Dataset.map` has no `num_parallel_calls`.
            Defaults to `None`, one thread per core.

    Raises:
        ValueError: If a size is negative or the decoder is unknown.
    """

    source_megapixels: float = 0.0
    model_megapixels: float = 0.0
    policy: bool = False
    masks: bool = False
    host_bytes: float = 0.0
    decoder: str = "none"
    threads: int | None = None

    def __post_init__(self):
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is 1 or more, or None for all cores, not {self.threads}")
        _check_sizes(self, self.source_megapixels, self.model_megapixels, self.host_bytes)
        _check_known("decoder", self.decoder, DECODERS)

    @property
    def bytes_to_device(self) -> float:
        """Bytes of one example that go from the host's memory to a device."""
        if self.host_bytes or self.decoder not in ("tf.data", "numpy"):
            return self.host_bytes
        return self.model_megapixels * 1e6 * BYTES_PER_PIXEL


@dataclasses.dataclass(frozen=True)
class Setup:
    """Devices on machines of one kind, and how they share the work of an update.

    Attributes:
        machine: Kind of all nodes.
        devices: Number of devices. More than one node's are spread over full nodes.
        local_batch: Examples per device and micro-step.
        accumulate: Micro-steps whose gradients are added before an update.
        local_steps: Updates of a device between two exchanges.
        update: `"all_reduce"`; `"server_on_host"`, variables on the CPU of the node;
            `"server_on_devices"`, each variable on one of the devices; `"parameter_servers"`,
            variables spread over `servers` other hosts.
        servers: Number of parameter servers.
        asynchronous: Whether workers do not wait for each other, with `"parameter_servers"`.
        library: `"tf.distribute"`; `"horovod"` or `"ddp"`, with one process per device.
        in_graph: Whether one process feeds all devices of a node.
        nccl1: Whether the all-reduce is NCCL's before version 2 (2017).
        overlap: Fraction of a micro-step that can hide the exchange. TensorFlow's all-reduce after
            the backward pass hides nothing.

    Raises:
        ValueError: If a number is out of range or a name is unknown.
    """

    machine: Machine
    devices: int
    local_batch: float
    accumulate: int = 1
    local_steps: int = 1
    update: str = "all_reduce"
    servers: int = 1
    asynchronous: bool = False
    library: str = "tf.distribute"
    in_graph: bool = True
    nccl1: bool = False
    overlap: float = 0.0

    def __post_init__(self):
        for name in ("devices", "accumulate", "local_steps", "servers"):
            value = getattr(self, name)
            if not (value >= 1 and float(value).is_integer()):
                raise ValueError(f"{name} is a whole number from 1 on, not {value}")
        if not 0 < self.local_batch < math.inf:
            raise ValueError(f"local_batch is above 0, not {self.local_batch}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap is from 0 to 1, not {self.overlap}")
        _check_known("update", self.update, UPDATES)
        _check_known("library", self.library, LIBRARIES)
        if self.asynchronous and self.update != "parameter_servers":
            raise ValueError(f'asynchronous needs update="parameter_servers", not {self.update!r}')

    @property
    def examples(self) -> float:
        """Examples of one update of all devices."""
        return self.local_batch * self.accumulate * self.devices

    @property
    def devices_in_node(self) -> int:
        """Number of devices used on each node."""
        return min(self.devices, self.machine.gpus_per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.devices / self.machine.gpus_per_node)

    @property
    def slowest_node(self) -> float:
        """Standard deviations by which the slowest node is behind the average one.

        This is the expected maximum of normally distributed numbers (Blom, "Statistical estimates
        and transformed beta-variables", 1958): 0 of one, 0.59 of 2, 1.4 of 8, 2.8 of 256.
        """
        return statistics.NormalDist().inv_cdf((self.nodes - 0.375) / (self.nodes + 0.25))


class CostFeatures(types.SimpleNamespace):
    """Inputs of the equations in `cost/update.py`: numbers, or arrays for many setups.

    Flags are 1.0 or 0.0. `make_features` defines the names, which are those of `Setup`,
    `Gradients`, `InputWork`, and `Machine`.
    """

    @property
    def node_examples(self):
        """Examples of one update that a node prepares."""
        return self.devices_in_node * self.local_batch * self.accumulate


# Features that are attributes of the same name.
_MACHINE_FEATURES = (
    "gpus_per_node nvlink cube_mesh direct paired_dies ring_bytes_per_s pcie_bytes_per_s "
    "network_bytes_per_s cores vcpus"
)
_SETUP_FEATURES = (
    "devices devices_in_node nodes slowest_node local_batch accumulate local_steps servers "
    "asynchronous in_graph nccl1 overlap"
)
_INPUT_FEATURES = "source_megapixels model_megapixels policy masks bytes_to_device"


def make_features(setup: Setup, gradients: Gradients, input_work: InputWork) -> CostFeatures:
    """Returns the features of one setup."""
    machine, work = setup.machine, input_work
    weights, between = (
        gradients.bytes if size is None else size
        for size in (gradients.weight_bytes, gradients.bytes_between_nodes)
    )
    return CostFeatures(
        **{name: float(getattr(machine, name)) for name in _MACHINE_FEATURES.split()},
        **{name: float(getattr(setup, name)) for name in _SETUP_FEATURES.split()},
        **{name: float(getattr(work, name)) for name in _INPUT_FEATURES.split()},
        on_host=float(setup.update == "server_on_host"),
        on_devices=float(setup.update == "server_on_devices"),
        on_servers=float(setup.update == "parameter_servers"),
        horovod=float(setup.library == "horovod"),
        gradient_bytes=float(gradients.bytes),
        weight_bytes=float(weights),
        bytes_between_nodes=float(between),
        largest_share=float(gradients.largest_share),
        tensors=float(gradients.tensors),
        input_threads=float(work.threads or math.inf),
        decoded=float(work.decoder in ("tf.data", "dali")),
        dali=float(work.decoder == "dali"),
        numpy=float(work.decoder == "numpy"),
        recent_host=float(machine.pcie_generation >= 4),
    )


def stack_features(features: Sequence[CostFeatures]) -> CostFeatures:
    """Returns the features of many setups as arrays."""
    import numpy as np

    return CostFeatures(
        **{name: np.array([getattr(one, name) for one in features]) for name in vars(features[0])}
    )


def _check_sizes(of, *sizes):
    if not all(0 <= size < math.inf for size in sizes):
        raise ValueError(f"sizes are numbers from 0 on: {of}")


def _check_known(what, name, known):
    if name not in known:
        raise ValueError(f"{what} {name!r} is not known; use one of {', '.join(known)}")
