"""What all workers of a job know after a group of steps: the same, so that they decide alike.

Metrics are kept on each replica. Reading them adds up the replicas' parts, and across workers that
is a message that all of them have to wait for at the same moment. So the parts are added up at the
end of each group, in the group's own function; whoever reads logs later, reads a number that is
there.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.training.finite import NONE_YET
from kdist.training.reduction import all_reduce_sum
from kdist.training.step import this_replica


def are_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas run in several processes."""
    return replicas_here(strategy) < strategy.num_replicas_in_sync


def replicas_here(strategy: tf.distribute.Strategy) -> int:
    """How many replicas this process runs."""
    # TensorFlow's default strategy, of a model that is in none, does not say its devices.
    several = strategy.num_replicas_in_sync > 1
    return len(strategy.extended.worker_devices) if several else 1


def outside_of_scope(function: Callable[[], Any]):
    """What `function` gives, called outside of the scope of a strategy of several workers.

    A variable that is made in the scope is sent around by collectives. Keras makes some in
    passing, when a model is saved, which only one worker does: it would wait for the others.
    """
    if not (tf.distribute.has_strategy() and are_several_workers(tf.distribute.get_strategy())):
        return function()
    return in_another_thread(function)


def outside_of_strategy(function: Callable[[], Any]):
    """What `function` gives, called in no strategy's scope; under the same dtype policy."""
    if not tf.distribute.has_strategy():
        return function()
    policy = keras.config.dtype_policy()

    def called():
        keras.config.set_dtype_policy(policy)  # each thread has its own
        return function()

    return in_another_thread(called)


def in_another_thread(function: Callable[[], Any]):
    """What `function` gives in a thread that is in no scope, no function and on no replica."""
    with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(function).result()


class Asked:
    """A number that each worker may set, and whose sum all know after a group of steps.

    So all of them take up together, at the same step, what one of them asks for.

    Args:
        strategy: with one worker, the number is its own.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._own, self._sum = 0, None
        self._variable = None
        if are_several_workers(strategy):
            self._variable = outside_of_scope(lambda: tf.Variable(0, dtype=tf.int64))

    def ask(self, number: int):
        """Sets this worker's number."""
        self._own = number
        if self._variable is not None:
            self._variable.assign(number)

    def reset(self):
        """Nobody asks for anything."""
        self._sum = None
        self.ask(0)

    def of_all(self) -> int:
        """The sum as of the end of the last group; waits for it where there are several workers."""
        if self._variable is None:
            return self._own
        return 0 if self._sum is None else int(self._sum)

    def on_replica(self, replica_here):
        """What a replica adds, in replica context."""
        is_first = replica_here == 0
        return self._variable.read_value() if is_first else tf.zeros([], tf.int64)

    def note(self, total):
        """Takes the sum over all replicas, an int64 scalar."""
        self._sum = total


class Together:
    """Gives the metrics, and what the `FiniteWatch` saw, over all replicas of all workers.

    Args:
        trainer: the compiled model.
        watch: its `FiniteWatch`; None in evaluation.
        asked: an `Asked`; None in evaluation.
    """

    def __init__(self, trainer, watch=None, asked=None):
        self._trainer = trainer
        self._strategy = trainer.distribute_strategy
        self._watch, self._asked = watch, asked

    def results(self):
        """(the metrics' results, each replica's first bad step, the sum of what workers ask).

        Within a function.
        """
        variables = self._trainer.metrics_variables
        sums = self._strategy.run(self._on_replica, args=())
        *values, first_bad, asked = [self._strategy.experimental_local_results(x)[0] for x in sums]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return self._trainer.get_metrics_result(), first_bad + NONE_YET, asked

    def mean(self, logs):
        """The logs of a step of the user's own, averaged over replicas, within a function."""
        mean = tf.distribute.ReduceOp.MEAN
        return keras.tree.map_structure(lambda x: self._strategy.reduce(mean, x, None), logs)

    def _on_replica(self):
        replicas = self._strategy.num_replicas_in_sync
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        variables = [variable.value for variable in self._trainer.metrics_variables]
        parts = [_part(variable, replica, replicas) for variable in variables]
        bad = tf.constant(NONE_YET, tf.int64) if self._watch is None else self._watch.on_replica()
        # Each replica's number in a place of its own, counted from where "none yet" is zero.
        places = (bad - NONE_YET) * tf.one_hot(replica, replicas, dtype=tf.int64)
        asks = tf.zeros([], tf.int64)
        if self._asked is not None:
            asks = self._asked.on_replica(this_replica() % replicas_here(self._strategy))
        return _sums_in_one_message([*parts, places, asks])


def _sums_in_one_message(tensors):
    """Sums of tensors of several types: float64 holds them all, counts up to 2^53 exactly."""
    sums = all_reduce_sum([tf.cast(tensor, tf.float64) for tensor in tensors])
    return [tf.cast(total, tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]


def _part(variable, replica, replicas):
    """What a replica adds, such that the sum is what TensorFlow reads outside of replicas."""
    aggregation = getattr(variable, "aggregation", tf.VariableAggregation.NONE)
    value = tf.convert_to_tensor(variable)
    if aggregation == tf.VariableAggregation.SUM:
        return value
    if aggregation == tf.VariableAggregation.MEAN:
        return value / replicas
    return tf.where(replica == 0, value, tf.zeros_like(value))
