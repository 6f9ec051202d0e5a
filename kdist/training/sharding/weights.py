"""Weights that are divided among the replicas of each process (ZeRO, stage 3).

    strategy = kdist.create_strategy("mirrored", devices=4, shard="weights")
    with strategy.scope():
        layer = keras.layers.Dense(4096)  # its kernel is a `ShardedVariable`

Each replica holds 1/N of a large weight. Where a program reads the weight, its parts are gathered.
Within a step, `kdist.training.sharding.step` gathers them, and gathers them again in the backward
pass. Elsewhere, as in `get_weights` or where a file is written, the whole weight is on one device
for as long as it is used.

A weight is divided when it is created, so that no device ever has to hold all weights. Of several
processes with several devices, each holds all of them: gradients are added up within a process, and
then the parts of processes, on the devices of the same place. Processes with one device each divide
the weights among all. Outside of steps, a weight is then read by all of them together, or after all
have called `kdist.training.sharding.whole_state.share`.
"""

import contextlib
import functools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.tensorflow import first_replica, record_read, run_once, unrecorded
from kdist.training.divided_variable import DividedVariable
from kdist.training.replica import step as steps
from kdist.training.replica.reduction import sum_over_workers, sums_over_replicas
from kdist.training.scopes import is_multi_worker, outside_any_scope, this_local_replica
from kdist.training.sharding.parts import (
    Shard,
    is_large,
    refuse_part_in_checkpoints,
    sharded_state,
)
from kdist.training.sharding.readers import READ_WHOLE, await_readers


class ShardedVariable(keras.Variable):
    """A Keras variable of which each replica holds a part.

    Variables become one when they are initialized, and behave like a whole variable.

    Attributes:
        shard: the parts, a `Shard`.
        shared: the whole weight, where several workers divide it and have shared their parts.
    """

    shard: Shard
    shared: np.ndarray | None = None

    @property
    def _value(self):
        """The whole weight, as a tensor. Keras computes and saves with it."""
        step = steps.current()
        return self.gathered() if step is None else step.sharded_value(self)

    @property
    def overwrite_with_gradient(self):
        """True if the optimizer assigns the gradient, as Keras sets for the scales of float8."""
        return self._overwrite_with_gradient

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value):
        if value:
            size = self.shape.num_elements() * tf.as_dtype(self.dtype).size
            raise ValueError(
                f'{self.path!r} is divided over the devices by shard="weights", but each device '
                f"needs all of it, as for float8. Keep it whole by min_shard_bytes={size + 1}, or "
                'use shard="optimizer"'
            )
        self._overwrite_with_gradient = value

    @property
    def handle(self):
        """Handle by which gradient tapes identify the weight: that of the replica's part."""
        step = steps.current()
        if step is None:
            raise ValueError(
                f'a gradient with respect to {self.path!r}, which shard="weights" divides over the '
                "devices, is computed outside of kdist's steps. Train a kdist.Model, such as "
                "kdist.Model.of(keras.saving.load_model(path)), or compute it in a function that "
                'is decorated by `@kdist.step(strategy)`, or use shard="optimizer"'
            )
        return self.own_part(step).handle

    def recorded(self, whole: tf.Tensor, step: "steps.ReplicaStep") -> tf.Tensor:
        """Makes gradient tapes regard a gathered tensor as the weight's value, and returns it."""
        part = self.own_part(step)
        record_read(whole, part.handle, part.dtype)
        return whole

    def _export_to_saved_model_graph(self, *args, **kwargs):
        raise ValueError(
            f'{self.path!r} is divided over the devices by shard="weights", and TensorFlow cannot '
            "write it to a SavedModel. Use model.export(path), or save a .keras file, load it "
            "outside of the strategy's scope, and export that model"
        )

    def own_part(self, step: "steps.ReplicaStep") -> tf.Variable:
        """Returns the variable of this replica's part."""
        return self.shard.copies[step.local_replica]

    def gathered(self) -> tf.Tensor:
        """Returns the whole weight, on the current device.

        Raises:
            ValueError: each worker has parts of it, and not all of them read it.
        """
        if self.shard.is_divided_over_workers:
            return self._of_all_workers()
        with unrecorded():
            return self.shard.division.merge([tf.identity(copy) for copy in self.shard.copies])

    def _of_all_workers(self):
        if self.shared is not None:
            return tf.constant(self.shared)
        if tf.executing_eagerly():
            await_readers(self.shard.whole.strategy, repr(self.path))
            return tf.constant(self.shard.whole.whole())
        # Keras also traces layers to find the shapes of their outputs, and does not run that graph.
        message = (
            f"a function of TensorFlow reads {self.path!r} outside of kdist's steps, and each "
            'worker has a part of it (shard="weights"). Decorate the function by '
            f"@kdist.step(strategy), or call it {READ_WHOLE}"
        )
        with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
            return tf.zeros(self.shape, self.dtype)

    def _direct_assign(self, value):
        step = steps.current()
        if step is not None:
            step.assign_sharded(self, value)
            return
        for part, copy in zip(self.shard.whole.parts(value), self.shard.copies, strict=True):
            copy.assign(tf.cast(part, copy.dtype))
        if self.shared is not None:
            self.shared = np.array(value, self.shared.dtype)


