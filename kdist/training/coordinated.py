"""Training under parameter servers: the coordinator hands groups of steps to whichever is free.

    dispatcher = Dispatcher(strategy, max_staleness=None)
    function = CoordinatedFunction(model, model.train_step, dispatcher, updates=True)
    with function.under_way(groups) as under_way:   # several groups at a time
        for group in under_way:
            logs = function()                       # waits until one more of them has ended

Workers take groups as they come, so that a slow one holds up nobody. What a group adds to the
metrics is added to the shared ones at its end, atomically. A group whose worker dies is done again
by another: the updates that the dead one had made stay, so that a few examples weigh twice, and
`optimizer.iterations` is put right as soon as nothing is under way.
"""

import collections
import contextlib
import dataclasses
import itertools

import keras
import tensorflow as tf

from kdist.tensorflow_internals import traced_for_workers
from kdist.training.asynchronous_step import AsynchronousStep, MicroSteps
from kdist.training.finite import NONE_YET
from kdist.training.logs import LazyLogs
from kdist.training.predictions import joined
from kdist.training.share import BatchDivision
from kdist.training.shared_variables import push
from kdist.training.step import this_replica

# What takes a worker less is handed out with more of its kind, for the sake of messages; batches of
# callbacks and of the progress bar stay what they are.
_SHORT_SECONDS = 0.05
_LARGEST_BUNDLE = 32


def has_parameter_servers(strategy: tf.distribute.Strategy) -> bool:
    """Whether steps are handed to workers, and variables live on parameter servers."""
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)


