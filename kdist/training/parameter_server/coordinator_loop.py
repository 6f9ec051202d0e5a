"""Train, test, and predict functions with parameter servers.

    dispatcher = Dispatcher(strategy, max_staleness=None)
    function = AsynchronousFunction(model, model.train_step, dispatcher, updates=True)
    with function.in_flight(groups) as due:     # several groups run at the same time
        for group in due:
            result = function.run(group)        # waits until one more group has ended

The coordinator dispatches step groups to idle workers, so that a slow worker delays no other. A
group's worker adds the group's metrics to the shared ones at the end, atomically. If a worker dies,
another one repeats its group. Updates that the dead worker has made remain, so that a few examples
count twice. `optimizer.iterations` is corrected as soon as no step is in flight.
"""

import collections
import contextlib
import dataclasses
import itertools

import keras
import tensorflow as tf

from kdist.compat.tensorflow import traced_for_workers
from kdist.training.groups.loop import LazyLogs
from kdist.training.groups.monitors import NONE_YET
from kdist.training.groups.predictions import concatenate
from kdist.training.groups.step_groups import GroupResult, StepGroup
from kdist.training.optimizers import counter_of
from kdist.training.parameter_server.asynchronous_step import AsynchronousStep, MicroSteps
from kdist.training.parameter_server.variables import push
from kdist.training.replica.own_metrics import own_metric_variables, recorded_results
from kdist.training.replica.row_shares import BatchDivision
from kdist.training.scopes import this_replica

# Groups shorter than this are bundled to amortize RPC overhead. The groups that callbacks and the
# progress bar see stay the same.
_SHORT_SECONDS = 0.05
_MAX_BUNDLE = 32


