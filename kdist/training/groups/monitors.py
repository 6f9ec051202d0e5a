"""Step monitors: the first step with a non-finite loss, and the staleness of gradients.

They record inside the step's graph. Nothing is read back from the device until it is needed.
"""

import dataclasses
import functools

import tensorflow as tf

from kdist.training.replica.reduction import all_reduce_sum
from kdist.training.scopes import shares_storage

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
        step = tf.cast(self._trainer.optimizer.iterations, tf.int64)
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
