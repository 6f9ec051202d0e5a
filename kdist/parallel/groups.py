"""A strategy whose replicas are groups of devices: data parallelism of split models.

    strategy = GroupStrategy(Layout(data=2, pipeline=2), [["GPU:0", "GPU:1", "GPU:2", "GPU:3"]])
    with strategy.scope(), strategy.on(1):
        layer.build(shape)               # its variables are on GPU:1, mirrored on GPU:3

MirroredStrategy puts a copy of each variable on the one device of each replica. Here it goes to
the device of a number within each replica's group; all else, such as gradients that are added up
and slots beside their variables, is MirroredStrategy's, and so everything that trains under it
trains under this as well.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from kdist.layout import Layout
from kdist.tensorflow_internals import MirroredExtended, canonical_device, first_replica


class GroupStrategy(tf.distribute.MirroredStrategy):
    """MirroredStrategy over groups of devices.

    Args:
        layout: how many replicas, each on how many devices.
        hosts: the devices of each host; full names where there are several.

    Attributes:
        layout: the same.
        groups: the devices of each replica, with full names.

    Raises:
        ValueError: there are not as many devices as the layout has, or they cannot be divided so.
    """

    def __init__(self, layout: Layout, hosts: Sequence[Sequence[str]]):
        self.layout = layout
        groups = layout.groups(hosts)
        self.groups = tuple(tuple(canonical_device(name) for name in group) for group in groups)
        tf.distribute.Strategy.__init__(self, _GroupExtended(self, self.groups))

    def local(self, variable: tf.Variable) -> tf.Variable:
        """The copy, of a variable, of the replica that is being run."""
        return self.experimental_local_results(variable)[self._replica_here()]

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Operations are placed on a device of the replica's group, variables on that of each.

        Args:
            index: its number within the group.
        """
        extended, before = self.extended, self.extended.index
        extended.index = index
        try:
            with tf.device(self.groups[self._replica_here()][index]):
                yield
        finally:
            extended.index = before

    def _replica_here(self):
        """The number, in this process, of the replica that is being run; else the first."""
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self:
            return 0
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        return int(replica) - first_replica(self)


@dataclasses.dataclass(frozen=True)
class _Beside:
    """What TensorFlow takes for a variable that another one shall be beside."""

    _devices: tuple[str, ...]


def short_name(device: str) -> str:
    """Such as `"CPU:1"`, of a device's full name; on another host, such as `"worker:1/CPU:1"`."""
    task, _, name = device.rpartition("/device:")
    job = re.search(r"/job:(\w+)/replica:0/task:(\d+)", task)
    if job is None or job[1] == "localhost":
        return name
    return f"{job[1]}:{job[2]}/{name}"


class _GroupExtended(MirroredExtended):
    """Creates variables on the devices of one number in all groups."""

    def __init__(self, strategy, groups):
        self._groups = groups
        self._this_thread = threading.local()
        self._first = [group[0] for group in groups]
        # As for `mirrored` on CPU devices; between GPUs, NCCL would need all devices in one group.
        reduce = tf.distribute.ReductionToOneDevice()
        # One of them here, and all below: several hosts are refused here, and work.
        super().__init__(strategy, self._first[:1], cross_device_ops=reduce)

    def _initialize_strategy(self, devices):
        super()._initialize_strategy(self._first)

    @property
    def index(self):
        """The number, within its group, of the device that new variables are on."""
        return getattr(self._this_thread, "index", 0)

    @index.setter
    def index(self, index):
        self._this_thread.index = index

    def _create_variable(self, next_creator, **kwargs):
        if kwargs.get("colocate_with") is None:
            here = tuple(group[self.index] for group in self._groups)
            kwargs["colocate_with"] = _Beside(here)
        return super()._create_variable(next_creator, **kwargs)