class AsynchronousFunction:
    """Runs each step group on one worker, several groups at a time. A `GroupRunner`.

    Args:
        trainer: the model.
        step: function of one replica's batch, such as `model.train_step`.
        dispatcher: the `Dispatcher`.
        logs_are_metrics: True if the logs are the results of the model's metrics.
        updates: True if the step updates weights.
        micro_steps: number of parts into which each replica's rows are divided. Defaults to 1.
        returns_outputs: True if results hold the outputs of all steps of a group instead of the
            logs of the last one.
        monitor: `AsynchronousMonitor` that receives the facts of each group; optional.
    """

    def __init__(
        self,
        trainer,
        step,
        dispatcher,
        logs_are_metrics=True,
        updates=False,
        micro_steps=1,
        returns_outputs=False,
        monitor=None,
    ):
        self._trainer = trainer
        self._dispatcher = dispatcher
        self._logs_are_metrics = logs_are_metrics
        self._returns_outputs = returns_outputs
        self._monitor = monitor
        self._updates = updates
        self._on_worker = WorkerStep(trainer, step, updates, logs_are_metrics, micro_steps)
        self._functions = {}
        self._bundle = 1  # number of groups that are dispatched together
        self._dispatched = {}  # number -> (groups, steps)
        self._ended: list[StepGroup] = []  # groups whose result has not been returned yet
        # Dispatched after the callbacks at its begin, which may change it, if nothing may be stale.
        self._held: tuple | None = None
        self._logs_now = None
        self._steps = 0  # steps of this epoch that have ended
        self._count_before: int | None = None  # the optimizer's count before this epoch

    def __call__(self, *_):
        raise RuntimeError(
            "train_on_batch, test_on_batch, and predict_on_batch are not available with parameter "
            "servers; use fit, evaluate, or predict"
        )

    @contextlib.contextmanager
    def in_flight(self, groups):
        """Yields the groups in order; each one is due when no further group may start before."""
        self._ended, self._held = [], None
        self._steps, self._count_before = 0, self._count()
        self._dispatcher.repeats()
        try:
            yield self._due(groups)
            while not self._dispatcher.is_idle:
                self._wait()
        finally:
            self._ended = []
            self._dispatcher.forget()

    def run(self, group: StepGroup) -> GroupResult:
        """Waits until `group` or another one in flight has ended, and returns its result."""
        if self._held:
            held, self._held = self._held, None
            self._start(*held)
        if not self._ended:
            self._wait()
        found = (index for index, ended in enumerate(self._ended) if ended is group)
        return GroupResult(self._ended.pop(next(found, 0)), self._logs_now)

    @property
    def is_idle(self):
        """True if all dispatched steps have ended and their logs have been returned."""
        return self._dispatcher.is_idle and not self._ended

    def _count(self):
        """Returns the optimizer's count of updates if each step adds one to it; else None."""
        if not (self._updates and self._logs_are_metrics):
            return None
        optimizer = self._trainer.optimizer
        # A loss-scale optimizer skips steps with non-finite gradients. A custom `train_step` may
        # make several updates.
        counts_each = isinstance(optimizer, keras.optimizers.Optimizer) and not isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        )
        return int(counter_of(optimizer)) if counts_each else None

    def _correct_count(self):
        """Removes the updates of repeated groups from the count, when no step is in flight."""
        if self._count_before is not None and self._dispatcher.repeats():
            counter_of(self._trainer.optimizer).assign(self._count_before + self._steps)

    def _due(self, groups):
        """Dispatches groups, and yields one whenever no further group may start.

        Groups that run one at a time are dispatched by `run`.

        Raises:
            tf.errors.OutOfRangeError: the data ended, and all groups have been yielded.
        """
        waiting, has_ended = collections.deque(), False
        for bundle in self._bundles(groups):
            while waiting and self._trainer.training_state.pause_requested:
                yield waiting.popleft()
            length = sum(group.length for group in bundle)
            batches = bundle[0].iterator.take(length, separate=self._returns_outputs)
            has_ended = batches is None or batches.length < length
            if batches is None:
                break
            if has_ended:  # the length was unknown, so the bundle is a single group
                bundle = [dataclasses.replace(bundle[0], length=batches.length)]
            if self._dispatcher.is_sequential:
                self._held = batches, bundle
                yield bundle[0]
                if has_ended:
                    break
                continue
            while not self._dispatcher.may_start(batches.length):
                yield waiting.popleft()
            self._start(batches, bundle)
            waiting.extend(bundle)
            if has_ended:
                break
        while waiting:
            yield waiting.popleft()
        if has_ended:  # as an iterator of a synchronous strategy
            raise tf.errors.OutOfRangeError(None, None, "the data ended within the epoch")

    def _bundles(self, groups):
        """Yields lists of groups that are dispatched together."""
        groups = (group for group in groups)  # `iter` would restart a Keras epoch iterator
        for group in groups:
            # If the length of the data is unknown, so is the number of groups.
            more = 0 if group.may_run_out or not self._may_bundle else self._bundle - 1
            yield [group, *itertools.islice(groups, more)]

    @property
    def _may_bundle(self):
        """True if no single group matters for its outputs, its time, or its staleness."""
        state = self._trainer.training_state
        return not (self._returns_outputs or state.is_tuning or state.max_staleness is not None)

    def _wait(self):
        """Waits until one more bundle has ended, and stores its groups and the current logs."""
        number, results, seconds = self._dispatcher.wait()
        groups, steps = self._dispatched.pop(number)
        self._steps += steps
        if self._dispatcher.is_idle:
            self._correct_count()
        self._ended = list(groups)
        if self._returns_outputs:
            self._logs_now = {"outputs": concatenate(results)}
            return
        if seconds < _SHORT_SECONDS and len(groups) == self._bundle:
            self._bundle = min(2 * self._bundle, _MAX_BUNDLE)
        facts, logs = results
        if self._monitor:
            self._monitor.note(*facts.numpy())
        read = self._trainer.get_metrics_result
        self._logs_now = LazyLogs(read) if self._logs_are_metrics else LazyLogs(lambda: logs, read)

    def _start(self, batches, groups):
        function = self._function_of(batches)
        number = self._dispatcher.start(function, batches.tensors, batches.arrays, batches.length)
        self._dispatched[number] = groups, batches.length

    def _function_of(self, batches):
        """Returns the traced function for such a group."""
        key = batches.key
        if key not in self._functions:
            with traced_for_workers(self._trainer.distribute_strategy):
                self._functions[key] = self._traced(batches)
        return self._functions[key]

    def _traced(self, batches):
        steps = self._outputs if self._returns_outputs else self._logs

        def group(*tensors):
            return steps(batches.reader(*tensors))

        return tf.function(group, autograph=False).get_concrete_function(*batches.signature)

    # In the graph of a group, on a worker.

    def _logs(self, reader):
        """Returns the facts for `AsynchronousMonitor.note`, and the last step's logs."""
        variables = [variable._value for variable in self._trainer.metrics_variables]
        added = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
        facts = tf.stack([tf.cast(reader.length, tf.int64), 0, 0, NONE_YET])

        def step(number, added, facts, _=None):
            batch = reader.batch(number)
            parts, staleness, bad, logs = self._on_worker(batch, _number(reader, number))
            if self._logs_are_metrics:
                added = [total + part for total, part in zip(added, parts, strict=True)]
            else:  # the next step's logs include this step
                push(variables, parts, _add)
            own_logs = () if self._logs_are_metrics else logs
            return number + 1, added, _with(facts, staleness, bad), own_logs

        state = 0, added, facts, ()
        known = reader.length if isinstance(reader.length, int) else int(not self._logs_are_metrics)
        for _ in range(known):
            with tf.control_dependencies([state[2]]):
                state = step(*state)
        if not isinstance(reader.length, int):
            state = tf.while_loop(
                lambda number, *_: number < reader.length,
                step,
                (tf.constant(state[0]), *state[1:]),
                parallel_iterations=1,
            )
        _, added, facts, logs = state
        if self._logs_are_metrics:
            push(variables, added, _add)
        return facts, logs

    def _outputs(self, reader):
        """Returns a tuple of the outputs of the group's steps."""
        return tuple(
            self._on_worker.outputs(reader.batch(number), _number(reader, number))
            for number in range(reader.length)
        )


