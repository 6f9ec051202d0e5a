"""Private interfaces of TensorFlow that kdist uses, in one place.

`tests/compat/test_tensorflow.py` fails if TensorFlow changes one of them.
"""

import collections
import contextlib
import functools
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.device_util import canonicalize
from tensorflow.python.distribute.distribute_utils import value_container
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended as _MirroredExtended
from tensorflow.python.distribute.values import DistributedVariable as _DistributedVariable
from tensorflow.python.distribute.values import MirroredVariable as _MirroredVariable
from tensorflow.python.eager import context, record, tape
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.ops import collective_ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as _ResourceVariable
from tensorflow.python.saved_model import load as saved_model_load

# Implementation of MirroredStrategy; `kdist.parallel.device_groups` changes where variables are.
MirroredExtended = _MirroredExtended
# Variable with a copy per replica.
DistributedVariable = _DistributedVariable
# The same whose copies a program keeps equal, and a variable without copies, such as one of these.
MirroredVariable = _MirroredVariable
ResourceVariable = _ResourceVariable
_NO_OPTIMIZER = "disable_meta_optimizer"
# An iterator's destruction usually takes a millisecond.
_DESTRUCTION_SECONDS = 0.05


def has_started() -> bool:
    """Returns True if TensorFlow has run an operation, which fixes devices and servers."""
    return context.context()._context_handle is not None


def canonical_device(name: str) -> str:
    """Returns the full name of a device of this process, given a short one such as `"CPU:1"`."""
    return canonicalize(name)


def current_device() -> str:
    """Returns the device on which this thread places eager operations; empty for no choice."""
    return context.context().device_name or ""


def undistributed(data: Any) -> Any:
    """Returns the dataset that `experimental_distribute_dataset` received, and other data as is."""
    is_distributed = isinstance(data, tf.distribute.DistributedDataset)
    return getattr(data, "_original_dataset", data) if is_distributed else data


def variable_of_copy(copy: Any) -> Any:
    """Returns the variable of which `copy` is the one of a replica; other variables as they are."""
    return value_container(copy)


def with_sizes(shape: tf.TensorShape, sizes: tuple) -> tf.TensorShape:
    """Returns a shape with sizes that keep their class, unlike those of a new shape."""
    result = tf.TensorShape(shape)
    result._dims = sizes
    return result


def preferred_dtype() -> tf.DType | None:
    """Returns the type that TensorFlow prefers for what it converts, but does not tell.

    To be called in `__tf_tensor__`: `x / n` prefers that of x.
    """
    found = sys._getframe(2).f_locals.get("preferred_dtype")
    return None if found is None else tf.as_dtype(found)


def convert_variables_to_numbers():
    """Makes `int(v)` and `float(v)` work for variables with a copy per replica.

    Programs convert `optimizer.iterations` and `optimizer.learning_rate`, as `tf.Variable` allows.
    """
    DistributedVariable.__int__ = lambda variable: int(variable.numpy())
    DistributedVariable.__float__ = lambda variable: float(variable.numpy())


def find_handles_between_replicas(check: Callable[[], None]):
    """Gives variables with a copy per replica a handle outside of replicas: that of the first copy.

    A gradient tape identifies variables by their handles. TensorFlow raises an error instead.

    Args:
        check: function that is called before such a handle is returned, and may raise an error.
    """
    in_replicas = DistributedVariable.handle.fget

    def handle(variable):
        if not tf.distribute.in_cross_replica_context():
            return in_replicas(variable)
        try:
            return in_replicas(variable)  # in `Strategy.extended.update`, and while saving
        except ValueError:
            check()
            return variable._get_on_device_or_primary().handle

    DistributedVariable.handle = property(handle)


def merge_between_replicas():
    """Makes `maybe_merge_call`, by which Keras updates variables, work outside of replicas."""
    owner = tf.__internal__.distribute.interim
    in_replicas = owner.maybe_merge_call

    @functools.wraps(in_replicas)
    def maybe_merge_call(fn, strategy, *args, **kwargs):
        if tf.distribute.in_cross_replica_context():
            return fn(strategy, *args, **kwargs)
        return in_replicas(fn, strategy, *args, **kwargs)

    owner.maybe_merge_call = maybe_merge_call


