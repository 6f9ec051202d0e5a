"""Notes the step at which the loss stopped being a finite number, without reading it back."""

import tensorflow as tf

# Stands for a step.
NONE_YET = -1


class FiniteWatch:
    """Remembers, on each replica's device, the first step whose running loss was not finite.

    The check is part of the step's graph, so it sees every step of a group; reading it is a
    matter of when somebody asks.

    Args:
        trainer: the compiled model; its loss tracker is watched after each step.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._noted = None
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
        """Forgets what earlier training saw."""
        self._noted = None
        # Each replica's own; by `strategy.run`, outside of a function, TensorFlow would warn.
        strategy = self._trainer.distribute_strategy
        for own in strategy.experimental_local_results(self._first_bad):
            own.assign(NONE_YET)

    def watching(self, train_step):
        """The same step, followed by the check; to be called in replica context."""

        def step(data):
            logs = train_step(data)
            if self._trainer.optimizer is not None:
                self._note()
            return logs

        return step

    def _note(self):
        loss = self._trainer._loss_tracker.total
        step = tf.cast(self._trainer.optimizer.iterations, tf.int64)
        is_first = (self._first_bad < 0) & ~tf.math.is_finite(loss)
        self._first_bad.assign(tf.where(is_first, step, self._first_bad))

    def on_replica(self):
        """What this replica saw: an int64 scalar, `NONE_YET` or a step; in replica context."""
        return tf.convert_to_tensor(self._first_bad)

    def first_bad_step(self) -> int | None:
        """The step (from 1) whose loss was the first not to be finite, on any replica.

        With several workers: as of the end of the last group of steps, for all of them alike.
        """
        parts = self._noted
        if parts is None:
            strategy = self._trainer.distribute_strategy
            parts = strategy.experimental_local_results(self._first_bad)
        return min((int(part) for part in parts if int(part) != NONE_YET), default=None)

    def note(self, first_bad_steps):
        """Takes what all replicas of all workers saw: an int64 tensor of shape (replicas,)."""
        self._noted = first_bad_steps
