"""Step groups: the steps that one call of the train function runs.

    groups = StepGroups(strategy, x=dataset, steps_per_execution=4)
    for group in groups:                  # 10 batches: groups of 4, 4, and 2 steps
        result = train_function.run(group)

`GroupRunner` is the protocol of the functions that run them. `GroupTuner` finds their length for
`steps_per_execution="auto"`.
"""

import contextlib
import dataclasses
import functools
import statistics
import weakref
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from kdist.compat.keras import EpochIterator, TFEpochIterator
from kdist.compat.tensorflow import destroy_iterator, undistributed

# The tuner doubles the length while a step gets at least this much faster and a call stays short
# enough for a progress bar, Ctrl-C, and callbacks.
_REQUIRED_RATIO = 0.95
_MAX_CALL_SECONDS = 0.5
_CALLS_PER_LENGTH = 4
_MAX_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class StepGroup:
    """Steps that run together.

    Attributes:
        first: index of the first step within the epoch, from 0.
        length: number of steps. The last group of an epoch may be shorter than the others.
        iterator: iterator over the batches.
        may_run_out: the length of the data is unknown, so fewer than `length` batches may follow.
    """

    first: int
    length: int
    iterator: Any
    may_run_out: bool = False


class GroupResult(NamedTuple):
    """Result of one step group.

    Attributes:
        group: the `StepGroup` that has ended. Its length is the number of steps that have run,
            which are fewer than planned if the data ended.
        logs: logs of its last step. For predictions, `{"outputs": outputs of all its steps}`.
    """

    group: StepGroup
    logs: Any


@runtime_checkable
class GroupRunner(Protocol):
    """Protocol of train, test, and predict functions, synchronous or with parameter servers.

        with runner.in_flight(groups) as due:
            for group in due:
                result = runner.run(group)

    The functions of synchronous strategies derive from it, and run one group at a time.

    Attributes:
        is_idle: no step is running between two calls. Always True for synchronous strategies.
    """

    is_idle: bool = True

    def in_flight(self, groups):
        """Returns a context manager that yields the groups of an epoch, in order.

        With parameter servers, several groups run at the same time, and a group is yielded when
        no further group may start before a result has been received.
        """
        return contextlib.nullcontext(groups)

    def run(self, group: StepGroup) -> GroupResult:
        """Runs `group` and returns its result.

        With parameter servers, a group that started later may end first. Its result is returned
        instead, and `GroupResult.group` names it.

        Raises:
            StopIteration: the data ended before the group's first step.
        """


