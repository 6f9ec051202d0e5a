"""Train and test functions of synchronous strategies: one call runs a step group on all replicas.

Several steps in one TensorFlow function cost one call from Python. Keras builds such a loop with
optionals and conditionals, which fail under MirroredStrategy. A plain loop over a known number of
steps does not.
"""

import dataclasses
import functools
import logging
import time

import tensorflow as tf

from kdist.cluster import heartbeat
from kdist.compat.keras import reduce_per_replica
from kdist.compat.tensorflow import function_of_its_own, run_once, yields_on_host
from kdist.training.groups import clock as clocks
from kdist.training.groups.inputs import open_rows, with_open_rows, without_slice
from kdist.training.groups.loop import LazyLogs
from kdist.training.groups.monitors import MetricTotals
from kdist.training.groups.step_groups import GroupResult, GroupRunner, StepGroup, take_up_to
from kdist.training.local_sgd import LocalStep
from kdist.training.parameter_server.central_step import CentralStep
from kdist.training.replica.dependence.fallbacks import WholeBatchError
from kdist.training.replica.dependence.of_step import KnownRowsError
from kdist.training.replica.own_metrics import own_metric_variables, recorded_results
from kdist.training.replica.reduction import attributes_of_replica
from kdist.training.replica.row_shares import (
    BatchDivision,
    DifferentRowsError,
    in_page_locked_memory,
    is_distributed,
)
from kdist.training.replica.shared_trace import SharedTrace
from kdist.training.replica.step import ReplicaStep
from kdist.training.scopes import (
    computes_on_gpus,
    has_copies,
    is_multi_worker,
    num_local_replicas,
    shares_storage,
    this_replica,
)
from kdist.training.sharding import whole_state
from kdist.training.sharding.parts import sharded_state
from kdist.training.sharding.step import ShardedStep
from kdist.training.strategy_setup import step_timeout_of

_logger = logging.getLogger(__name__)

