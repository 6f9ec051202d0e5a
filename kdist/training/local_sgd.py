"""Local SGD: replicas train alone for k steps, then their weights are averaged.

    model.compile("sgd", loss, local_steps=8)

A local step communicates with no other replica. Each replica computes the gradient of its own rows,
clips it, checks it for infinity, and applies it to its own copy of the weights. A round ends after
k steps and at the end of each epoch. Then weights, and the state that layers wrote, become the mean
over all replicas, each with the same weight. A replica without rows in a step uses a gradient of
zero, and its layers keep their state.

A loss that is a mean over a mask or over sample weights uses those of the replica's own rows. For a
loss that is a sum over rows, the replica's own rows represent those of the batch. If a loss scale
finds gradients that are not finite, only that replica skips its update. At the end of a round, all
replicas continue with the smallest scale and the largest count of updates.

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from kdist.compat.tensorflow import function_of_its_own
from kdist.training.optimizers import counter_of
from kdist.training.replica.gradients import SplitSlices
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.replica.row_shares import fraction
from kdist.training.replica.step import ReplicaStep, can_be_averaged
from kdist.training.scopes import (
    has_copies,
    has_parameter_servers,
    in_new_thread,
    this_local_replica,
    this_replica,
    variable_like,
)
from kdist.training.sharding.parts import sharded_state

# What happens to an optimizer's slots, such as momenta, when weights are averaged.
SLOTS = ("keep", "average", "reset")


def check(local_steps, local_slots, strategy: tf.distribute.Strategy):
    """Checks the arguments of `compile` under `strategy`.

    Raises:
        ValueError: an argument is invalid, or replicas share their variables.
    """
    if local_slots not in SLOTS:
        raise ValueError(f"local_slots must be one of {', '.join(SLOTS)}, got {local_slots!r}")
    if local_steps is None:
        if local_slots != "keep":
            raise ValueError(
                f"local_slots={local_slots!r} (--local_slots) has no effect without local_steps; "
                "add local_steps=k, or leave it out"
            )
        return
    if not isinstance(local_steps, int) or local_steps < 1:
        raise ValueError(
            "local_steps must be None (gradients are reduced in every step) or a positive integer, "
            f"got {local_steps!r}"
        )
    if sharded_state(strategy):
        raise ValueError(
            f"local_steps={local_steps} (--local_steps): every replica updates all weights within "
            f"a round, and shard={strategy.layout.shard} divides the update; leave one of them out"
        )
    is_alone = strategy.num_replicas_in_sync == 1 and not has_parameter_servers(strategy)
    if not (is_alone or has_copies(strategy)):
        raise ValueError(
            f"local_steps={local_steps} (--local_steps): every replica needs its own weights, "
            "and under this strategy they share them; use --strategy=mirrored or multi_worker, or "
            "omit local_steps"
        )


class LocalStep(ReplicaStep):
    """One replica's part of one micro-step, without communication.

    Args:
        rows: this replica's rows of the batch, over all micro-steps.
        rounds: the `Rounds`.
        others: the arguments of `ReplicaStep`, in order.
    """

    communicates = False

    def __init__(self, rows, rounds, *others):
        super().__init__(*others)
        self._rows, self._rounds = rows, rounds

    @property
    def weight(self):
        """Weight of a micro-step's loss: its fraction of this replica's rows."""
        return fraction(self.share.rows, self._rows)

    @property
    def sum_weight(self):
        """Weight of a sum over rows: this replica's own rows represent those of the batch."""
        return fraction(self.share.batch_rows, self._rows)

    def note_gather(self, is_whole_loss):
        """Raises an error: replicas do not communicate within a round."""
        raise ValueError("gather_batch: with local_steps, each replica trains on its own rows")

    def correct_mean(self, loss, divisor, rows):
        """Returns the mean over a mask or over weights of this replica alone."""
        return loss

    def gradients(self, optimizer, gradients, variables):
        """Returns the gradients of this replica's rows; None before the last micro-step."""
        self._rounds.note_update(optimizer, variables)
        return super().gradients(optimizer, gradients, variables)

    def reduced(self, gradients):
        """Returns the gradients as they are: each replica has its own."""
        return [g.joined() if isinstance(g, SplitSlices) else g for g in gradients]

    def average_state(self, except_for):
        """Records variables that layers wrote, which are averaged at the end of the round."""
        self._rounds.note_written(v for v in self._written.values() if can_be_averaged(v))

    @contextlib.contextmanager
    def undoing_if_empty(self, variables):
        """Restores metrics and layer state at the end if this replica has no rows."""
        copies = [self.local(v.value) for v in self._state()] if self.share.may_be_empty else []
        before = [tf.identity(copy) for copy in copies]
        with super().undoing_if_empty(variables):
            yield
        for copy, value in zip(copies, before, strict=True):
            copy.assign(tf.where(self.share.rows > 0, copy, value))

    def _state(self):
        return [v for v in self._rounds.state() if can_be_averaged(v)]


