"""What kdist needs of TensorFlow that is private; its test fails when TensorFlow changes it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.eager import context, tape


def has_started() -> bool:
    """Whether TensorFlow has run something, after which neither devices nor servers can be set."""
    return context.context()._context_handle is not None


def current_device() -> str:
    """The device that eager operations of this thread are placed on; empty for no choice."""
    return context.context().device_name or ""


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


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """The number in the job of the first replica that this process runs."""
    return strategy.extended._get_replica_id_in_sync_group(0)


@contextlib.contextmanager
def traced_for_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Functions that are traced meanwhile are for the workers of a `ParameterServerStrategy`.

    Without it TensorFlow warns at each trace that the coordinator would run them itself.
    """
    extended = strategy.extended
    before, extended._being_scheduled = extended._being_scheduled, True
    try:
        yield
    finally:
        extended._being_scheduled = before


def number_of_workers(strategy: tf.distribute.Strategy) -> int:
    """Those of a `ParameterServerStrategy`."""
    return strategy.extended._num_workers


def schedule(coordinator, function: Callable[[], None]):
    """Has a worker's thread of the coordinator call `function`, its operations on that worker.

    `coordinator.schedule` takes TensorFlow functions alone; what it calls takes any. If the worker
    dies meanwhile, `function` is called again in the thread of another.
    """
    coordinator._cluster.schedule(function, args=(), kwargs={})


def watch_on_tapes(tensor: tf.Tensor):
    """Has all gradient tapes of this thread watch `tensor`, as they do a variable that is read."""
    tape.variable_accessed(_Accessed(tensor))


class _Accessed:
    trainable = True

    def __init__(self, tensor):
        self.handle = tensor


def abort_collectives(reason: str):
    """Has all collectives of this process that are under way, and all later ones, fail."""
    context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, reason)