_HINT = (
    "Each of {replicas} replicas computed a part of the batch's rows, which are its first axis. A "
    "program that needs all of them, such as one whose first axis is not that of examples, runs "
    'with model.compile(..., gather_batch="step").'
)
_HIDDEN_BY_SHARED_TRACE = (
    "share_trace=True: a replica failed, and TensorFlow reports that others were cancelled. "
    "Compile with share_trace=False to see the error itself."
)
_NEEDS_WHOLE_BATCH = (
    'gather_batch="step" needs the whole batch, and each worker or replica reads its own part of '
    "the data. Pass a tf.data.Dataset that is not distributed, or use gather_batch=True"
)
_HOST = "CPU:0"
_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class StepFunction(GroupRunner):
    """Runs step groups on every replica of the model's strategy.

    Args:
        trainer: the model.
        step: function of one replica's batch that returns logs, such as `model.train_step`.
        logs_are_metrics: True if the logs are the results of the model's metrics. The function
            then returns nothing, and metrics are read when the logs are.
        accumulators: gradient sums of micro-steps, an `Accumulators`, or a list with one for each
            replica; None for a single micro-step.
        micro_steps: number of parts into which each replica's rows are divided. Defaults to 1.
        monitor: the `LossMonitor` that `step` updates; None in evaluation.
        rounds: the `Rounds` of local SGD; None if gradients are reduced in every step.
        clock: `StepClock` that receives the time that steps wait for input; optional.
    """

    def __init__(
        self,
        trainer,
        step,
        logs_are_metrics,
        accumulators=None,
        micro_steps=1,
        monitor=None,
        rounds=None,
        clock=None,
    ):
        self._trainer = trainer
        self._clock = clock or clocks.StepClock()
        self._rounds = rounds
        self._logs_are_metrics = logs_are_metrics
        self._monitor = monitor
        self._totals = None
        if is_multi_worker(trainer.distribute_strategy):
            self._totals = MetricTotals(trainer, monitor)
        self._replicated = ReplicatedStep(trainer, step, accumulators, micro_steps, rounds)
        self._for_gpus = computes_on_gpus(trainer.distribute_strategy) and not trainer.run_eagerly
        self._results = self._replicated.results
        self._replicated_step = self._compiled(self._replicated)
        traced = (lambda f: f) if trainer.run_eagerly else self._traced
        self._run_one = traced(self._fetch_and_step)
        self._run_loop = self._run_each if trainer.run_eagerly else self._traced(self._loop)
        self._run_batch = traced(self._only_step)
        self._read_metrics = (
            trainer.get_metrics_result
            if trainer.run_eagerly
            else _function(trainer.get_metrics_result)
        )

    def __call__(self, iterator):
        """Runs one step group of an iterator and returns its logs, as Keras's functions do."""
        group = StepGroup(0, self._trainer.steps_per_execution, iterator)
        return self.run(group).logs

    def run(self, group: StepGroup) -> GroupResult:
        """Runs the steps of `group` and returns the logs of the last one.

        Raises:
            StopIteration: there is no batch for the first step.
        """
        if self._monitor:
            whole_state.forget_all()
        length = group.length
        iterator, worker_slice = without_slice(group.iterator)
        on_host = self._for_gpus and yields_on_host(iterator)
        with step_timeout_of(self._trainer.distribute_strategy):
            if group.may_run_out or not isinstance(iterator, _ITERATORS):
                outputs, waited, length = self._until_exhausted(
                    iterator, length, worker_slice, on_host
                )
                group = dataclasses.replace(group, length=length)
            elif length == 1:
                outputs, waited = self._run_one(iterator, self._count(1), worker_slice, on_host)
            else:
                outputs, waited = self._run_loop(
                    iterator, tf.constant(length), self._count(length), worker_slice, on_host
                )
        self._clock.note_input(waited)
        return GroupResult(group, self._logs(outputs))

    def _count(self, steps):
        """Returns the local steps of the round before the next `steps`; None without rounds."""
        return self._rounds.count(steps) if self._rounds else None

    def _logs(self, outputs):
        """Returns the logs of a group, given the outputs of its function."""
        if self._totals:
            logs, first_bad_steps, votes, *metrics = outputs
            if self._monitor:
                self._monitor.note(first_bad_steps)
                self._trainer.training_state.votes.note(votes)
            return LazyLogs(lambda: logs, (lambda: metrics[0]) if metrics else None)
        return LazyLogs(self._read_metrics) if self._logs_are_metrics else outputs

    def _end_of_group(self, outputs):
        """Returns the outputs of a group's function, given those of its last step."""
        if not self._totals:
            has_results = self._results and isinstance(outputs, dict)
            return {**outputs, **self._read_results()} if has_results else outputs
        if self._logs_are_metrics:
            return self._totals.results(self._trainer.get_metrics_result)
        read = self._read_results, self._read_all_metrics
        (results, metrics), first_bad_steps, votes = self._totals.results(
            lambda: [function() for function in read]
        )
        logs = self._totals.mean(outputs)
        return ({**logs, **results} if results else logs), first_bad_steps, votes, metrics

    def _read_results(self):
        """Returns those logs of a custom step that are results of metrics."""
        return {name: read() for name, read in self._results.items()}

    def _read_all_metrics(self):
        """Returns the results of all metrics; none if the step has not built one of them."""
        try:
            return self._trainer.get_metrics_result()
        except ValueError:
            return {}

    def _compiled(self, replicated_step):
        """Returns the step, compiled with XLA as a whole if there is one replica."""
        trainer = self._trainer
        if trainer.jit_compile and not trainer.run_eagerly and replicated_step.is_undivided:
            return _function(replicated_step, jit_compile=True)
        return replicated_step

    def _traced(self, python_function):
        return self._replicated.traced(_function(python_function))

    def _only_step(self, batch, done, worker_slice, on_host, has_open_rows=()):
        if not tf.executing_eagerly():
            batch = with_open_rows(batch, has_open_rows)
        return self._end_of_group(self._step_on(batch, done, worker_slice, on_host))

    def _step_on(self, batch, done, worker_slice, on_host):
        """Runs a step and returns its outputs.

        Args:
            batch: a global batch, or this worker's slice of one.
            done: number of local steps of the round before this one; None without rounds.
            worker_slice: the `WorkerSlice` that `batch` is, or None.
            on_host: whether the batch is in the host's memory, and GPUs compute.
        """
        if not tf.executing_eagerly():
            heartbeat.note_tracing()
        if on_host and self._replicated.is_undivided:
            with tf.device(_HOST):
                batch = in_page_locked_memory(batch)
        outputs = run_converted(self._trainer, self._replicated_step, batch, worker_slice)
        if self._rounds:
            self._rounds.end_of_step(done)
        if self._logs_are_metrics:
            return ()
        if self._totals:
            return outputs
        return reduce_per_replica(outputs, self._trainer.distribute_strategy, reduction="auto")

    # Each of the following returns (outputs of `_end_of_group`, seconds waited for input), and
    # the last one also the number of steps, which are fewer where the data end.

    def _fetch_and_step(self, iterator, done, worker_slice, on_host):
        batch, waited = clocks.fetch_now(iterator, _HOST if on_host else None)
        return self._only_step(batch, done, worker_slice, on_host), waited

    def _loop(self, iterator, length, done, worker_slice, on_host):
        def step(number, waited, since, _=None):
            batch, wait = clocks.fetch(iterator, since, _HOST if on_host else None)
            done_before = None if done is None else done + number
            outputs = self._step_on(batch, done_before, worker_slice, on_host)
            with tf.device(_HOST):
                waited, arrived = waited + wait, since + wait
            ended = clocks.step_end_time(self._trainer.trainable_variables, arrived)
            return number + 1, waited, ended, outputs

        start = tf.constant(0), tf.constant(0.0, tf.float64), tf.timestamp()
        # Metrics stay in variables. Other logs are loop variables, from the first step on.
        _, waited, _, outputs = tf.while_loop(
            lambda number, *_: number < length,
            step,
            (*start, ()) if self._logs_are_metrics else step(*start),
        )
        return self._end_of_group(outputs), waited

    def _run_each(self, iterator, length, done, worker_slice, on_host):
        waited = 0.0
        for number in range(int(length)):
            outputs, wait = self._run_one(
                iterator, None if done is None else done + number, worker_slice, on_host
            )
            waited += wait
        return outputs, waited

    def _until_exhausted(self, iterator, length, worker_slice, on_host):
        # The batch is fetched before the step begins: inside one function, operations that need
        # no data (the step counter, weight decay) would still run after the last batch.
        outputs, waited, since, steps = None, 0.0, time.perf_counter(), 0
        has_open_rows = open_rows(getattr(iterator, "element_spec", ()))
        for batch in take_up_to(length, iterator):
            waited += time.perf_counter() - since
            outputs = self._run_batch(batch, self._count(1), worker_slice, on_host, has_open_rows)
            since = time.perf_counter()
            steps += 1
        if outputs is None:
            raise StopIteration
        return outputs, waited, steps


