"""An epoch as groups of steps: each group is one call of the step function.

epochs = StepGroups(dataset, steps_per_execution=4, distribute_strategy=strategy)
for group in epochs:                       # 10 batches: groups of 4, 4 and 2
    step_function(group.iterator, group.length, group.may_run_out)
"""

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from kdist.training.keras_internals import EpochIterator, TFEpochIterator


@dataclasses.dataclass(frozen=True)
class StepGroup:
    """Steps that are run together.

    Attributes:
        first: the first one's number within the epoch, from 0.
        length: how many; the last group of an epoch may be shorter than the others.
        iterator: gives the batches.
        may_run_out: the data's length is not known, so there may be fewer batches than `length`.
    """

    first: int
    length: int
    iterator: Any
    may_run_out: bool = False


class StepGroups(TFEpochIterator):
    """Keras's epoch iterator, but it never asks for more steps than the epoch has.

    Keras runs `steps_per_execution` steps each time, also where fewer are left: an endless data
    set of 25 steps an epoch gives 52 steps in two epochs with groups of four.

    Batches come whole, from a plain iterator; the step divides them among the replicas
    (`kdist.training.share`). So any data will do that one device can read: ragged, sparse, of
    unknown length, from a generator.

    Args:
        distribute_strategy: the strategy of the model.
        feed: makes of the data set what a group's `iterator` is. Defaults to `iter`.
        data: what Keras's `EpochIterator` takes.

    Attributes:
        first_step: of the next epoch; other than 0 where its first steps were done by a process
            that this one goes on for.
    """

    def __init__(self, distribute_strategy, feed=iter, **data):
        EpochIterator.__init__(self, **data)
        dataset = self.data_adapter.get_tf_dataset()
        # The cores of a TPU are fed by its own host; they take data that are divided beforehand.
        if isinstance(distribute_strategy, tf.distribute.TPUStrategy):
            dataset = distribute_strategy.experimental_distribute_dataset(dataset)
        self._distributed_dataset = dataset
        self._feed = feed
        self._left_out = 0
        self.first_step = 0

    def leave_out(self, position):
        """The first epoch's data begin at a `Position`: what is before it is read, and left out.

        Where an epoch is a part of the data, that is all since the data began; else what is before
        it in its epoch.
        """
        left_out = position.batch if self.steps_per_epoch else position.step
        self._left_out = left_out % self._num_batches if self._num_batches else left_out

    @functools.cached_property
    def _length_is_certain(self):
        cardinality = self.data_adapter.get_tf_dataset().cardinality
        number = int(cardinality() if callable(cardinality) else cardinality)
        return number != tf.data.UNKNOWN_CARDINALITY

    def _enumerate_iterator(self):
        self.data_adapter.on_epoch_begin()
        steps_per_epoch = self.steps_per_epoch or self._num_batches
        yield from self._known(steps_per_epoch) if steps_per_epoch else self._unknown()
        self.data_adapter.on_epoch_end()

    def _known(self, steps_per_epoch):
        if self._current_iterator is None or self.steps_per_epoch is None:
            self._start_over()
        step, self.first_step = self.first_step, 0
        while step < steps_per_epoch:
            length = min(self.steps_per_execution, steps_per_epoch - step, self._batches_left())
            if length == 0:
                self._interrupted_warning()
                break
            self._steps_seen += length
            yield StepGroup(step, length, self._current_iterator, not self._length_is_certain)
            step += length
        if not self._batches_left():
            self._start_over()

    def _unknown(self):
        self._start_over()
        iterator, step = self._current_iterator, self.first_step
        self.first_step = 0
        while True:
            group = StepGroup(step, self.steps_per_execution, iterator, True)
            self._steps_seen += group.length
            step += group.length
            yield group

    def _start_over(self):
        data = self._get_iterator()
        self._steps_seen, self._left_out = self._left_out, 0
        if self._steps_seen:
            data = data.skip(self._steps_seen)
        self._current_iterator = self._feed(data)

    def _batches_left(self):
        """Batches before the data end; without a known end, more than any group takes."""
        if not self._num_batches:
            return self.steps_per_execution
        return self._num_batches - self._steps_seen


def up_to(length, iterator):
    """The next `length` batches of an iterator, or as many as it has."""
    for _ in range(length):
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return
