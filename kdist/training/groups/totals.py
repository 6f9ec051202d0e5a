"""Totals over all replicas of all workers, computed at the end of each step group.

Each replica has its own metric variables. Their value is the sum over replicas. Across workers that
sum is a collective, which all workers must start at the same time. Therefore it is computed at the
end of each step group, inside its function, and logs that are read later are plain numbers.
"""

import keras
import tensorflow as tf

from kdist.training.groups.monitors import NONE_YET
from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.replica.step import this_replica
from kdist.training.scopes import (
    is_multi_worker,
    num_local_replicas,
    outside_multi_worker_scope,
)


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
        monitor: its `LossMonitor`; None in evaluation.
        votes: its `WorkerVotes`; None in evaluation.
    """

    def __init__(self, trainer, monitor=None, votes=None):
        self._trainer = trainer
        self._strategy = trainer.distribute_strategy
        self._monitor, self._votes = monitor, votes

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
        bad = (
            tf.constant(NONE_YET, tf.int64) if self._monitor is None else self._monitor.on_replica()
        )
        # One entry per replica, shifted such that NONE_YET is 0.
        bad_steps = (bad - NONE_YET) * tf.one_hot(replica, replicas, dtype=tf.int64)
        vote = tf.zeros([], tf.int64)
        if self._votes is not None:
            vote = self._votes.on_replica(this_replica() % num_local_replicas(self._strategy))
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
