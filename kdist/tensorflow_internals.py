"""What kdist needs of TensorFlow that is private; its test fails when TensorFlow changes it."""

import contextlib
from collections.abc import Iterator, Sequence

from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.eager import context


def has_started() -> bool:
    """Whether TensorFlow has run something, after which neither devices nor servers can be set."""
    return context.context()._context_handle is not None


@contextlib.contextmanager
def each_worker_has(devices: Sequence[str]) -> Iterator[None]:
    """A MultiWorkerMirroredStrategy that is made meanwhile computes on these of each worker.

    By itself it takes all GPUs or, where there are none, the first CPU device alone.

    Args:
        devices: such as `["CPU:0", "CPU:1"]`; the same number on all workers.
    """
    tensorflows_own = CollectiveAllReduceExtended._initialize_local_devices

    def these(extended, cluster_resolver, worker_device):
        names = tuple(f"{worker_device}/device:{device}" for device in devices)
        return names, devices[0].split(":")[0]

    CollectiveAllReduceExtended._initialize_local_devices = these
    try:
        yield
    finally:
        CollectiveAllReduceExtended._initialize_local_devices = tensorflows_own