def initialize(variable: keras.Variable, value) -> bool:
    """Divides a weight that is being created in a scope with `shard="weights"`.

    Args:
        variable: a Keras variable that has no value yet.
        value: its initial value, or a function that returns it.

    Returns:
        True if the variable has been divided; False if it is to be initialized as usual.
    """
    strategy = tf.distribute.get_strategy()
    if sharded_state(strategy) != "weights" or not tf.distribute.in_cross_replica_context():
        return False
    if isinstance(value, tf.Variable) or type(variable) is not keras.Variable:
        return False
    if not variable.trainable:
        return False
    shape = tuple(variable.shape if callable(value) else value.shape)
    if not tf.as_dtype(variable.dtype).is_floating or not is_large(shape, variable.dtype, strategy):
        return False
    with tf.init_scope(), steps.activate(None):
        # On the host, so that no device has to hold all of it.
        with tf.device("CPU:0"):
            value = tf.cast(value() if callable(value) else value, variable.dtype)
        variable._shape = shape
        shard = Shard.of(variable, strategy, is_only_copy=True)
        variable.__dict__.pop("_value", None)
        variable.__class__ = ShardedVariable
        variable.shard = shard
        if shard.is_divided_over_workers:
            value = _of_first_worker(value, strategy)
        variable._direct_assign(value)
        if is_multi_worker(strategy) and not shard.is_divided_over_workers:
            _send_from_first_worker(shard, strategy)
    refuse_part_in_checkpoints(variable, "weight")
    return True


def _send_from_first_worker(shard, strategy):
    """Assigns the first worker's parts on all workers, which may have drawn other numbers."""
    is_first = first_replica(strategy) == 0

    def send():
        copy = shard.copies[this_local_replica()]
        (value,) = sum_over_workers([copy if is_first else tf.zeros_like(copy)])
        copy.assign(value)

    run_once(strategy, send)


def _of_first_worker(value, strategy):
    """Returns the first worker's value of a tensor of which other workers may have drawn another.

    Each worker has one device.
    """
    is_first = first_replica(strategy) == 0
    (total,) = sums_over_replicas(strategy, lambda: [value if is_first else tf.zeros_like(value)])
    return total


def sharded_weights(model: keras.Model) -> list[ShardedVariable]:
    """Returns those weights of a model that are divided."""
    return [each for each in model.variables if isinstance(each, ShardedVariable)]


def as_divided(variable: keras.Variable) -> DividedVariable:
    """Returns a variable as files and checkpoints see it."""
    if isinstance(variable, ShardedVariable):
        return variable.shard.whole
    return DividedVariable([variable])


def stored(variable: keras.Variable) -> keras.Variable:
    """Returns the variable that the devices hold: that of the parts of a divided weight."""
    return variable.shard.variable if isinstance(variable, ShardedVariable) else variable


@contextlib.contextmanager
def whole_weights(model: keras.Model) -> Iterator[None]:
    """Returns a context manager in which divided weights are whole variables, on the host.

    TensorFlow writes such variables to SavedModels.
    """
    divided = sharded_weights(model)
    try:
        for weight in divided:
            on_host = outside_any_scope(functools.partial(_on_host, weight.gathered()))
            weight.__class__ = keras.Variable
            del weight.__dict__["_serialize_to_tensors"]
            weight.__dict__["_value"] = on_host
        yield
    finally:
        for weight in divided:
            weight.__dict__.pop("_value", None)
            weight.__class__ = ShardedVariable
            refuse_part_in_checkpoints(weight, "weight")


def _on_host(value):
    with tf.device("CPU:0"):
        return tf.Variable(value, trainable=False)