class StepGroups(TFEpochIterator):
    """Keras's epoch iterator, limited to the steps that the epoch has.

    Keras always runs `steps_per_execution` steps, even if fewer are left. An endless dataset with
    25 steps per epoch would run 52 steps in two epochs with groups of four.

    Batches come from a plain iterator and are whole; the step divides them among the replicas
    (`kdist.training.replica.row_shares`). Therefore any data that one device can read is valid,
    such as ragged or sparse tensors, data of unknown length, or generators.

    Args:
        distribute_strategy: the model's strategy.
        feed: function that returns a group's `iterator` for a dataset. Defaults to `iter`.
        data: arguments of Keras's `EpochIterator`.

    Attributes:
        first_step: index of the next epoch's first step. It is not 0 if an earlier process has
            already run the beginning of that epoch.
        has_ended: the data ended in the last epoch, so the next one begins with the first batch.
    """

    def __init__(self, distribute_strategy, feed=iter, **data):
        self._iterators = []  # those that are not destroyed; the last groups may use ended ones
        # Python also calls it before it ends, when `destroy_iterator` can still start a thread.
        weakref.finalize(self, _destroy, self._iterators)
        # kdist divides global batches itself. Keras accepts both kinds of dataset as well.
        EpochIterator.__init__(self, **{**data, "x": undistributed(data["x"])})
        dataset = self.data_adapter.get_tf_dataset()
        # Each host feeds its own TPU cores, which need data that is divided in advance.
        if isinstance(distribute_strategy, tf.distribute.TPUStrategy):
            dataset = distribute_strategy.experimental_distribute_dataset(dataset)
        self._distributed_dataset = dataset
        self._feed = feed
        self._batches_to_skip = 0
        self._begins_at_position = self._is_over = self.has_ended = False
        self.first_step = 0

    def close(self):
        """Destroys the iterators, without waiting for TensorFlow; the next epoch has new ones."""
        self._current_iterator = None
        _destroy(self._iterators)

    def skip_to(self, position):
        """Starts the first epoch's data at a `Position`.

        The batches before it are read and dropped. If an epoch is a part of the data, these are
        all batches since the data began; else those of the current epoch.
        """
        skipped = position.batch - position.data_start if self.steps_per_epoch else position.step
        self._batches_to_skip = skipped % self._num_batches if self._num_batches else skipped
        # The data ended with the position, and with them its epoch.
        self._is_over = bool(position.step and skipped and not self._batches_to_skip)

    def begin_at(self, position, length):
        """Counts the batches before a `Position`, of data whose first iterator begins there.

        Args:
            position: the position.
            length: number of batches in a pass over the data; None if it is unknown.
        """
        self._num_batches, self._begins_at_position = length, True
        self.skip_to(position)

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
        if self._is_over:
            self._is_over, self.first_step = False, 0
            return
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

    @contextlib.contextmanager
    def catch_stop_iteration(self):
        """Ends the epoch if the data end. The next one begins with the first batch.

        Keras takes the number of groups before the end for the number of steps of later epochs.
        """
        try:
            yield
            self.tf_sync()
        except (StopIteration, tf.errors.OutOfRangeError):
            if self.num_batches:  # else nobody knows how many there should have been
                self._interrupted_warning()
            self._current_iterator = None
            self.has_ended = True
            self.data_adapter.on_epoch_end()
        finally:
            _destroy(self._iterators, kept=self._current_iterator)

    def _start_over(self):
        data, self.has_ended = self._get_iterator(), False
        self._steps_seen, self._batches_to_skip = self._batches_to_skip, 0
        if self._steps_seen and not self._begins_at_position:
            data = data.skip(self._steps_seen)
        self._current_iterator = self._feed(data)
        self._iterators.append(self._current_iterator)

    def _batches_left(self):
        """Returns the number of remaining batches, or the longest group if it is unknown."""
        if not self._num_batches:
            return self.steps_per_execution
        return self._num_batches - self._steps_seen


def _destroy(iterators, kept=None):
    """Destroys and removes iterators, except `kept`, without waiting for TensorFlow."""
    for iterator in tuple(iterators):
        if iterator is not kept:
            iterators.remove(iterator)
            destroy_iterator(getattr(iterator, "iterator", iterator))


def take_up_to(length, iterator):
    """Yields the next `length` batches of an iterator, or fewer if it ends."""
    for _ in range(length):
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


class GroupTuner:
    """Doubles the length of a step group while that makes a step faster.

        tuner = GroupTuner()
        while not tuner.is_done:
            run(tuner.length)                      # steps in one call
            tuner.note(tuner.length, seconds)

    Attributes:
        length: number of steps for the next call.
        is_done: `length` is final.
        step_seconds: dict that maps each measured length to the median seconds per step.
    """

    def __init__(self):
        self.length = 1
        self.is_done = False
        self.step_seconds = {}
        self._calls = []

    def note(self, steps, seconds):
        """Adds the time of one call of `steps` steps.

        The first call of each length may compile and is ignored, as is a shorter call at the end
        of an epoch.
        """
        if self.is_done or steps != self.length:
            return
        self._calls.append(seconds / steps)
        if len(self._calls) < _CALLS_PER_LENGTH:
            return
        self.step_seconds[self.length] = statistics.median(self._calls[1:])
        self._calls = []
        self._choose()

    def _choose(self):
        length, now = self.length, self.step_seconds[self.length]
        before = self.step_seconds.get(length // 2)
        if before is not None and now > before * _REQUIRED_RATIO:
            self._finish(length // 2)
        elif length == _MAX_LENGTH or now * length * 2 > _MAX_CALL_SECONDS:
            self._finish(length)
        else:
            self.length = length * 2

    def _finish(self, length):
        self.length, self.is_done = length, True

    def __str__(self):
        times = ", ".join(f"{k}: {s * 1000:.2f}" for k, s in self.step_seconds.items())
        return (
            f"steps_per_execution={self.length} (milliseconds per step, by steps per call: {times})"
        )