def slice_variables_between_replicas():
    """Makes slices of variables assignable outside of replicas, as in `queue[0].assign(x)`."""
    in_replicas = MirroredVariable.__getitem__

    def getitem(variable, slice_spec):
        if tf.distribute.in_cross_replica_context():
            return variable._get_on_device_or_primary()[slice_spec]
        return in_replicas(variable, slice_spec)

    MirroredVariable.__getitem__ = getitem


def call_loaded_functions_between_replicas():
    """Makes functions of a SavedModel that was loaded in a scope work outside of replicas.

    They read the first copy of each variable. TensorFlow gives them none, and fails.
    """
    call_flat = saved_model_load._WrapperFunction._call_flat

    def call(function, args, captured_inputs):
        if tf.distribute.in_cross_replica_context():
            captured_inputs = [
                one._get_on_device_or_primary().handle
                if isinstance(one, DistributedVariable)
                else one
                for one in captured_inputs
            ]
        return call_flat(function, args, captured_inputs)

    saved_model_load._WrapperFunction._call_flat = call


def keep_scopes():
    """Makes `reset_default_graph`, which `keras.utils.clear_session` calls, do nothing in a scope.

    The default graph knows the scopes of strategies that a program is in. Without eager execution
    TensorFlow would refuse to reset it there.
    """
    reset = tf.compat.v1.reset_default_graph

    @functools.wraps(reset)
    def reset_outside_of_scopes():
        if not tf.distribute.has_strategy():
            reset()

    tf.compat.v1.reset_default_graph = reset_outside_of_scopes


@contextlib.contextmanager
def worker_devices(devices: Sequence[str]) -> Iterator[None]:
    """Returns a context manager that sets the devices of a new MultiWorkerMirroredStrategy.

    By default TensorFlow uses all GPUs of each worker or, without GPUs, its first CPU device.

    Args:
        devices: device names such as `["CPU:0", "CPU:1"]`, the same number on all workers.
    """
    original = CollectiveAllReduceExtended._initialize_local_devices

    def selected(extended, cluster_resolver, worker_device):
        names = tuple(f"{worker_device}/device:{device}" for device in devices)
        return names, devices[0].split(":")[0]

    CollectiveAllReduceExtended._initialize_local_devices = selected
    try:
        yield
    finally:
        CollectiveAllReduceExtended._initialize_local_devices = original


@contextlib.contextmanager
def collect_function_graphs() -> Iterator[list]:
    """Returns a context manager that yields a list of the graphs of functions.

    After the context, the list contains an entry for each function that ran in it for the first
    time. An entry has a `post_optimization_graph` and its `partition_graphs`, one per device.
    """
    functions: list = []
    owner = context.context()
    owner.enable_graph_collection()
    try:
        yield functions
        functions.extend(owner.export_run_metadata().function_graphs)
    finally:
        owner.disable_graph_collection()


# Numbers of other types that are sent as those of a type that TensorFlow can send, bit by bit.
_SENT_AS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64}


@functools.cache
def exchange_all_types():
    """Lets workers broadcast and gather numbers of all types, such as bfloat16 and int8.

    TensorFlow does so for few, and creates a variable by a broadcast of its initial value.
    """
    send, receive = collective_ops.broadcast_send, collective_ops.broadcast_recv
    gather = collective_ops.all_gather_v2

    @functools.wraps(send)
    def broadcast_send(t, shape, dtype, *args, **kwargs):
        sent = _as_sent(t)
        return send(sent, shape, sent.dtype, *args, **kwargs)

    @functools.wraps(receive)
    def broadcast_recv(shape, dtype, *args, **kwargs):
        return _as_received(receive(shape, _sent_type(dtype), *args, **kwargs), dtype)

    @functools.wraps(gather)
    def all_gather_v2(t, *args, **kwargs):
        return _as_received(gather(_as_sent(t), *args, **kwargs), t.dtype)

    collective_ops.broadcast_send, collective_ops.broadcast_recv = broadcast_send, broadcast_recv
    collective_ops.all_gather_v2 = all_gather_v2


