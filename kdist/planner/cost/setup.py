"""What is trained, on what, and how: everything that the time of an update depends on."""

import dataclasses
import math
import statistics

from kdist.planner.machines import Machine

UPDATES = ("all_reduce", "server_on_host", "server_on_devices", "parameter_servers")
DECODERS = ("tf.data", "dali", "none", "numpy")
LIBRARIES = ("tf.distribute", "horovod", "ddp")
BYTES_PER_PIXEL = 12  # three channels of float32


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What devices exchange.

    Attributes:
        bytes: of all gradients of one replica, in the precision in which they are exchanged.
        largest_share: of `bytes` in the largest tensor.
        tensors: how many there are.
        weight_bytes: of the weights, which a parameter server sends back; `bytes` where not given.

    Raises:
        ValueError: a size is negative or a share not between 0 and 1.
    """

    bytes: float
    largest_share: float = 0.1
    tensors: int = 200
    weight_bytes: float | None = None

    def __post_init__(self):
        _sizes(self, self.bytes, self.weight_bytes or 0, self.tensors)
        if not 0 <= self.largest_share <= 1:
            raise ValueError(f"largest_share is from 0 to 1, not {self.largest_share}")


@dataclasses.dataclass(frozen=True)
class InputWork:
    """What the host has to do for one example.

    Attributes:
        source_megapixels: 10⁶ pixels of the JPEG to decode; 0 where nothing is decoded.
        model_megapixels: 10⁶ pixels of the image that the model gets.
        policy: whether an augmentation policy (AutoAugment, RandAugment) is applied.
        masks: whether instance masks are decoded and resized.
        host_bytes: that the host hands to a device. By default, of "tf.data" and "numpy" the pixels
            of the model's image as float32, of the others nothing.
        decoder: "tf.data"; "dali", on the devices for the most part; "numpy", arrays fed by one
            Python thread; or "none", where nothing is to be done.
        threads: that prepare examples: 1 where `Dataset.map` has no `num_parallel_calls`. None,
            the default, is as many as there are cores.

    Raises:
        ValueError: a size is negative or the decoder not known.
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
        _sizes(self, self.source_megapixels, self.model_megapixels, self.host_bytes)
        _one_of("decoder", self.decoder, DECODERS)

    @property
    def bytes_to_device(self) -> float:
        """Of one example, from the host's memory to a device's."""
        if self.host_bytes or self.decoder not in ("tf.data", "numpy"):
            return self.host_bytes
        return self.model_megapixels * 1e6 * BYTES_PER_PIXEL


@dataclasses.dataclass(frozen=True)
class Setup:
    """Devices of one machine, and how they share the work of an update.

    Attributes:
        machine: the kind of all nodes.
        devices: how many in all; more than one node has are spread over full nodes.
        local_batch: examples of one device in one micro-step.
        accumulate: micro-steps whose gradients are added up before an update.
        local_steps: updates that a device makes by itself between two exchanges.
        update: "all_reduce"; "server_on_host", variables on the CPU of the node;
            "server_on_devices", each variable on one of the devices; "parameter_servers", variables
            spread over `servers` other hosts.
        servers: how many hosts keep variables, with "parameter_servers".
        asynchronous: whether nobody waits for the others, with "parameter_servers".
        library: "tf.distribute"; "horovod" or "ddp", with a process for each device.
        in_graph: whether one process feeds all devices of a node.
        nccl1: whether the all-reduce is that of NCCL before version 2 (2017).
        overlap: share of a micro-step under which the exchange can hide. TensorFlow's all-reduce
            after the backward pass hides nothing.

    Raises:
        ValueError: a number is out of its range or a name not known.
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
        _one_of("update", self.update, UPDATES)
        _one_of("library", self.library, LIBRARIES)
        if self.asynchronous and self.update != "parameter_servers":
            raise ValueError(f'asynchronous needs update="parameter_servers", not {self.update!r}')

    @property
    def examples(self) -> float:
        """Of one update of all devices."""
        return self.local_batch * self.accumulate * self.devices

    @property
    def devices_in_node(self) -> int:
        """Of a full node, or all where they fit in one."""
        return min(self.devices, self.machine.gpus_per_node)

    @property
    def nodes(self) -> int:
        """How many the devices are spread over."""
        return math.ceil(self.devices / self.machine.gpus_per_node)

    @property
    def slowest_node(self) -> float:
        """By how many standard deviations the slowest node is behind the average one.

        The expected maximum of as many normally distributed numbers (Blom, "Statistical estimates
        and transformed beta-variables", 1958): 0 of one, 0.59 of 2, 1.4 of 8, 2.8 of 256.
        """
        return statistics.NormalDist().inv_cdf((self.nodes - 0.375) / (self.nodes + 0.25))


def _sizes(of, *sizes):
    if not all(0 <= size < math.inf for size in sizes):
        raise ValueError(f"sizes are numbers from 0 on: {of}")


def _one_of(what, name, known):
    if name not in known:
        raise ValueError(f"{what} {name!r} is not known; take one of {', '.join(known)}")