class CoordinatedFunction:
    """Runs a step on the batches of groups, each group on one worker.

    Args:
        trainer: the model.
        step: a function of one replica's batch, such as `model.train_step`.
        dispatcher: that hands the groups out.
        logs_are_metrics: the logs are the results of the model's metrics.
        updates: the step makes updates.
        micro_steps: into how many parts a replica's rows of a batch are divided.
        gives_outputs: the outputs of all steps of a group are wanted, not the last one's logs.
        watch: a `Watch`, told of what groups saw.
    """

    def __init__(
        self,
        trainer,
        step,
        dispatcher,
        logs_are_metrics=True,
        updates=False,
        micro_steps=1,
        gives_outputs=False,
        watch=None,
    ):
        self._trainer = trainer
        self._dispatcher = dispatcher
        self._logs_are_metrics = logs_are_metrics
        self._gives_outputs = gives_outputs
        self._watch = watch
        self._updates = updates
        self._on_worker = OnWorker(trainer, step, updates, logs_are_metrics, micro_steps)
        self._functions = {}
        self._bundle = 1  # groups that are handed out together
        self._handed = {}  # what is under way: number -> (place of its first group, groups, steps)
        self._places = []  # of those that have ended
        self._steps = 0  # that they made
        self._counted: int | None = None  # the optimizer's count before them
        self._ended_besides, self._logs_now = 0, None  # groups that ended with the last one

    @contextlib.contextmanager
    def under_way(self, groups):
        """A context that gives the groups; several at a time are run while it lasts."""
        self._places, self._ended_besides = [], 0
        self._steps, self._counted = 0, self._count()
        self._dispatcher.repeats()
        try:
            yield self._handed_out(groups)
            while not self._dispatcher.is_idle:
                self._ended_besides = 0
                self()
        finally:
            self._dispatcher.forget()

    def _count(self):
        """The optimizer's count of updates, if each step adds one to it; else None."""
        if not (self._updates and self._logs_are_metrics):
            return None
        optimizer = self._trainer.optimizer
        # A loss scale's leaves steps out whose gradients are not finite; a step of the user's own
        # may make several updates.
        counts_each = isinstance(optimizer, keras.optimizers.Optimizer) and not isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        )
        return int(optimizer.iterations) if counts_each else None

    def _put_count_right(self):
        """When nothing is under way: without the updates of groups that were begun twice."""
        if self._counted is not None and self._dispatcher.repeats():
            self._trainer.optimizer.iterations.assign(self._counted + self._steps)

    def _handed_out(self, groups):
        """Each group, after as many as may be under way have been handed out."""
        waiting = collections.deque()
        for place, bundle in self._bundles(groups):
            while waiting and self._trainer.shall_pause:
                yield waiting.popleft()
            batches = bundle[0].iterator.take(
                sum(group.length for group in bundle), apart=self._gives_outputs
            )
            if batches is None:
                break
            while not self._dispatcher.may_start(batches.length):
                yield waiting.popleft()
            self._start(batches, place, len(bundle))
            waiting.extend(bundle)
        while waiting:
            yield waiting.popleft()

    def _bundles(self, groups):
        """(place of the first, groups that are handed out together)."""
        numbered = enumerate(groups)
        for place, group in numbered:
            # Of data without a known end, nobody knows how many groups there will be.
            more = 0 if group.may_run_out or not self._bundles_are_free else self._bundle - 1
            yield place, [group, *(other for _, other in itertools.islice(numbered, more))]

    @property
    def _bundles_are_free(self):
        """Nobody wants each group by itself: for its outputs, its time, or its staleness."""
        trainer = self._trainer
        return not (self._gives_outputs or trainer.is_tuning or trainer.max_staleness is not None)

    def __call__(self, *_):
        """Waits until one more group has ended; gives logs as of now, or its outputs."""
        if self._ended_besides:
            self._ended_besides -= 1
            return self._logs_now
        number, results, seconds = self._dispatcher.wait()
        place, groups, steps = self._handed.pop(number)
        self._steps += steps
        if self._dispatcher.is_idle:
            self._put_count_right()
        self._places.append(place)
        if self._gives_outputs:
            return results
        if seconds < _SHORT_SECONDS and groups == self._bundle:
            self._bundle = min(2 * self._bundle, _LARGEST_BUNDLE)
        facts, logs = results
        if self._watch:
            self._watch.note(*facts.numpy())
        self._ended_besides = groups - 1
        read = self._trainer.get_metrics_result if self._logs_are_metrics else (lambda: logs)
        self._logs_now = LazyLogs(read)
        return self._logs_now

    @property
    def is_idle(self):
        """Every step that was handed out has been made, and its logs have been given."""
        return self._dispatcher.is_idle and not self._ended_besides

    def group(self, *_):
        """Waits until one more group has ended; gives its outputs."""
        return joined(self())

    def in_order(self, outputs):
        """The outputs of groups in the order of the rows."""
        return [part for _, part in sorted(zip(self._places, outputs, strict=True), key=_place)]

    def _start(self, batches, place, groups):
        function = self._function_of(batches)
        number = self._dispatcher.start(function, batches.tensors, batches.arrays, batches.length)
        self._handed[number] = place, groups, batches.length

    def _function_of(self, batches):
        """The function of such a group, traced once."""
        key = batches.key
        if key not in self._functions:
            with traced_for_workers(self._trainer.distribute_strategy):
                self._functions[key] = self._traced(batches)
        return self._functions[key]

    def _traced(self, batches):
        steps = self._outputs if self._gives_outputs else self._logs

        def group(*tensors):
            return steps(batches.reader(*tensors))

        return tf.function(group, autograph=False).get_concrete_function(*batches.signature)

    # What a worker does with a group.

    def _logs(self, reader):
        """What `Watch.note` takes, and the last step's logs."""
        variables = [variable._value for variable in self._trainer.metrics_variables]
        added = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
        facts = tf.stack([tf.cast(reader.length, tf.int64), 0, 0, NONE_YET])

        def step(number, added, facts, _=None):
            batch = reader.batch(number)
            parts, staleness, bad, logs = self._on_worker(batch, _number(reader, number))
            if self._logs_are_metrics:
                added = [total + part for total, part in zip(added, parts, strict=True)]
            else:  # the next step's logs are about this one as well
                push(variables, parts, _add)
            return number + 1, added, _with(facts, staleness, bad), self._own_logs(logs)

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

    def _own_logs(self, logs):
        return () if self._logs_are_metrics else logs

    def _outputs(self, reader):
        """The outputs of the group's steps, a tuple of them."""
        return tuple(
            self._on_worker.outputs(reader.batch(number), _number(reader, number))
            for number in range(reader.length)
        )


