"""A strategy whose replicas are groups of devices, for data parallelism of split models.

    strategy = GroupStrategy(Layout(data=2, pipeline=2), [["GPU:0", "GPU:1", "GPU:2", "GPU:3"]])
    with strategy.scope(), strategy.on(1):
        layer.build(shape)               # its variables are on GPU:1, mirrored on GPU:3

`MirroredStrategy` creates a copy of each variable on the single device of each replica. Here the
copies are on the device with a given number in each replica's group. Everything else, such as the
reduction of gradients and the colocation of slots, is inherited from `MirroredStrategy`.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from kdist.compat.tensorflow import MirroredExtended, canonical_device, first_replica
from kdist.layout import Layout


class GroupStrategy(tf.distribute.MirroredStrategy):
    """`MirroredStrategy` over groups of devices.

    `layout` has the numbers of replicas and of devices per replica, and `hosts` the devices of each
    host, with full names if there are several hosts. `groups` are the devices of each replica, with
    full names. Raises ValueError if the number of devices differs from the layout's, or the devices
    cannot be divided over the hosts.
    """

    def __init__(self, layout: Layout, hosts: Sequence[Sequence[str]]):
        self.layout = layout
        groups = layout.groups(hosts)
        self.groups = tuple(tuple(canonical_device(name) for name in group) for group in groups)
        tf.distribute.Strategy.__init__(self, _GroupExtended(self, self.groups))

    def local(self, variable: tf.Variable) -> tf.Variable:
        """Returns the copy of a variable that belongs to the current replica."""
        return self.experimental_local_results(variable)[self._local_replica()]

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Places operations on a device of the replica's group, and variables in every group."""
        extended, before = self.extended, self.extended.index
        extended.index = index
        try:
            with tf.device(self.groups[self._local_replica()][index]):
                yield
        finally:
            extended.index = before

    def _local_replica(self):
        """Returns the number, in this process, of the current replica; 0 outside of replicas."""
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self:
            return 0
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        return int(replica) - first_replica(self)


@dataclasses.dataclass(frozen=True)
class _Colocation:
    """Stand-in for a variable with which TensorFlow colocates a new one."""

    _devices: tuple[str, ...]


def short_name(device: str) -> str:
    """Returns a short name of a device: `"CPU:1"`, or `"worker:1/CPU:1"` on another host."""
    task, _, name = device.rpartition("/device:")
    job = re.search(r"/job:(\w+)/replica:0/task:(\d+)", task)
    if job is None or job[1] == "localhost":
        return name
    return f"{job[1]}:{job[2]}/{name}"


def device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the devices on which the replicas compute, such as `("GPU:0", "GPU:1")`."""
    if isinstance(strategy, GroupStrategy):
        return tuple(short_name(device) for group in strategy.groups for device in group)
    devices = strategy.extended.worker_devices
    return tuple(device.rsplit("/device:", 1)[-1].rsplit("/", 1)[-1].upper() for device in devices)


class _GroupExtended(MirroredExtended):
    """Creates variables on the devices with the same number in all groups."""

    def __init__(self, strategy, groups):
        self._groups = groups
        self._this_thread = threading.local()
        self._first = [group[0] for group in groups]
        # As `mirrored` on CPU devices. Between GPUs, NCCL would need all devices in one group.
        reduce = tf.distribute.ReductionToOneDevice()
        # One device here and all of them in _initialize_strategy: the constructor refuses several
        # hosts, although they work.
        super().__init__(strategy, self._first[:1], cross_device_ops=reduce)

    def _initialize_strategy(self, devices):
        super()._initialize_strategy(self._first)

    @property
    def index(self):
        """Number, within its group, of the device of new variables."""
        return getattr(self._this_thread, "index", 0)

    @index.setter
    def index(self, index):
        self._this_thread.index = index

    def _create_variable(self, next_creator, **kwargs):
        if kwargs.get("colocate_with") is None:
            here = tuple(group[self.index] for group in self._groups)
            kwargs["colocate_with"] = _Colocation(here)
        return super()._create_variable(next_creator, **kwargs)
