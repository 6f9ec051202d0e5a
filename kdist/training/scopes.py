"""Facts about a strategy, calls outside its scope, and variables in the scopes of others."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if the replicas run in several processes."""
    return num_local_replicas(strategy) < strategy.num_replicas_in_sync


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas that this process runs."""
    # TensorFlow's default strategy does not report its devices.
    several = strategy.num_replicas_in_sync > 1
    return len(strategy.extended.worker_devices) if several else 1


def computes_on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if the replicas of this process compute on GPUs."""
    if has_parameter_servers(strategy):  # Replicas are in other processes.
        return False
    try:
        return any("GPU" in device.upper() for device in strategy.extended.worker_devices)
    except RuntimeError:  # TensorFlow's default strategy, which uses the first GPU.
        return bool(tf.config.list_logical_devices("GPU"))


def this_replica() -> int:
    """Returns the index of this replica in the job, from 0, in replica context."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def this_local_replica() -> int:
    """Returns the index of this replica on its worker, from 0, in replica context."""
    return this_replica() % num_local_replicas(tf.distribute.get_strategy())


def has_parameter_servers(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if variables are on parameter servers and steps are dispatched to workers."""
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)


def has_copies(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if each replica has its own copy of every variable and updates it."""
    mirrors = tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(strategy, mirrors)


def shares_storage(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if several replicas of this process share one copy of each variable."""
    central = tf.distribute.experimental.CentralStorageStrategy
    return isinstance(strategy, central) and strategy.num_replicas_in_sync > 1


def outside_multi_worker_scope(function: Callable[[], Any]):
    """Returns the result of `function`, called outside the scope of a multi-worker strategy.

    A variable created inside such a scope is broadcast by a collective. Keras creates temporary
    variables while it saves a model. Only one worker saves, so it would wait for the others.
    In the scope of any other strategy, `function` is called directly.
    """
    if not (tf.distribute.has_strategy() and is_multi_worker(tf.distribute.get_strategy())):
        return function()
    return in_new_thread(function)


def outside_any_scope(function: Callable[[], Any]):
    """Returns the result of `function`, called outside every strategy's scope.

    The dtype policy stays the same.
    """
    if not tf.distribute.has_strategy():
        return function()
    policy = keras.config.dtype_policy()

    def with_policy():
        keras.config.set_dtype_policy(policy)  # it belongs to the thread
        return function()

    return in_new_thread(with_policy)


def in_new_thread(function: Callable[[], Any]):
    """Returns the result of `function`, called in a thread without scope, graph, or replica."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def variable_like(variable: keras.Variable, shape: Sequence[int]) -> keras.Variable:
    """Returns a new variable of zeros with the name, scopes, and type of another one."""
    *scopes, name = variable.path.split("/")
    with contextlib.ExitStack() as stack:
        for number, scope in enumerate(scopes):
            # The path is absolute, also within the scopes of a layer that is being built.
            parent = None if number else ""
            stack.enter_context(keras.name_scope(scope, override_parent=parent))
        return keras.Variable(
            "zeros", shape=tuple(shape), dtype=variable.dtype, trainable=False, name=name
        )