def _add(variable, part):
    variable.assign_add(part)


def _number(reader, number):
    """Returns the number of a group's batch, counted over all workers."""
    return reader.first + tf.cast(number, tf.int64)


def _with(facts, staleness, bad):
    steps, total, largest, first = tf.unstack(facts)
    largest = tf.maximum(largest, staleness)
    return tf.stack([steps, total + staleness, largest, tf.where(first == NONE_YET, bad, first)])


class WorkerStep:
    """Runs a step on each replica of one worker, in one or several micro-steps."""

    def __init__(self, trainer, step, updates, from_zero, micro_steps):
        self._trainer, self._step = trainer, step
        self._updates, self._from_zero, self._micro_steps = updates, from_zero, micro_steps
        self._strategy = trainer.distribute_strategy

    def __call__(self, data, number):
        """Returns (increments of the metric variables, staleness, bad step, logs) of a step."""
        division = BatchDivision.of(data, self._strategy, self._micro_steps)
        micro_steps = self._new_micro_steps()
        total = None
        for micro_step in range(self._micro_steps):
            with tf.control_dependencies(total or []):
                results = self._run(data, number, division, micro_step, micro_steps)
            added, staleness, bad, logs = results
            added = [self._over_replicas("SUM", part) for part in added]
            total = added if total is None else [a + b for a, b in zip(total, added, strict=True)]
        of_replicas = self._strategy.experimental_local_results
        logs = tf.nest.map_structure(lambda log: self._over_replicas("MEAN", log), logs)
        return total, tf.reduce_max(tf.stack(of_replicas(staleness))), of_replicas(bad)[0], logs

    def _over_replicas(self, how, value):
        if self._strategy.num_replicas_in_sync == 1:
            return value
        return self._strategy.reduce(how, value, axis=None)

    def outputs(self, data, number):
        """Returns the step's outputs for all rows, in order."""
        division = BatchDivision.of(data, self._strategy, 1)
        *_, outputs = self._run(data, number, division, 0, self._new_micro_steps())
        return self._strategy.gather(outputs, axis=0) if len(division.sizes) > 1 else outputs

    def _new_micro_steps(self):
        return [MicroSteps() for _ in range(self._strategy.num_replicas_in_sync)]

    def _run(self, data, number, division, micro_step, micro_steps):
        replicas = len(micro_steps)
        is_last = micro_step == self._micro_steps - 1

        def on_replica(data):
            replica = this_replica()
            rows, share = division.take(data, replica, micro_step)
            accumulators = micro_steps[replica] if self._micro_steps > 1 else None
            step = AsynchronousStep(
                number,
                self._trainer,
                self._updates,
                self._from_zero,
                micro_steps[replica],
                share,
                replica,
                replica,
                replicas,
                False,
                accumulators,
                is_last,
            )
            step.loss_reduction = self._trainer.training_state.loss_reduction
            step.own_metrics = own_metric_variables(self._trainer.metrics)
            with step.running():
                outputs = self._step(rows)
                parts = micro_steps[replica].add_logs(step.log_parts(outputs, results))
            return *step.outcome(), {**outputs, **parts} if parts else outputs

        with recorded_results(self._trainer) as results:
            return self._strategy.run(
                tf.autograph.experimental.do_not_convert(on_replica), args=(data,)
            )