class ReplicatedStep:
    """Runs a step on each replica's rows of a batch, in one or several micro-steps.

    The arguments are those of `StepFunction`.

    Attributes:
        results: {name of a log: function that reads it}, for logs that are results of metrics.
        name: name of the step.
        is_repeated: every replica runs the step on the whole batch.
        may_repeat: every replica has the whole batch.
    """

    def __init__(self, trainer, step, accumulators=None, micro_steps=1, rounds=None):
        self._trainer = trainer
        self.name = getattr(step, "__name__", "train_step")
        self.is_repeated = self.name in trainer.training_state.repeated_steps
        self.may_repeat = micro_steps == 1 and rounds is None
        self._rounds = rounds
        self._step = step
        self._accumulators = accumulators
        self._micro_steps = micro_steps
        self.results: dict = {}
        self._divided_logs: list[str] = []  # names of logs that micro-steps have parts of
        self._strategy = trainer.distribute_strategy
        self._replicas = self._strategy.num_replicas_in_sync
        self._has_copies = has_copies(self._strategy)
        # Replicas of several devices each, as in `kdist.parallel`.
        self._has_groups = hasattr(self._strategy, "groups")
        self._shares_storage = shares_storage(self._strategy)
        self._refusal = ""
        if self._replicas * self._micro_steps > 1 and (layer := _stateful_layer(trainer)):
            self._refusal = (
                f"layer {layer.name!r} is stateful: it keeps a state for each row of a batch, and "
                "the batch is divided among replicas or micro-steps. Use stateful=False, or one "
                "device without accumulate"
            )
            if not self.may_repeat:
                raise ValueError(self._refusal)
            self._repeat(ValueError(self._refusal))

    @property
    def is_undivided(self):
        """True if batches are not divided: one replica on one device, and one micro-step."""
        return self._replicas * self._micro_steps == 1 and not self._has_groups

    def traced(self, function):
        """Returns `function`, which calls the step, such that it is traced again where needed.

        Losses that are computed from all rows need an unknown number of rows. A program may fail
        then, or on the rows of one replica: in that case every replica has the whole batch.
        """
        state = self._trainer.training_state

        def call(*args):
            first_error = None
            while True:
                try:
                    result = function(*args)
                    break
                except KnownRowsError:
                    state.hides_rows = True
                except tf.errors.OpError as error:
                    is_whole = self._replicas == 1 or self.is_repeated
                    if isinstance(error, tf.errors.InvalidArgumentError) and not is_whole:
                        error.add_note(_HINT.format(replicas=self._replicas))
                    if isinstance(error, tf.errors.CancelledError) and self._shares_trace:
                        error.add_note(_HIDDEN_BY_SHARED_TRACE)
                    raise
                except Exception as error:
                    is_needed = isinstance(error, WholeBatchError)
                    if self._shares_trace and not is_needed:
                        _logger.debug("replicas share no trace: %s", error)
                        state.shares_trace = False
                    elif state.hides_rows and not is_needed and not self.is_repeated:
                        _logger.debug("traced with an unknown number of rows: %s", error)
                        state.hides_rows = False
                    elif self.may_repeat and not self.is_repeated:
                        first_error, self.is_repeated = error, True
                    else:
                        raise
            if first_error is not None:
                self._repeat(first_error)
            return result

        return call

    def _repeat(self, error):
        self.is_repeated = True
        self._trainer.training_state.repeat_step(self.name, error)

    def __call__(self, data, worker_slice=None):
        """Returns the step's outputs in the last micro-step, on each replica.

        Args:
            data: a batch.
            worker_slice: the `WorkerSlice` that `data` is; None if the batch is whole.
        """
        if self.is_undivided:
            return self._strategy.run(self._step, args=(data,))
        self.may_repeat &= worker_slice is None and not is_distributed(data)
        if self.is_repeated and not self.may_repeat:
            raise ValueError(self._refusal or _NEEDS_WHOLE_BATCH)
        division = self._division(data, worker_slice)
        last = self._micro_steps - 1
        run = functools.partial(self._micro_step, data, division)
        # The number of logs is known after the first trace, and one zero can be added to any.
        sums = [tf.zeros([1], tf.float64)] * num_local_replicas(self._strategy)
        if self._trainer.run_eagerly:
            for number in range(last):
                sums = run(number, sums)
        elif last:
            # One after the other, so that only one micro-step's activations are in memory.
            done, sums = tf.while_loop(
                lambda number, _: number < last,
                lambda number, sums: (number + 1, run(number, sums)),
                (tf.constant(0), sums),
                (tf.TensorShape([]), [tf.TensorShape([None])] * len(sums)),
                parallel_iterations=1,
            )
            with tf.control_dependencies([done]):
                data = tf.nest.map_structure(clocks.identity, data, expand_composites=True)
        return self._micro_step(data, division, last, sums, is_last=True)

    def _division(self, data, worker_slice):
        """Returns the `BatchDivision` of a batch, which may have to remain undivided."""
        divide = functools.partial(
            BatchDivision.of, data, self._strategy, self._micro_steps, worker_slice
        )
        try:
            return divide(self.is_repeated)
        except DifferentRowsError as error:
            if not self.may_repeat:
                raise
            self._repeat(error)
        return divide(is_repeated=True)

    def _micro_step(self, data, division, number, sums, is_last=False):
        """Runs a micro-step on each replica.

        Args:
            data: a batch.
            division: its `BatchDivision`.
            number: index of the micro-step.
            sums: parts of logs, added up over earlier micro-steps: a vector for each replica.
            is_last: whether this is the last micro-step. Defaults to False.

        Returns:
            The outputs of the step, on each replica. `sums` with those of this micro-step, if it
            is not the last one.
        """
        own_objects = _objects_of_program(self._trainer)
        shared_trace = SharedTrace() if self._shares_trace else None

        def on_replica(data):
            replica = this_replica()
            state = self._trainer.training_state
            rows, share = division.take(data, replica, number, bool(state.hides_rows))
            accumulators = self._accumulators
            step = self._step_class(division.sizes[replica])(
                share,
                replica,
                replica % num_local_replicas(self._strategy),
                self._replicas,
                self._has_copies,
                accumulators[replica] if isinstance(accumulators, list) else accumulators,
                is_last,
                self._has_groups,
            )
            step.loss_reduction, step.reduces_early = state.loss_reduction, state.reduces_early
            if not self._trainer.run_eagerly:  # a step that is traced can be traced again
                step.dependence.hides_rows, step.may_repeat = state.hides_rows, self.may_repeat
                step.shared_trace = shared_trace
            step.own_metrics = own_metric_variables(self._trainer.metrics)
            with attributes_of_replica(own_objects), step.running():
                with step.undoing_if_empty(self._trainer.metrics_variables):
                    outputs = self._step(rows)
                step.check_updates()
                step.average_state(except_for=self._synchronized_statistics())
                step.undo_repeated_changes()
            if isinstance(outputs, dict):
                read = {name: results.get(id(value)) for name, value in outputs.items()}
                self.results.update({name: found[1] for name, found in read.items() if found})
            parts, earlier = step.log_parts(outputs, results), sums[step.local_replica]
            if not is_last:
                self._divided_logs = list(parts)
                return earlier + _vector(parts.values())
            return {**outputs, **_added(parts, self._divided_logs, earlier)} if parts else outputs

        on_replica = tf.autograph.experimental.do_not_convert(on_replica)
        with recorded_results(self._trainer) as results:
            if self._trainer.run_eagerly:
                outputs = run_once(self._strategy, on_replica, data)
            else:
                outputs = self._strategy.run(on_replica, args=(data,))
        if is_last:
            return outputs
        return list(self._strategy.experimental_local_results(outputs))

    @property
    def _shares_trace(self):
        """True if replicas share a trace; those with several devices or parts of state cannot."""
        is_alike = self._has_copies and not self._has_groups and self._rounds is None
        is_whole = num_local_replicas(self._strategy) > 1 and not sharded_state(self._strategy)
        return self._trainer.training_state.shares_trace and is_alike and is_whole

    def _step_class(self, rows):
        """Returns the constructor of a replica's step, given its rows of the batch."""
        if self._shares_storage:
            return functools.partial(CentralStep, self._trainer)
        if self._rounds is None and sharded_state(self._strategy):
            return functools.partial(ShardedStep, self._trainer)
        if self._rounds is None:
            return ReplicaStep
        return functools.partial(LocalStep, rows, self._rounds)

    def _synchronized_statistics(self):
        """Returns the statistics of synchronized BatchNorm, which are equal on all replicas."""
        return [
            statistic
            for layer in self._trainer._flatten_layers()
            if getattr(layer, "synchronized", False)
            for statistic in layer.non_trainable_variables
        ]