def _add(variable, part):
    variable.assign_add(part)


def _number(reader, number):
    """The number of a group's batch, counted over all workers."""
    return reader.first + tf.cast(number, tf.int64)


def _place(placed):
    return placed[0]


def _with(facts, staleness, bad):
    steps, total, largest, first = tf.unstack(facts)
    largest = tf.maximum(largest, staleness)
    return tf.stack([steps, total + staleness, largest, tf.where(first == NONE_YET, bad, first)])


@dataclasses.dataclass(frozen=True)
class Staleness:
    """How old the weights were that steps computed their gradients from.

    Attributes:
        steps: how many steps that is about.
        mean: of the updates that others made between a step's reading and its own update.
        largest: of the same.
    """

    steps: int = 0
    mean: float = 0.0
    largest: int = 0


class Watch:
    """What the coordinator knows of the steps that were made since `reset`."""

    _first_bad: int | None = None

    def __init__(self):
        self.reset()

    def reset(self):
        """Forgets all."""
        self._steps = self._sum = self._largest = 0
        self._first_bad = None

    def note(self, steps, staleness, largest_staleness, first_bad):
        """Takes what a group saw: of all its steps, and the first bad one or `NONE_YET`."""
        self._steps += int(steps)
        self._sum += int(staleness)
        self._largest = max(self._largest, int(largest_staleness))
        if first_bad != NONE_YET:
            self._first_bad = min(int(first_bad), self._first_bad or int(first_bad))

    def staleness(self) -> Staleness:
        """That of all steps."""
        return Staleness(self._steps, self._sum / max(1, self._steps), self._largest)

    def first_bad_step(self) -> int | None:
        """The step (from 1) whose loss was the first not to be finite."""
        return self._first_bad

    def watching(self, train_step):
        """The step as it is: what it saw is told with its group's outcome."""
        return train_step


class OnWorker:
    """Runs a step on each replica of one worker, in one or several micro-steps."""

    def __init__(self, trainer, step, updates, from_zero, micro_steps):
        self._trainer, self._step = trainer, step
        self._updates, self._from_zero, self._micro_steps = updates, from_zero, micro_steps
        self._strategy = trainer.distribute_strategy

    def __call__(self, data, number):
        """(added to each variable of the metrics, staleness, bad step, logs) of a step."""
        division = BatchDivision.of(data, self._strategy, self._micro_steps)
        micro_steps = self._new_micro_steps()
        total = None
        for micro_step in range(self._micro_steps):
            with tf.control_dependencies(total or []):
                results = self._run(data, number, division, micro_step, micro_steps)
            added, staleness, bad, logs = results
            added = [self._over_replicas("SUM", part) for part in added]
            total = added if total is None else [a + b for a, b in zip(total, added, strict=True)]
        first = self._strategy.experimental_local_results
        logs = tf.nest.map_structure(lambda log: self._over_replicas("MEAN", log), logs)
        return total, tf.reduce_max(tf.stack(first(staleness))), first(bad)[0], logs

    def _over_replicas(self, how, value):
        if self._strategy.num_replicas_in_sync == 1:
            return value
        return self._strategy.reduce(how, value, axis=None)

    def outputs(self, data, number):
        """What the step gives for all rows, in their order."""
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
            with step.running():
                outputs = self._step(rows)
            return *step.outcome(), outputs

        return self._strategy.run(
            tf.autograph.experimental.do_not_convert(on_replica), args=(data,)
        )
