"""Monitors of steps, and totals over all replicas of all workers.

Monitors record the first step with a non-finite loss, and the staleness of gradients. They record
inside the step's graph. Nothing is read back from the device until it is needed.

Each replica has its own metric variables. Their value is the sum over replicas. Across workers that
sum is a collective, which all workers must start at the same time. Therefore it is computed at the
end of each step group, inside its function, and logs that are read later are plain numbers.
"""

import dataclasses
import functools

import keras
import tensorflow as tf

from kdist.training.optimizers import counter_of
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.scopes import (
    is_multi_worker,
    outside_multi_worker_scope,
    shares_storage,
    this_local_replica,
)

# Value of "first bad step" before there is one.
NONE_YET = -1


class LossMonitor:
    """Records, on each replica's device, the first step whose running loss was not finite.

    The check is part of the step's graph, so that it sees every step of a group.

    Args:
        trainer: the compiled model. Its loss tracker is checked after each step.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._first_bad_steps = None
        with trainer.distribute_strategy.scope():
            self._first_bad = tf.Variable(
                NONE_YET,
                dtype=tf.int64,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                name="first_nonfinite_step",
            )

    def reset(self):
        """Clears the record of earlier training."""
        self._first_bad_steps = None
        # Each replica's own variable: TensorFlow warns about `strategy.run` outside a function.
        strategy = self._trainer.distribute_strategy
        for own in strategy.experimental_local_results(self._first_bad):
            own.assign(NONE_YET)

    def watching(self, train_step):
        """Returns `train_step` followed by the check, to be called in replica context."""

        @functools.wraps(train_step)
        def step(data):
            logs = train_step(data)
            if self._trainer.optimizer is not None:
                self._check()
            return logs

        return step

    def _check(self):
        loss = self._trainer._loss_tracker.total
        if shares_storage(self._trainer.distribute_strategy):  # and so this record
            (loss,) = all_reduce_sum([tf.convert_to_tensor(loss)])
        step = tf.cast(counter_of(self._trainer.optimizer), tf.int64)
        is_first = (self._first_bad < 0) & ~tf.math.is_finite(loss)
        self._first_bad.assign(tf.where(is_first, step, self._first_bad))

    def on_replica(self):
        """Returns this replica's record: an int64 scalar, a step or `NONE_YET`."""
        return tf.convert_to_tensor(self._first_bad)

    def first_bad_step(self) -> int | None:
        """Returns the first step (from 1) with a non-finite loss on any replica, if any.

        With several workers, the result is that of the last step group, the same on all workers.
        """
        parts = self._first_bad_steps
        if parts is None:
            strategy = self._trainer.distribute_strategy
            parts = strategy.experimental_local_results(self._first_bad)
        return min((int(part) for part in parts if int(part) != NONE_YET), default=None)

    def note(self, first_bad_steps):
        """Stores the records of all replicas in the job, an int64 tensor (replicas,)."""
        self._first_bad_steps = first_bad_steps


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Staleness of the gradients: updates by other workers between a step's read and its update.

    Attributes:
        steps: number of steps.
        mean: mean over the steps.
        largest: maximum over the steps.
    """

    steps: int = 0
    mean: float = 0.0
    largest: int = 0


class AsynchronousMonitor:
    """The coordinator's record of non-finite losses and staleness since the last `reset`."""

    def __init__(self):
        self.reset()

    def reset(self):
        """Clears the record of earlier training."""
        self._steps = self._sum = self._largest = 0
        self._first_bad: int | None = None

    def note(self, steps, staleness, largest_staleness, first_bad):
        """Adds the facts of one group: totals over its steps, and a bad step or `NONE_YET`."""
        self._steps += int(steps)
        self._sum += int(staleness)
        self._largest = max(self._largest, int(largest_staleness))
        if first_bad != NONE_YET:
            self._first_bad = min(int(first_bad), self._first_bad or int(first_bad))

    def staleness(self) -> Staleness:
        """Returns the staleness of all steps."""
        return Staleness(self._steps, self._sum / max(1, self._steps), self._largest)

    def first_bad_step(self) -> int | None:
        """Returns the first step (from 1) with a non-finite loss, if any."""
        return self._first_bad


