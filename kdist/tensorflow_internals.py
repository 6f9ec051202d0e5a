"""What kdist needs of TensorFlow that is private; its test fails when TensorFlow changes it."""

import collections
import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.device_util import canonicalize
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended as _MirroredExtended
from tensorflow.python.eager import context, tape

# What MirroredStrategy does; `kdist.parallel.groups` creates variables elsewhere.
MirroredExtended = _MirroredExtended


def has_started() -> bool:
    """Whether TensorFlow has run something, after which neither devices nor servers can be set."""
    return context.context()._context_handle is not None


def canonical_device(name: str) -> str:
    """The full name of a device of this process, such as `"CPU:1"` is short for."""
    return canonicalize(name)


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


@contextlib.contextmanager
def graphs_that_run() -> Iterator[list]:
    """Gives a list that holds, after the block, for each function that ran in it for the first time
    its `post_optimization_graph`, and its `partition_graphs`: what TensorFlow has cut that into,
    one for each device.
    """
    functions: list = []
    owner = context.context()
    owner.enable_graph_collection()
    try:
        yield functions
        functions.extend(owner.export_run_metadata().function_graphs)
    finally:
        owner.disable_graph_collection()


# TensorFlow counts its own keys from 100 on.
_FIRST_KEY = 1 << 30


def reuse_collective_keys(strategy: tf.distribute.Strategy):
    """Has each all-reduce of a function keep its key from call to call, under `multi_worker`.

    TensorFlow takes a new key for each call. Over each, the tasks exchange a message, which costs a
    small model a millisecond a step, and the first task remembers it for good: 1.5 KB a call. Here
    a key is made of what is sent, its type and shape, and of how many of the same kind the function
    has before it. It is no running number: tasks need not trace the same functions equally often.
    """
    for launcher in strategy.extended._cross_device_ops._launchers:
        _reuse_keys(launcher)


def _reuse_keys(launcher):
    tensorflows_own, next_key = launcher.all_reduce, launcher._next_instance_key
    key = None

    def all_reduce(input_tensor, control_input=None, options=None):
        nonlocal key
        key = _key_of(input_tensor, launcher._device)
        try:
            return tensorflows_own(input_tensor, control_input, options)
        finally:
            key = None

    launcher.all_reduce = all_reduce
    launcher._next_instance_key = lambda: next_key() if key is None else tf.constant(key)


def _key_of(tensor, device):
    """The key of an all-reduce; None for TensorFlow's own, outside of functions and without shape.

    A key means one shape: TensorFlow refuses another.
    """
    if tf.executing_eagerly() or not tensor.shape.is_fully_defined():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    if not hasattr(graph, "_kdist_collectives"):
        graph._kdist_collectives = collections.Counter()
    kind = f"{tensor.dtype.name} {tensor.shape.as_list()}"
    number = graph._kdist_collectives[device, kind]
    graph._kdist_collectives[device, kind] += 1
    return _FIRST_KEY + zlib.crc32(f"{kind} {number}".encode()) % _FIRST_KEY


@contextlib.contextmanager
def silence_is_borne(seconds: float) -> Iterator[None]:
    """A MultiWorkerMirroredStrategy that is made meanwhile gives a silent task so long.

    By itself TensorFlow ends the job when a task has been silent for 10 s, less than it takes some
    virtual machines to move to another host.
    """
    owner = context.context()
    configure = owner.configure_coordination_service
    owner.configure_coordination_service = functools.partial(
        configure, heartbeat_timeout_in_ms=int(1000 * seconds)
    )
    try:
        yield
    finally:
        del owner.configure_coordination_service


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