class Rounds:
    """Counts local steps, and averages the replicas' copies at the end of a round.

    Args:
        trainer: the compiled model.
        length: number of local steps per round.
        slots: one of `SLOTS`.

    Attributes:
        done: number of steps of the current round that have been run.

    Raises:
        ValueError: a layer communicates in every step.
    """

    def __init__(self, trainer, length: int, slots: str):
        _check_no_layer_communicates(trainer)
        self._trainer, self._length, self._slots = trainer, length, slots
        self._strategy = trainer.distribute_strategy
        self._replicas = self._strategy.num_replicas_in_sync
        self.done = 0
        self._updated: dict[int, keras.Variable] = {}
        self._written: dict[int, keras.Variable] = {}
        self._optimizers: dict[int, keras.optimizers.Optimizer] = {}
        is_eager = trainer.run_eagerly
        self._average_now = self._average if is_eager else function_of_its_own(self._average)

    # Called by steps while they are traced.

    def note_update(self, optimizer, variables):
        """Records that `optimizer` updates `variables`."""
        self._optimizers[id(optimizer)] = optimizer
        self._updated.update((id(variable), variable) for variable in variables)

    def note_written(self, variables):
        """Records variables that layers wrote and that can be averaged."""
        self._written.update((id(variable), variable) for variable in variables)

    def state(self):
        """Returns the variables that layers may write."""
        return self._trainer.non_trainable_variables

    # When a round ends.

    def count(self, steps: int):
        """Returns the round's steps so far, an int32 scalar, and counts the next `steps`."""
        done, self.done = self.done, (self.done + steps) % self._length
        return tf.constant(done)

    def end_of_step(self, done):
        """Ends the round if it is complete; called after each step, inside its function.

        Args:
            done: number of steps before this one since the round of `count` began, an int32 scalar.
        """
        if self._length == 1:
            self._average()
        else:
            is_last = (done + 1) % self._length == 0
            tf.cond(is_last, self._average, lambda: tf.constant(False))

    def end(self):
        """Ends the current round, if any; all workers must call it at the same time."""
        if self.done:
            self.done = 0
            self._average_now()

    # Averages.

    def _average(self):
        initial = self._initial_values() if self._slots == "reset" else []
        on_replica = functools.partial(self._on_replica, initial)
        self._strategy.run(tf.autograph.experimental.do_not_convert(on_replica))
        return tf.constant(True)

    def _on_replica(self, initial):
        copies = [_replica_copy(variable) for variable in self._averaged()]
        sums = all_reduce_sum([_wide(copy) for copy in copies])
        for copy, total in zip(copies, sums, strict=True):
            copy.assign(tf.cast(total / self._replicas, copy.dtype))
        for slot, value in initial:
            copy = _replica_copy(slot)
            copy.assign(tf.fill(copy.shape, tf.cast(value, copy.dtype)))
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                self._agree(optimizer)

    def _averaged(self):
        """Returns weights, their moving averages, layer state, and slots if they are averaged."""
        variables = [*self._updated.values()]
        variables += [v for key, v in self._written.items() if key not in self._updated]
        for optimizer in map(_inner, self._optimizers.values()):
            variables += _moving_averages(optimizer)
            variables += _slots(optimizer) if self._slots == "average" else []
        return variables

    def _agree(self, optimizer):
        """Sets the smallest loss scale and the largest count of updates on all replicas.

        A replica whose gradients were not finite has skipped an update that others made.
        """
        for variable, choose in (
            (optimizer.dynamic_scale, tf.reduce_min),
            (optimizer.step_counter, tf.reduce_min),
            (counter_of(optimizer), tf.reduce_max),
        ):
            copy = _replica_copy(variable)
            place = tf.one_hot(this_replica(), self._replicas, dtype=copy.dtype)
            (values,) = all_reduce_sum([copy * place])
            copy.assign(choose(values))

    def _initial_values(self):
        """Returns (slot, initial value of its elements) of all optimizers."""
        # Variables can be created neither in a function's graph nor, here, in the strategy's scope.
        # Both belong to threads.
        optimizers = [_inner(optimizer) for optimizer in self._optimizers.values()]
        return in_new_thread(
            lambda: [pair for optimizer in optimizers for pair in _initial_values(optimizer)]
        )


def _check_no_layer_communicates(trainer):
    for layer in trainer._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"local_steps (--local_steps): the layer {layer.name!r} is synchronized, so that "
                "replicas would communicate in every step; make its BatchNorm per replica "
                "(synchronized=False, --nosync_batch_norm), or omit local_steps"
            )


def _initial_values(optimizer):
    """Returns (slot, initial value) pairs of an optimizer, read from a new copy of it."""
    config = {**optimizer.get_config(), "learning_rate": 0.0}
    with tf.device("CPU:0"):
        like_it = type(optimizer).from_config(config)
        # Slots are filled uniformly: one element tells the value.
        like_it.build(
            [variable_like(v, [1] * len(v.shape)) for v in optimizer._trainable_variables]
        )
        values = [slot.numpy().flat[0] for slot in _float_slots(like_it)]
    return list(zip(_float_slots(optimizer), values, strict=True))


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _slots(optimizer):
    """Returns the slots that have a copy per replica."""
    return [slot for slot in _float_slots(optimizer) if can_be_averaged(slot)]


def _float_slots(optimizer):
    """Returns the float variables other than counter, rate, averages, and gradients."""
    others = [
        *(optimizer._iterations, optimizer._learning_rate),
        *_moving_averages(optimizer),
        *(getattr(optimizer, "_accumulated_gradients", None) or []),
    ]
    known = {id(variable) for variable in others}
    return [
        variable
        for variable in optimizer.variables
        if id(variable) not in known and tf.as_dtype(variable.dtype).is_floating
    ]


def _moving_averages(optimizer):
    averages = getattr(optimizer, "_model_variables_moving_average", None) or []
    return [variable for variable in averages if variable is not None]


def _replica_copy(variable):
    """Returns this replica's copy of a Keras variable, in replica context."""
    strategy = tf.distribute.get_strategy()
    return strategy.experimental_local_results(variable.value)[this_local_replica()]


def _wide(copy):
    """Returns the value in a type in which a sum over replicas keeps its precision."""
    return tf.cast(copy, tf.float32) if copy.dtype.size < 4 else tf.identity(copy)