class WorkerVotes:
    """Sum of one number per worker, known to all workers after each step group.

    Workers use it to agree on an action, such as a checkpoint, at the same step.

    Args:
        strategy: the model's strategy. With one worker the sum is its own number.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._own, self._total = 0, None
        self._variable = None
        if is_multi_worker(strategy):
            self._variable = outside_multi_worker_scope(lambda: tf.Variable(0, dtype=tf.int64))

    def vote(self, number: int):
        """Sets this worker's number."""
        self._own = number
        if self._variable is not None:
            self._variable.assign(number)

    def reset(self):
        """Sets this worker's number and the known sum to 0."""
        self._total = None
        self.vote(0)

    def total(self) -> int:
        """Returns the sum at the end of the last step group.

        With several workers this waits for the end of that group.
        """
        if self._variable is None:
            return self._own
        return 0 if self._total is None else int(self._total)

    def on_replica(self, local_replica):
        """Returns this replica's term of the sum, in replica context."""
        is_first = local_replica == 0
        return self._variable.read_value() if is_first else tf.zeros([], tf.int64)

    def note(self, total):
        """Stores the sum over all replicas, an int64 scalar."""
        self._total = total


class MetricTotals:
    """Computes metrics, non-finite losses, and votes over all replicas of all workers.

    Args:
        trainer: the compiled model.
        monitor: its `LossMonitor`; None in evaluation, in which workers do not vote.
    """

    def __init__(self, trainer, monitor):
        self._trainer = trainer
        self._strategy = trainer.distribute_strategy
        self._monitor = monitor

    def results(self, read):
        """Returns (metric results, first bad step of each replica, sum of votes).

        Must be called inside a `tf.function`.

        Args:
            read: function that returns the results.
        """
        variables = self._trainer.metrics_variables
        sums = self._strategy.run(self._on_replica, args=())
        *values, first_bad, votes = [self._strategy.experimental_local_results(x)[0] for x in sums]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return read(), first_bad + NONE_YET, votes

    def mean(self, logs):
        """Returns the mean over replicas of the logs of a custom `train_step`."""
        mean = tf.distribute.ReduceOp.MEAN
        return keras.tree.map_structure(lambda x: self._strategy.reduce(mean, x, None), logs)

    def _on_replica(self):
        replicas = self._strategy.num_replicas_in_sync
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        variables = [variable.value for variable in self._trainer.metrics_variables]
        parts = [_term(variable, replica, replicas) for variable in variables]
        bad, vote = tf.constant(NONE_YET, tf.int64), tf.zeros([], tf.int64)
        if self._monitor is not None:
            bad = self._monitor.on_replica()
            vote = self._trainer.training_state.votes.on_replica(this_local_replica())
        # One entry per replica, shifted such that NONE_YET is 0.
        bad_steps = (bad - NONE_YET) * tf.one_hot(replica, replicas, dtype=tf.int64)
        return _packed_sums([*parts, bad_steps, vote])


def _packed_sums(tensors):
    """Returns sums of tensors of several types, sent as one message.

    float64 represents all of them, and counts up to 2^53 exactly.
    """
    sums = all_reduce_sum([tf.cast(tensor, tf.float64) for tensor in tensors])
    return [tf.cast(total, tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]


def _term(variable, replica, replicas):
    """Returns a replica's term of the value that TensorFlow reads in cross-replica context."""
    aggregation = getattr(variable, "aggregation", tf.VariableAggregation.NONE)
    value = tf.convert_to_tensor(variable)
    if aggregation == tf.VariableAggregation.SUM:
        return value
    if aggregation == tf.VariableAggregation.MEAN:
        return value / replicas
    return tf.where(replica == 0, value, tf.zeros_like(value))
