"""Setup of TensorFlow strategies for training, whether kdist or the program has created them."""

import hashlib
import random
import secrets

import keras
import tensorflow as tf

from kdist.compat.tensorflow import reuse_collective_keys
from kdist.training.parameter_server.partitioned_embedding import Partitioner, partition_embeddings
from kdist.training.replica.reduction import sums_over_replicas
from kdist.training.scopes import has_parameter_servers, is_multi_worker
from kdist.training.step_timeout import set_step_timeout


def set_up(
    strategy: tf.distribute.Strategy,
    step_timeout_seconds: float = 600.0,
    partitioner: Partitioner | None = None,
    equalizes_seeds: bool = True,
):
    """Sets up a strategy for training; only the first call has an effect.

    `create_strategy` calls it, and so does `compile`, for strategies that the program created.

    Args:
        strategy: any strategy. With several workers, all of them must call this.
        step_timeout_seconds: see `create_strategy`.
        partitioner: see `create_strategy`. Defaults to the strategy's `variable_partitioner`.
        equalizes_seeds: whether workers with different random seeds receive a common one.

    Raises:
        ValueError: a `MirroredStrategy` of several devices has one that does not exist.
    """
    extended = strategy.extended
    if hasattr(extended, "_kdist_is_set_up"):
        return
    if isinstance(strategy, tf.distribute.MirroredStrategy) and strategy.num_replicas_in_sync > 1:
        _check_devices(extended.worker_devices)
    extended._kdist_is_set_up = True
    if has_parameter_servers(strategy):
        partition_embeddings(strategy, partitioner)
    elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        reuse_collective_keys(strategy)
        set_step_timeout(strategy, step_timeout_seconds)
        if equalizes_seeds and is_multi_worker(strategy):
            _equalize_seeds(strategy)


def _check_devices(names):
    """Raises a ValueError if a device does not exist: the first reduction would wait forever."""
    existing = [_short_name(device.name) for device in tf.config.list_logical_devices()]
    if missing := [name for name in map(_short_name, names) if name not in existing]:
        raise ValueError(
            f"the strategy's device {missing[0]} does not exist, but {', '.join(existing)}; "
            "name existing ones, or use kdist.create_strategy('mirrored', devices=2), which "
            "creates logical CPU devices"
        )


def _short_name(device):
    return device.rpartition("device:")[2].upper()


def random_state() -> int:
    """Returns a number that is equal on tasks whose random seeds are equal, below 2**31."""
    digest = hashlib.sha256(repr(random.getstate()).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _equalize_seeds(strategy):
    """Sets a common seed if seeds differ, because each worker takes its share of shuffled data."""
    own = random_state()
    with strategy.scope():  # TensorFlow broadcasts the first worker's values
        first = tf.Variable([own, secrets.randbits(31)], dtype=tf.int64, trainable=False)
    state, seed = first.numpy().tolist()
    (differing,) = sums_over_replicas(strategy, lambda: [tf.constant(int(own != state))])
    if differing:
        keras.utils.set_random_seed(seed)
