"""A worker's step with parameter servers, where other workers update the same variables.

The parameter servers hold one copy of each variable. While a worker computes a gradient, other
workers update the weights that it depends on. Therefore a step

- reads the small variables at once, at its beginning, and computes with these copies;
- adds to counters with one atomic operation, because Keras's read and assignment would lose
  concurrent updates;
- keeps its metric increments, which the step group adds to the shared metrics as a whole
  (`kdist.training.parameter_server.coordinator_loop`);
- records the staleness of its gradient: the updates between its read and its write.
"""

import contextlib

import keras
import tensorflow as tf

from kdist.compat.tensorflow import watch_on_tapes
from kdist.training.groups.monitors import NONE_YET
from kdist.training.optimizers import counter_of
from kdist.training.parameter_server.variables import (
    move_to_servers,
    pull,
    push,
    run_on_server,
    run_on_servers,
)
from kdist.training.replica import own_metrics
from kdist.training.replica.accumulation import optimizers_of
from kdist.training.replica.gradients import SplitSlices, sum_of_steps
from kdist.training.replica.step import ReplicaStep
from kdist.training.scopes import in_new_thread


class MicroSteps:
    """Sums of gradients and logs over the micro-steps of one replica's step.

    They are tensors, since no other worker needs them.

    Attributes:
        began_at: the count of updates when the first micro-step read its weights.
        increments: the increments of metric variables so far; None before the first micro-step.
    """

    def __init__(self):
        self._parts = {}
        self._logs = {}
        self.increments = None
        self.began_at = None
        self._graph: tf.Graph | None = None  # of the last micro-step that added gradients

    def add(self, optimizer, gradients, variables, is_last):
        """Adds `gradients`, and returns the sums in the last micro-step.

        Raises:
            ValueError: they are added within a condition or loop of TensorFlow.
        """
        graph, before = tf.compat.v1.get_default_graph(), self._graph
        if before not in (None, graph):
            raise ValueError(
                "with parameter servers, an optimizer that is applied within tf.cond or "
                "tf.while_loop cannot add up gradients of micro-steps. Apply it outside of them, "
                "or compile without accumulate"
            )
        self._graph = graph
        keys = [(id(optimizer), id(variable)) for variable in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                self._parts.setdefault(key, []).append(gradient)
        return [_sum(self._parts.get(key, [])) for key in keys] if is_last else None

    def add_increments(self, added):
        """Adds the increments of metric variables in one micro-step."""
        before = self.increments or [tf.zeros_like(value) for value in added]
        self.increments = [a + b for a, b in zip(before, added, strict=True)]

    def add_logs(self, parts):
        """Adds {name: part of a log}, and returns the sums."""
        self._logs = {name: part + self._logs.get(name, 0) for name, part in parts.items()}
        return self._logs


def _sum(gradients):
    """Returns the sum of the micro-steps' gradients; None without any."""
    if not gradients:
        return None
    is_split = isinstance(gradients[0], SplitSlices)
    return sum_of_steps(gradients) if is_split else tf.add_n(gradients)


class LocalCopies(keras.StatelessScope):
    """Scope in which Keras computes with a step's own copies of variables.

    The model's small variables have a copy; `write_back` assigns changed copies to the variables.
    The copies of metrics begin at zero, or at the totals of all steps so far.

    Args:
        metrics: the metrics' variables.
        others: the model's variables.
        from_zero: whether metrics begin at zero.
    """

    def __init__(self, metrics, others, from_zero):
        super().__init__(collect_losses=True)
        self._metrics, self._others, self._from_zero = metrics, others, from_zero
        self._is_metric = {id(variable) for variable in metrics}
        self._copies, self._begun_with = {}, []
        self._written = set()
        self.is_updating = False
        self.step: StepOnCopies | None = None

    def pull(self, counter=None, increments=None):
        """Reads the variables; returns the value of `counter`, read first, if there is one.

        Args:
            counter: variable that is read before all others. Defaults to None, no variable.
            increments: what earlier micro-steps have yet to add to the metrics. Defaults to None.
        """
        read = self._others if self._from_zero else [*self._others, *self._metrics]
        values, count = pull([variable._value for variable in read], counter)
        self._copies = {id(read[number]): value for number, value in values.items()}
        for variable in self._metrics:
            if id(variable) not in self._copies:
                begin = 0 if self._from_zero else variable._value.read_value()
                self._copies[id(variable)] = tf.zeros(variable.shape, variable.dtype) + begin
        if increments and not self._from_zero:
            for variable, increment in zip(self._metrics, increments, strict=True):
                self._copies[id(variable)] += increment
        self._begun_with = [self._copies[id(variable)] for variable in self._metrics]
        return count

    def forget(self, variables):
        """Drops the copies of updated variables, so that later reads see the update."""
        for variable in variables:
            self._copies.pop(id(variable), None)

    def copy_of(self, variable):
        """Returns the copy of a variable; None without one, or during an update."""
        if self.is_updating and id(variable) not in self._is_metric:
            return None
        return self._copies.get(id(variable))

    def get_current_value(self, variable):
        copy = self.copy_of(variable)
        if copy is None:
            return variable._value
        # As TensorFlow does: the layer may be frozen, and become trainable before the tape is read.
        if variable._value.trainable:
            watch_on_tapes(copy)
        return copy

    def add_update(self, update):
        variable, value = update
        if metric := self.step.own_metrics.get(id(variable)):
            value = own_metrics.corrected(self.step, metric, variable, value)
        if self.copy_of(variable) is None:
            variable._direct_assign(value)
        else:
            # No gradient passes through a variable that is assigned, as on one device.
            self._copies[id(variable)] = tf.stop_gradient(tf.cast(value, variable.dtype))
            if self.step.is_kept(variable, value):
                self._written.add(id(variable))

    def note_added(self, variable, value):
        """Adds `value` to the copy of a variable that has itself been increased by it."""
        if id(variable) in self._copies:
            self._copies[id(variable)] += tf.stop_gradient(value)

    def is_metric(self, variable):
        """Returns True if the variable belongs to a metric."""
        return id(variable) in self._is_metric

    def added(self):
        """Returns the increment of each metric variable."""
        now = [self._copies[id(variable)] for variable in self._metrics]
        if self._from_zero:
            return now
        return [value - begin for value, begin in zip(now, self._begun_with, strict=True)]

    def write_back(self, variables=None):
        """Writes modified local copies back to the variables on the servers.

        Args:
            variables: the variables to write; None for all.
        """
        written = [v for v in variables or self._others if id(v) in self._written]
        self._written -= {id(variable) for variable in written}
        values = [self._copies[id(variable)] for variable in written]
        push([variable._value for variable in written], values, lambda v, value: v.assign(value))


class StepOnCopies(ReplicaStep):
    """One micro-step of one replica that shares variables with others, and computes with copies.

    Args:
        trainer: the model.
        copies: the replica's `LocalCopies`.
        others: the arguments of `ReplicaStep`, in order.
    """

    can_recompute = False  # a second call would not find the copies
    is_alone = False

    def __init__(self, trainer, copies, *others):
        super().__init__(*others)
        self._strategy = trainer.distribute_strategy
        self._copies = copies
        copies.step = self

    def handle(self, variable):
        """Returns the handle by which a gradient tape identifies a variable."""
        copy = self._copies.copy_of(variable)
        return variable._value.handle if copy is None else copy

    def is_read_of(self, variable, tensor):
        """Returns True if `tensor` is the step's copy of a variable."""
        return tensor is self._copies.copy_of(variable)

    def build(self, optimizer, variables):
        """Builds the optimizer in a new thread, outside of functions, replicas, and copies."""

        def build():
            with self._strategy.scope():
                optimizer.build(variables)

        in_new_thread(build)


class AsynchronousStep(StepOnCopies):
    """One micro-step of one replica of one worker.

    Args:
        number: number of the batch, counted over all workers; an int64 scalar.
        trainer: the model.
        updates: whether the step updates weights.
        from_zero: whether metrics begin at zero, or at the totals of all steps so far.
        micro_steps: the `MicroSteps` of the step.
        others: the arguments of `ReplicaStep`, in order.
    """

    def __init__(self, number, trainer, updates, from_zero, micro_steps, *others):
        copies = LocalCopies(trainer.metrics_variables, variables_of(trainer), from_zero)
        super().__init__(trainer, copies, *others)
        self._number, self._micro_steps = number, micro_steps
        # Without concurrent steps, the seeds are those of one device.
        self._seeds_differ = trainer.training_state.max_staleness != 0
        self._loss = trainer._loss_tracker
        optimizers = optimizers_of(trainer) if updates else []
        # A custom step may not use the optimizer of `compile`, which is then not built.
        used = [optimizer for optimizer in optimizers if optimizer.built] or optimizers
        self._counter = counter_of(used[0])._value if used else None
        self._written_at = None  # the count of updates including its own first one
        if trainer.training_state.repeated_steps:
            self._check_has_one_device()

    def note_gather(self, is_whole_loss):
        """Raises an error if the worker has several devices: their gradients are not tested."""
        super().note_gather(is_whole_loss)
        self._check_has_one_device()

    def _check_has_one_device(self):
        if self.replicas > 1:
            raise ValueError(
                f"gather_batch: with parameter servers a worker needs one device, not "
                f"{self.replicas}. Use mirrored or multi_worker"
            )

    @contextlib.contextmanager
    def running(self):
        # Weights are read after the counter, so that updates in between count as staleness.
        began_at = self._copies.pull(self._counter, self._micro_steps.increments)
        if self._micro_steps.began_at is None:
            self._micro_steps.began_at = began_at
        with super().running(), self._copies:
            yield self
            if self.replica == 0:
                self._copies.write_back()

    def apply(self, update, optimizer, gradients, variables):
        """Updates variables once per worker, on the server that stores `optimizer.iterations`."""
        if optimizer.gradient_accumulation_steps and self._seeds_differ:
            raise ValueError(
                "gradient_accumulation_steps: workers would overwrite each other's sums; use "
                "compile(accumulate=…), or max_staleness=0"
            )
        if self.replica > 0:
            return
        natives = [variable._value for variable in variables]
        self._copies.write_back(variables)  # what the step assigned, such as a masked kernel
        moved = move_to_servers(natives, gradients)
        counter = counter_of(optimizer)._value

        def on_its_server(*parts):
            gradients = tf.nest.pack_sequence_as(moved, parts, expand_composites=True)
            # The counter does not depend on the gradients; without this control dependency
            # TensorFlow may increment it first.
            with tf.control_dependencies([part for part in parts if part is not None]):
                with self.update():
                    update(gradients, variables)
                return counter.read_value()

        parts = tf.nest.flatten(moved, expand_composites=True)
        written_at = run_on_server(counter.device, on_its_server, *parts)
        is_certain = tf.compat.v1.get_default_graph() is self._graph  # and in no `tf.cond`
        if is_certain and counter is self._counter and self._written_at is None:
            self._written_at = written_at
        self._copies.forget(variables)

    @contextlib.contextmanager
    def update(self):
        """Marks that the optimizer is updating the variables themselves."""
        self._copies.is_updating = True
        with super().update():
            yield
        self._copies.is_updating = False

    def optimizer_method(self, name, for_one_device, keras_function):
        """Returns updates that run on the server of each variable, with atomic operations."""
        return {
            "_backend_update_step": _update_each,
            "_apply_weight_decay": _decay_each,
        }.get(name, for_one_device)

    def assign_add(self, variable, value, keras_function):
        """Adds `value` to a variable in one operation."""
        if self._copies.is_metric(variable):
            return keras_function(variable, value)
        native = variable._value
        value = tf.cast(value, native.dtype)
        if self.is_kept(variable, value):
            native.assign_add(value)
        self._copies.note_added(variable, value)
        return native

    @property
    def seeds_differ(self):
        return self._seeds_differ

    def seed(self, seed):
        """Returns a seed that depends on the batch's number: two workers may draw the same seed."""
        number = tf.cast(self._number % (1 << 31), seed.dtype)
        return super().seed(seed + tf.stack([number, tf.zeros([], seed.dtype)]))

    def outcome(self):
        """Returns (increments of metric variables, staleness, bad step or `NONE_YET`).

        The staleness is the number of updates by other workers between the step's read and its own
        update. The number is the count of updates, from 1, if the step's loss is not finite.
        """
        none_yet = tf.constant(NONE_YET, tf.int64)
        added = [self.zero_if_empty(part) for part in self._copies.added()]
        self._micro_steps.add_increments(added)
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

    run_on_servers([variable._value for variable in variables], gradients, update)


def _decay_each(optimizer, variables):
    if optimizer.weight_decay is None:
        return
    for variable in filter(optimizer._use_weight_decay, variables):
        native = variable._value
        with tf.device(native.device):
            rate = tf.cast(optimizer.learning_rate, native.dtype)
            native.assign_sub(native * tf.cast(optimizer.weight_decay, native.dtype) * rate)


def variables_of(trainer):
    """Returns the model's variables without those of its metrics."""
    metrics = {id(variable) for variable in trainer.metrics_variables}
    return [variable for variable in trainer.variables if id(variable) not in metrics]