def _objects_of_program(trainer):
    """Returns the model and its layers whose classes are not Keras's."""
    return [
        one
        for one in (trainer, *trainer._flatten_layers(include_self=False))
        if not type(one).__module__.startswith(("keras.", "kdist."))
    ]


def _vector(numbers):
    """Returns scalars as one float64 vector, which may be empty."""
    return tf.convert_to_tensor([tf.cast(number, tf.float64) for number in numbers], tf.float64)


def _added(parts, names, sums):
    """Returns {name: part} with sums of earlier micro-steps, a vector in the order of `names`."""
    earlier = {name: sums[place] for place, name in enumerate(names)}
    return {
        name: part + tf.cast(earlier[name], part.dtype) if name in earlier else part
        for name, part in parts.items()
    }


def run_converted(trainer, replicated_step, data, worker_slice):
    """Returns the step's outputs on `data`, whose optionals become None, as in Keras."""
    run = replicated_step
    if worker_slice:
        run = functools.partial(replicated_step, worker_slice=worker_slice)
    return trainer._autoconvert_optionals(run)(data)


def _function(python_function, **options):
    return function_of_its_own(python_function, reduce_retracing=True, **options)


def _stateful_layer(trainer):
    """Returns a layer that keeps a state for each row of the whole batch, or None."""
    layers = trainer._flatten_layers()
    return next((layer for layer in layers if getattr(layer, "stateful", False)), None)