def _sent_type(dtype):
    dtype = tf.as_dtype(dtype)
    if dtype in _SENT_AS:
        return _SENT_AS[dtype]
    if dtype.size > 2 or dtype in (tf.float16, tf.bool):
        return dtype
    return tf.float32 if dtype.is_floating else tf.int32


def _as_sent(tensor):
    is_same_size = tensor.dtype in _SENT_AS
    return (tf.bitcast if is_same_size else tf.cast)(tensor, _sent_type(tensor.dtype))


def _as_received(tensor, dtype):
    return (tf.bitcast if dtype in _SENT_AS else tf.cast)(tensor, dtype)


# TensorFlow's own keys count from 100.
_FIRST_KEY = 1 << 30


def reuse_collective_keys(strategy: tf.distribute.Strategy):
    """Lets each all-reduce of a function keep its key from call to call, under `multi_worker`.

    TensorFlow uses a new key for each call. The tasks exchange a message for each key, which costs
    a small model a millisecond per step, and the first task stores 1.5 KB per call forever. Here a
    key is derived from the type and shape of the tensor, and from the number of earlier ones of
    that kind in the function. It is not a counter: tasks may trace different functions.
    """
    for launcher in strategy.extended._cross_device_ops._launchers:
        _reuse_keys(launcher)


def _reuse_keys(launcher):
    all_reduce_with_new_key, next_key = launcher.all_reduce, launcher._next_instance_key
    key = None

    def all_reduce(input_tensor, control_input=None, options=None):
        nonlocal key
        key = _key_of("", input_tensor, launcher._device)
        try:
            return all_reduce_with_new_key(input_tensor, control_input, options)
        finally:
            key = None

    launcher.all_reduce = all_reduce
    launcher._next_instance_key = lambda: next_key() if key is None else tf.constant(key)


def _key_of(collective, tensor, device):
    """Returns the key of a collective; None outside functions or without static shape.

    A key belongs to one shape: TensorFlow rejects any other.
    """
    if tf.executing_eagerly() or not tensor.shape.is_fully_defined():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    if not hasattr(graph, "_kdist_collectives"):
        graph._kdist_collectives = collections.Counter()
    kind = f"{collective}{tensor.dtype.name} {tensor.shape.as_list()}"
    number = graph._kdist_collectives[device, kind]
    graph._kdist_collectives[device, kind] += 1
    return _FIRST_KEY + zlib.crc32(f"{kind} {number}".encode()) % _FIRST_KEY


def all_gather(
    strategy: tf.distribute.Strategy, values: Sequence[tf.Tensor], is_ordered: bool = True
) -> Sequence[tf.Tensor]:
    """Returns the rows that a tensor has on all replicas of a `MultiWorkerMirroredStrategy`.

    Args:
        strategy: the strategy. All its workers must call this.
        values: the tensor of each replica of this worker, of the same shape everywhere.
        is_ordered: whether this runs between those collectives of a function that were created
            before it, and those created after it. Otherwise the caller orders it.

    Returns:
        For each replica of this worker, the concatenation of the tensors of all replicas, in the
        order of the collectives' ranks.
    """
    gather = collective_ops.all_gather_v2
    return _exchanged("gather ", gather, strategy, values, is_ordered=is_ordered)


def all_to_all(
    strategy: tf.distribute.Strategy, values: Sequence[tf.Tensor], is_ordered: bool = True
) -> Sequence[tf.Tensor]:
    """Exchanges rows between the replicas of a `MultiWorkerMirroredStrategy`.

    Args:
        strategy: the strategy. All its workers must call this.
        values: a tensor of shape (R, …) of each replica of this worker, for R replicas of the job.
            Row r is for the replica of rank r.
        is_ordered: as in `all_gather`.

    Returns:
        A tensor of shape (R, …) for each replica of this worker. Row r is from the replica of rank
        r.
    """
    exchange = collective_ops.all_to_all_v2
    return _exchanged("exchange ", exchange, strategy, values, is_ordered=is_ordered)


