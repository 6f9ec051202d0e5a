"""A step of a worker under parameter servers: variables are shared, and others write them too.

The parameter servers hold one copy of each variable. While a worker computes a gradient, others
update what it was computed from. So a step here

- reads the small variables at once, at its beginning, and computes with these copies;
- adds to counters by one atomic operation, where Keras reads and then assigns, and so would lose
  what another worker adds in between;
- keeps what it adds to the metrics to itself: a group of steps hands it on as a whole
  (`kdist.training.coordinated`);
- notes how stale its gradient is: the updates between its reading and its writing.
"""

import contextlib

import keras
import tensorflow as tf

from kdist.tensorflow_internals import watch_on_tapes
from kdist.training.finite import NONE_YET
from kdist.training.shared_variables import (
    brought_to,
    on_server,
    on_their_servers,
    pull,
    push,
)
from kdist.training.step import ReplicaStep
from kdist.training.together import in_another_thread


class MicroSteps:
    """What the micro-steps of one replica's step have in common.

    Gradients are summed as tensors: those of one worker's step are nobody else's.

    Attributes:
        began_at: the count of updates when the first one read its weights.
    """

    def __init__(self):
        self._sums = {}
        self.began_at = None

    def add(self, optimizer, gradients, variables, is_last):
        """Adds `gradients`; in the last micro-step gives the sums."""
        keys = [(id(optimizer), id(variable)) for variable in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                dense = tf.convert_to_tensor(gradient)
                self._sums[key] = self._sums[key] + dense if key in self._sums else dense
        return [self._sums.get(key) for key in keys] if is_last else None


class OwnCopies(keras.StatelessScope):
    """Within it, Keras computes with a step's own copies of variables.

    Of the model's variables, the small ones have a copy; what is written to it, `write_back` writes
    to the variable. Metrics have one that begins at zero, or at what all steps so far have added.

    Args:
        metrics: the metrics' variables.
        others: those of the model.
        from_zero: metrics begin at zero.
    """

    def __init__(self, metrics, others, from_zero):
        super().__init__(collect_losses=True)
        self._metrics, self._others, self._from_zero = metrics, others, from_zero
        self._is_metric = {id(variable) for variable in metrics}
        self._copies, self._begun_with = {}, []
        self._written = set()
        self.is_updating = False

    def pull(self, counter):
        """Reads the variables; gives the value of `counter`, read before, if there is one."""
        read = self._others if self._from_zero else [*self._others, *self._metrics]
        values, count = pull([variable._value for variable in read], counter)
        self._copies = {id(read[number]): value for number, value in values.items()}
        for variable in self._metrics:
            if id(variable) not in self._copies:
                begin = 0 if self._from_zero else variable._value.read_value()
                self._copies[id(variable)] = tf.zeros(variable.shape, variable.dtype) + begin
        self._begun_with = [self._copies[id(variable)] for variable in self._metrics]
        return count

    def forget(self, variables):
        """From now on these are read where they are: they have been updated."""
        for variable in variables:
            self._copies.pop(id(variable), None)

    def copy_of(self, variable):
        """The copy of a variable; None if there is none, or the optimizer is at work."""
        if self.is_updating and id(variable) not in self._is_metric:
            return None
        return self._copies.get(id(variable))

    def get_current_value(self, variable):
        copy = self.copy_of(variable)
        if copy is None:
            return variable._value
        if variable.trainable:
            watch_on_tapes(copy)
        return copy

    def add_update(self, update):
        variable, value = update
        if self.copy_of(variable) is None:
            variable._direct_assign(value)
        else:
            self._copies[id(variable)] = tf.cast(value, variable.dtype)
            self._written.add(id(variable))

    def note_added(self, variable, value):
        """The variable itself has become larger by `value`; so does its copy, if there is one."""
        if id(variable) in self._copies:
            self._copies[id(variable)] += value

    def is_metric(self, variable):
        """Whether a variable is one of the metrics'."""
        return id(variable) in self._is_metric

    def added(self):
        """What was added to each variable of the metrics."""
        now = [self._copies[id(variable)] for variable in self._metrics]
        if self._from_zero:
            return now
        return [value - begin for value, begin in zip(now, self._begun_with, strict=True)]

    def write_back(self):
        """Writes what was written to copies of the model's variables."""
        written = [v for v in self._others if id(v) in self._written]
        values = [self._copies[id(variable)] for variable in written]
        push([variable._value for variable in written], values, lambda v, value: v.assign(value))


class AsynchronousStep(ReplicaStep):
    """What one replica of one worker does in one micro-step.

    Args:
        number: of the batch, counted over all workers; an int64 scalar.
        trainer: the model.
        updates: the step makes updates.
        from_zero: its metrics begin at zero; else at what all steps so far have added.
        micro_steps: those of the step; this is one of them.
        others: those of `ReplicaStep`, in its order.
    """

    def __init__(self, number, trainer, updates, from_zero, micro_steps, *others):
        super().__init__(*others)
        self._number, self._micro_steps = number, micro_steps
        # One step after the other, the seeds are those of one device.
        self._seeds_differ = trainer.max_staleness != 0
        self._loss = trainer._loss_tracker
        has_counter = updates and trainer.optimizer is not None
        self._counter = _counter_of(trainer.optimizer) if has_counter else None
        self._strategy = trainer.distribute_strategy
        self._written_at = None  # the count of updates after its own
        self._copies = OwnCopies(trainer.metrics_variables, _variables_of(trainer), from_zero)

    @contextlib.contextmanager
    def running(self):
        # Weights are read after the counter: what is written in between counts as stale.
        began_at = self._copies.pull(self._counter)
        if self._micro_steps.began_at is None:
            self._micro_steps.began_at = began_at
        with super().running(), self._copies:
            yield self
            if self.replica == 0:
                self._copies.write_back()

    def handle(self, variable):
        """What a gradient tape knows a variable by."""
        copy = self._copies.copy_of(variable)
        return variable._value.handle if copy is None else copy

    def build(self, optimizer, variables):
        """In a thread that is in no function, on no replica, and has no copies."""

        def build():
            with self._strategy.scope():
                optimizer.build(variables)

        in_another_thread(build)

    def apply(self, update, optimizer, gradients, variables):
        """The optimizer updates the variables, once a worker, where its counter is."""
        if optimizer.gradient_accumulation_steps and self._seeds_differ:
            raise ValueError(
                "gradient_accumulation_steps: workers would write over each other's sums; take "
                "compile(accumulate=…), or max_staleness=0"
            )
        if self.replica > 0:
            return
        natives = [variable._value for variable in variables]
        beside = brought_to(natives, gradients)
        counter = _counter_of(optimizer)

        def on_its_server(*parts):
            gradients = tf.nest.pack_sequence_as(beside, parts, expand_composites=True)
            # The counter needs no gradient, and would move before there is one.
            with tf.control_dependencies([part for part in parts if part is not None]):
                with self.update():
                    update(gradients)
                return counter.read_value()

        parts = tf.nest.flatten(beside, expand_composites=True)
        self._written_at = on_server(counter.device, on_its_server, *parts)
        self._copies.forget(variables)

    @contextlib.contextmanager
    def update(self):
        """The optimizer is at work, on the variables themselves."""
        self._copies.is_updating = True
        with super().update():
            yield
        self._copies.is_updating = False

    def part_of_update(self, name, for_one_device, kerass_own):
        """Parts of an optimizer's work: each variable's beside it, and by atomic operations."""
        return {
            "_backend_update_step": _update_each,
            "_apply_weight_decay": _decay_each,
        }.get(name, for_one_device)

    def assign_add(self, variable, value, kerass_own):
        """`variable` + `value`, in one operation."""
        if self._copies.is_metric(variable):
            return kerass_own(variable, value)
        native = variable._value
        value = tf.cast(value, native.dtype)
        native.assign_add(value)
        self._copies.note_added(variable, value)
        return native

    @property
    def seeds_differ(self):
        return self._seeds_differ

    def seed(self, seed):
        """Two workers may draw one seed at the same time; the batch's number tells them apart."""
        number = tf.cast(self._number % (1 << 31), seed.dtype)
        return super().seed(seed + tf.stack([number, tf.zeros([], seed.dtype)]))

    def outcome(self):
        """(what it added to each variable of the metrics, its staleness, `NONE_YET` or its number).

        The staleness is the updates that others made between its reading and its own. The number
        is the count of updates, from 1, if its loss is not finite.
        """
        none_yet = tf.constant(NONE_YET, tf.int64)
        added = [self.counts(part) for part in self._copies.added()]
        if self._written_at is None:
            return added, tf.zeros([], tf.int64), none_yet
        with tf.device(self._written_at.device):
            staleness = tf.maximum(self._written_at - self._micro_steps.began_at - 1, 0)
        with self._copies:
            is_finite = tf.math.is_finite(self._loss.total)
        staleness, made = (tf.cast(x, tf.int64) for x in (staleness, self._written_at))
        return added, staleness, tf.where(is_finite, none_yet, made)


def _update_each(optimizer, gradients, variables, learning_rate):
    def update(number, gradient):
        optimizer.update_step(gradient, variables[number], learning_rate)

    on_their_servers([variable._value for variable in variables], gradients, update)


def _decay_each(optimizer, variables):
    if optimizer.weight_decay is None:
        return
    for variable in filter(optimizer._use_weight_decay, variables):
        native = variable._value
        with tf.device(native.device):
            rate = tf.cast(optimizer.learning_rate, native.dtype)
            native.assign_sub(native * tf.cast(optimizer.weight_decay, native.dtype) * rate)


def _counter_of(optimizer):
    """TensorFlow's variable that counts its steps, those that only add up gradients as well."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations._value


def _variables_of(trainer):
    """The model's variables, without those of its metrics."""
    metrics = {id(variable) for variable in trainer.metrics_variables}
    return [variable for variable in trainer.variables if id(variable) not in metrics]
