"""Setup of TensorFlow strategies for training, whether kdist or the program has created them."""

import contextlib
import functools
import hashlib
import logging
import random
import secrets
import sys
import threading
import time
import weakref

import keras
import tensorflow as tf

from kdist.compat.keras import TensorFlowTrainer
from kdist.compat.tensorflow import abort_collectives, exchange_all_types, reuse_collective_keys
from kdist.exit_codes import PEER_HANGS
from kdist.training.parameter_server.variables import Partitioner, partition_embeddings
from kdist.training.replica.reduction import sums_over_replicas
from kdist.training.scopes import has_parameter_servers, is_multi_worker

_logger = logging.getLogger(__name__)
_CHECKS_PER_LIMIT = 20
# Strategies of several devices that `create_strategy` returned, while a program refers to them.
_created: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# Models that have been reported.
_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_USE_KDIST = "Call kdist.patch_keras() before it is created, or train kdist.Model.of(model)"
_USE_KERAS_3 = (
    "It is a model of tf_keras, which is Keras 2. Import keras instead, or unset "
    "TF_USE_LEGACY_KERAS if tf.keras is meant"
)
# Reasons of `abort_steps`.
_abort_reasons: list[str] = []


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
        exchange_all_types()
        reuse_collective_keys(strategy)
        if step_timeout_seconds:
            extended._kdist_step_limit = StepTimeout(step_timeout_seconds)
        if equalizes_seeds and is_multi_worker(strategy):
            _equalize_seeds(strategy)


def note_created(strategy: tf.distribute.Strategy):
    """Remembers a strategy of `create_strategy`; models that do not train by it are reported."""
    if strategy.num_replicas_in_sync > 1 or has_parameter_servers(strategy):
        _created.add(strategy)
        _report_plain_models(TensorFlowTrainer, _USE_KDIST)
        if legacy_keras := sys.modules.get("tf_keras"):
            _report_plain_models(legacy_keras.Model, _USE_KERAS_3)


@functools.cache
def _report_plain_models(trainer: type, remedy: str):
    """Logs, once per model, that Keras alone trains it with a strategy of `create_strategy`.

    A program that forgets `kdist.patch_keras()`, or uses Keras 2, would get the numbers of plain
    Keras.

    Args:
        trainer: the class with Keras's `make_train_function`.
        remedy: what to change.
    """
    make = trainer.make_train_function  # type: ignore[attr-defined]

    @functools.wraps(make)
    def make_train_function(model, *args, **kwargs):
        is_plain = not hasattr(model, "training_state")
        if is_plain and model.distribute_strategy in _created and model not in _warned:
            _warned.add(model)
            _logger.warning(
                "%r is trained by Keras alone, whose numbers differ from those of one device. %s",
                model.name,
                remedy,
            )
        return make(model, *args, **kwargs)

    trainer.make_train_function = make_train_function  # type: ignore[attr-defined]


def warn_outside_scope(model: keras.Model):
    """Logs, once per model, that its training uses none of the strategies of the program.

    Without this message, a model that was created outside of the scope trains on one device.
    """
    if not _created or model._distribute_strategy or model in _warned:
        return
    _warned.add(model)
    _logger.warning(
        "%r trains on one device, because it was created outside of strategy.scope(). Create or "
        "load it, and compile it, within `with strategy.scope():`. If one device is intended, use "
        'the scope of kdist.create_strategy("one_device")',
        model.name,
    )


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


def step_timeout_of(strategy: tf.distribute.Strategy):
    """Returns a context manager for a call that waits for other workers, and fails past the limit.

    Raises:
        tf.errors.DeadlineExceededError: another worker does not take part. From then on, every
            collective of this process fails.
    """
    limit = getattr(strategy.extended, "_kdist_step_limit", None)
    return contextlib.nullcontext() if limit is None else limit.running()


def abort_steps(reason: str):
    """Ends training in this process: a step that waits for other workers exits with code 75.

    Args:
        reason: what has happened.
    """
    _abort_reasons.append(reason)
    abort_collectives(reason)


class StepTimeout:
    """Aborts collectives that take longer than `seconds`.

    TensorFlow's own timeout of a collective keeps one thread asleep per collective for its whole
    duration, thousands of threads at a thousand steps per minute. Here one thread checks the time.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._began: float | None = None
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), seconds), daemon=True)
        thread.start()

    @contextlib.contextmanager
    def running(self):
        """Measures the time of the enclosed call."""
        self._began = time.monotonic()
        try:
            yield
        except tf.errors.OpError:
            if _abort_reasons:  # logged before
                raise SystemExit(PEER_HANGS) from None
            raise
        finally:
            self._began = None

    def check(self):
        """Aborts collectives if the current call exceeds the limit."""
        began = self._began
        if began is not None and time.monotonic() - began > self._seconds:
            abort_collectives(
                f"a step took longer than {self._seconds:g} s: another worker has stopped, died, "
                "or runs something else. Look at its output; if steps are that slow, raise "
                "--step_timeout_seconds"
            )
            self._began = None


def _watch(limit_of, seconds):
    while (limit := limit_of()) is not None:
        limit.check()
        del limit
        time.sleep(seconds / _CHECKS_PER_LIMIT)