def all_reduce_between_workers(
    strategy: tf.distribute.Strategy, values: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    """Returns the sums of tensors over the workers of a `MultiWorkerMirroredStrategy`.

    Args:
        strategy: the strategy. All its workers must call this, and have as many replicas.
        values: a tensor of each replica of this worker, of the same shape everywhere.

    Returns:
        For each replica of this worker, the sum of its tensor and those of the replicas that have
        the same place on other workers.
    """
    add = functools.partial(collective_ops.all_reduce_v2, merge_op="Add", final_op="Id")
    workers = strategy.num_replicas_in_sync // len(values)
    # TensorFlow has a group of all replicas alone.
    groups = [(workers, _FIRST_KEY + place) for place in range(len(values))]
    return _exchanged("sum ", add, strategy, values, groups)


def _exchanged(collective, operation, strategy, values, groups=None, is_ordered=True):
    """Returns each replica's result of a collective; `groups` has the (size, key) of its group."""

    def exchange():
        results = []
        launchers = strategy.extended._cross_device_ops._launchers
        for place, (launcher, value) in enumerate(zip(launchers, values, strict=True)):
            key = _key_of(collective, value, launcher._device)
            with tf.device(launcher._device):
                result = operation(
                    value,
                    *(groups[place] if groups else (launcher._group_size, launcher._group_key)),
                    launcher._next_instance_key() if key is None else tf.constant(key),
                    communication_hint=launcher._options.implementation.value,
                    timeout=launcher._options.timeout_seconds or 0,
                    ordering_token=launcher._get_ordering_token() if is_ordered else None,
                )
            dependencies = tf.compat.v1.get_default_graph().experimental_acd_manager
            if not is_ordered and dependencies is not None:
                dependencies.run_independently(result.op)
            results.append(result)
        return results

    # Outside of functions, the collective of the first device would wait for that of the second.
    return function_of_its_own(exchange)() if tf.executing_eagerly() else exchange()


@contextlib.contextmanager
def heartbeat_timeout(seconds: float) -> Iterator[None]:
    """Returns a context manager that sets the heartbeat timeout of a new multi-worker strategy.

    By default TensorFlow ends the job when a task has been silent for 10 s. Live migration of some
    virtual machines takes longer.
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
    """Returns the index in the job of the first replica that this process runs."""
    return strategy.extended._get_replica_id_in_sync_group(0)


def with_copies(variable, copies: Sequence[tf.Variable]):
    """Returns a distributed variable like another one, which has these copies on the replicas."""
    strategy, policy = variable.distribute_strategy, variable._policy
    return type(variable)(strategy, copies, variable.aggregation, var_policy=policy)


@contextlib.contextmanager
def traced_for_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Returns a context manager for tracing functions for workers of a `ParameterServerStrategy`.

    Without it, TensorFlow warns at each trace that the coordinator would run them itself.
    """
    extended = strategy.extended
    before, extended._being_scheduled = extended._being_scheduled, True
    try:
        yield
    finally:
        extended._being_scheduled = before


def partitioner_of(strategy: tf.distribute.Strategy) -> Callable | None:
    """Returns the `variable_partitioner` of a `ParameterServerStrategy`; None if it has none."""
    return getattr(strategy.extended, "_variable_partitioner", None)


@contextlib.contextmanager
def unpartitioned(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Returns a context manager in which the strategy does not partition new variables."""
    partitioner = partitioner_of(strategy)
    if partitioner is None:
        yield
        return
    strategy.extended._variable_partitioner = None
    try:
        yield
    finally:
        strategy.extended._variable_partitioner = partitioner


def number_of_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers of a `ParameterServerStrategy`."""
    return strategy.extended._num_workers


def schedule(coordinator, function: Callable[[], None]):
    """Lets a worker's thread of the coordinator call `function`, whose operations run there.

    `coordinator.schedule` accepts only TensorFlow functions; the function that it calls accepts
    any. If the worker dies meanwhile, the thread of another one calls `function` again.
    """
    coordinator._cluster.schedule(function, args=(), kwargs={})


def watch_on_tapes(tensor: tf.Tensor):
    """Makes all gradient tapes of this thread watch `tensor`, like a variable that is read."""
    tape.variable_accessed(_Accessed(tensor))


def is_recorded() -> bool:
    """Returns True if a gradient tape of this thread records operations."""
    return record.could_possibly_record()


def record_read(value: tf.Tensor, handle: tf.Tensor, dtype: str):
    """Makes the gradient tapes of this thread regard `value` as what was read from a variable.

    The gradient of `value`, also one of looked-up rows, becomes that of the variable.

    Args:
        value: a tensor, computed within `unrecorded()`.
        handle: the handle by which tapes identify the variable. Its value may have another shape.
        dtype: type of the gradient, as that of the variable. `value` may have another one.
    """

    def gradient_of_variable(gradient):
        return [tf.cast(gradient, dtype)]

    watch_on_tapes(handle)
    record.record_operation("ReadVariableOp", [value], [handle], gradient_of_variable)


def record_function(
    outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., list]
):
    """Makes the gradient tapes of this thread regard `outputs` as a function of `inputs`.

    Args:
        outputs: tensors, computed within `unrecorded()`.
        inputs: tensors, or the handles of variables.
        gradient: function of the gradients of the outputs that returns those of the inputs.
    """
    for handle in inputs:
        if handle.dtype == tf.resource:
            watch_on_tapes(handle)
    record.record_operation("Recomputed", outputs, inputs, gradient)


@contextlib.contextmanager
def variables_read() -> Iterator[Callable[[], Sequence]]:
    """Yields a function that returns the trainable variables which this thread has read since."""
    with record.VariableWatcher() as watcher:
        yield watcher.watched_variables


def unrecorded() -> contextlib.AbstractContextManager:
    """Returns a context manager in which gradient tapes of this thread record nothing."""
    return record.stop_recording()


class _Accessed:
    trainable = True

    def __init__(self, tensor):
        self.handle = tensor

    def ref(self):
        """Raises a ValueError: a function with its own gradient reads the variable.

        TensorFlow asks such a function for the gradient of each `tf.Variable` that it has read.
        """
        raise ValueError(
            "a weight is read within a function that has its own gradient (tf.custom_gradient, or "
            "a tf.recompute_grad from before kdist.create_strategy), where replicas compute with "
            "copies of weights. Pass the weight to the function as an argument, or use the "
            "strategy mirrored without shard=weights"
        )


def replace_input(operation: tf.Operation, old: tf.Tensor, new: tf.Tensor):
    """Lets an operation of a graph that is being built read `new` instead of `old`."""
    for number, tensor in enumerate(operation.inputs):
        if tensor is old:
            operation._update_input(number, new)


def wait_for(operation: tf.Operation, earlier: tf.Operation):
    """Lets an operation of a graph that is being built wait until another one has ended."""
    operation._add_control_input(earlier)


def repeat_operation(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the output of an operation of the same type and attributes with other inputs."""
    (output,) = operation.outputs
    again = operation.graph.create_op(
        operation.type, list(inputs), [output.dtype], attrs=operation.node_def.attr
    )
    return again.outputs[0]


def refuse_checkpoints(variable, message: str):
    """Lets TensorFlow's checkpoints and SavedModels raise a ValueError where they save a variable.

    Args:
        variable: a Keras variable whose copies differ. TensorFlow would save the first one.
        message: the message of the error.
    """

    def refuse():
        raise ValueError(message)

    variable._serialize_to_tensors = refuse


def run_once(strategy: tf.distribute.Strategy, function: Callable, *args) -> Any:
    """Returns `strategy.run(function, args)` without TensorFlow's warning that eager runs are slow.

    For calls between epochs, whose duration does not matter, and steps that the program runs
    eagerly on purpose.

    Args:
        strategy: a strategy. Those without the warning run the function as usual.
        function: the function, which AutoGraph does not convert.
        *args: its arguments.
    """
    if not isinstance(strategy.extended, MirroredExtended):
        return strategy.run(function, args)
    with strategy.scope():
        return mirrored_run._call_for_each_replica(strategy, function, args, {})


def function_of_its_own(python_function: Callable, **options):
    """Returns a `tf.function`, without AutoGraph, whose retracing TensorFlow counts by itself.

    TensorFlow counts the traces of all functions with the same code together, and warns when a
    process traces the functions of several models. It cannot tell the code of a partial.
    """
    return tf.function(functools.partial(python_function), autograph=False, **options)


def call_with_captures(function, arguments: Sequence[tf.Tensor], captures: Sequence[tf.Tensor]):
    """Returns the outputs of a concrete function, called with other captured tensors, in a graph.

    TensorFlow optimizes the function together with the graph, and not again for each call.

    Args:
        function: a function that `get_concrete_function` returned.
        arguments: its arguments, without structure.
        captures: tensors in place of its `captured_inputs`, such as handles of other variables.
    """
    options = tf.config.optimizer.get_experimental_options()
    before = {_NO_OPTIMIZER: options.get(_NO_OPTIMIZER, False)}
    tf.config.optimizer.set_experimental_options({_NO_OPTIMIZER: True})
    try:
        return function._call_flat([*arguments], [*captures])
    finally:
        tf.config.optimizer.set_experimental_options(before)


def yields_on_host(iterator) -> bool:
    """Returns True if an iterator of `tf.data` yields batches in the memory of the host.

    With `tf.data.experimental.prefetch_to_device`, they are in that of a GPU.
    """
    resource = getattr(iterator, "_iterator_resource", None)
    return resource is not None and "GPU" not in resource.device.upper()


def destroy_iterator(iterator):
    """Destroys an iterator of `tf.data`, which must not be used again.

    TensorFlow waits in it for the thread that tunes the pipeline. That thread can wake up before
    it can see that it is to end, and then sleeps once more for as long as the iterator has lived,
    up to a minute (`Model::OptimizeLoop` in tensorflow/core/framework/model.cc). On two cores, one
    of five iterators did. Therefore another thread destroys the iterator, and the caller
    waits for it shortly.

    Args:
        iterator: the iterator. Nothing happens if it is of another kind.
    """
    last = [getattr(iterator, "__dict__", {}).pop("_iterator_resource", None)]
    if last[0] is None:
        return
    thread = threading.Thread(target=last.clear, name="kdist-iterator", daemon=True)
    with contextlib.suppress(RuntimeError):  # no threads while Python ends
        thread.start()
        thread.join(_DESTRUCTION_SECONDS)


def is_compiled(function) -> bool:
    """Returns True for a `tf.function` that XLA compiles."""
    return bool(function._jit_compile)


def by_autograph(function) -> Callable:
    """Returns the Python function of a `tf.function`, with its conditions and loops on tensors."""
    python_function = function.python_function
    if not function._autograph:
        return python_function
    options = function._experimental_autograph_options
    converted = autograph_util.py_func_from_autograph(python_function, options)

    def call(*args, **kwargs):
        # Keras turns AutoGraph off around the steps of a model.
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED):
            return converted(*args, **kwargs)

    return call


def publish(key: str, value: str):
    """Lets all workers of a job read a value, until `withdraw`."""
    context.context().set_config_key_value(key, value)


def published(key: str, seconds: float) -> str | None:
    """Returns what a worker of the job publishes by a key within a time; None otherwise."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            # In parts, since Ctrl-C does not end the call. 0 would be forever.
            return context.context().get_config_key_value(key, max(1, int(1000 * min(left, 0.5))))
        except tf.errors.DeadlineExceededError:
            if left <= 0:
                return None


def withdraw(key: str):
    """Deletes a key that a worker has published, and all that begin with it and a slash."""
    context.context().delete_config_key_value(key)


def abort_collectives(reason: str):
    """Makes all running and future collectives of this process fail."""
    context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, reason)
