"""Step functions: one call runs a group of steps on every replica.

Several steps in one TensorFlow function cost one call from Python instead of several. Keras builds
that loop from optionals and conditions, which fail under MirroredStrategy; a plain loop over a
known number of steps does not.
"""

import contextlib
import functools
import time

import tensorflow as tf

from kdist.training import clock as clocks
from kdist.training.epochs import up_to
from kdist.training.inputs import without_part
from kdist.training.keras_internals import reduce_per_replica
from kdist.training.local_steps import LocalStep
from kdist.training.logs import LazyLogs
from kdist.training.share import BatchDivision
from kdist.training.step import ReplicaStep, this_replica
from kdist.training.step_limit import within_limit
from kdist.training.together import Together, are_several_workers, replicas_here

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class StepFunction:
    """Runs `step` on the batches of an iterator, on every replica of the trainer's strategy.

    Args:
        trainer: the model.
        step: a function of one replica's batch, such as `model.train_step`, that gives its logs.
        logs_are_metrics: the logs are the results of the model's metrics. Then nothing is
            carried out of the loop, and the metrics are read when somebody reads the logs.
        accumulators: where the gradients of micro-steps are kept; None if a step is a single one.
        micro_steps: into how many parts a replica's rows of a batch are divided.
        watch: a `FiniteWatch` that the step keeps, if any.
        rounds: the `Rounds` of local steps; None if replicas meet in every step.
        clock: a `StepClock` that is told of waiting for input, if any.
    """

    def __init__(
        self,
        trainer,
        step,
        logs_are_metrics,
        accumulators=None,
        micro_steps=1,
        watch=None,
        rounds=None,
        clock=None,
    ):
        self._trainer = trainer
        self._clock = clock or clocks.StepClock()
        self._rounds = rounds
        self._logs_are_metrics = logs_are_metrics
        self._watch = watch
        several_workers = are_several_workers(trainer.distribute_strategy)
        asked = trainer.asked if watch else None
        self._together = Together(trainer, watch, asked) if several_workers else None
        on_all_replicas = OnAllReplicas(trainer, step, accumulators, micro_steps, rounds)
        self._on_all_replicas = self._compiled(on_all_replicas)
        compiled = (lambda f: f) if trainer.run_eagerly else _function
        self._one = compiled(self._next_step)
        self._group = self._several if trainer.run_eagerly else _function(self._loop)
        self._on_batch = compiled(self._only_step)
        self._read_metrics = compiled(trainer.get_metrics_result)

    def __call__(self, iterator, length=None, may_run_out=False):
        """Runs `length` steps (by default `steps_per_execution`) and gives the last one's logs.

        Raises:
            StopIteration: there was no batch left for the first step.
        """
        length = length or self._trainer.steps_per_execution
        iterator, part = without_part(iterator)
        with within_limit(self._trainer.distribute_strategy):
            if may_run_out or not isinstance(iterator, _ITERATORS):
                outputs, waited = self._as_many_as_there_are(iterator, length, part)
            elif length == 1:
                outputs, waited = self._one(iterator, self._count(1), part)
            else:
                outputs, waited = self._group(
                    iterator, tf.constant(length), self._count(length), part
                )
        self._clock.note_input(waited)
        return self._logs(outputs)

    def under_way(self, groups):
        """A context that gives the groups: each is run when its turn has come."""
        return contextlib.nullcontext(groups)

    def _count(self, steps):
        """Local steps of this round that were done before the next `steps`; None without rounds."""
        return self._rounds.count(steps) if self._rounds else None

    def _logs(self, outputs):
        """The logs of a group, from what its function gave."""
        if self._together:
            logs, first_bad_steps, asked = outputs
            if self._watch:
                self._watch.note(first_bad_steps)
                self._trainer.asked.note(asked)
            return LazyLogs(lambda: logs)
        return LazyLogs(self._read_metrics) if self._logs_are_metrics else outputs

    def _end_of_group(self, outputs):
        """What a group's function gives, from the last step's outputs."""
        if not self._together:
            return outputs
        results, first_bad_steps, asked = self._together.results()
        logs = results if self._logs_are_metrics else self._together.mean(outputs)
        return logs, first_bad_steps, asked

    def _compiled(self, on_all_replicas):
        """With one replica XLA takes the whole step; with several, the model compiles parts."""
        trainer = self._trainer
        if trainer.jit_compile and not trainer.run_eagerly and on_all_replicas.is_a_single_part:
            return _function(on_all_replicas, jit_compile=True)
        return on_all_replicas

    def _only_step(self, batch, done, part):
        return self._end_of_group(self._step_on(batch, done, part))

    def _step_on(self, batch, done, part):
        """Runs a step.

        Args:
            batch: a whole one, or a `Part` of one.
            done: local steps of this round that were done before; None without rounds.
            part: the `Part` that the batch is, or None.
        """
        outputs = on_converted(self._trainer, self._on_all_replicas, batch, part)
        if self._rounds:
            self._rounds.end_of_step(done)
        if self._logs_are_metrics:
            return ()
        if self._together:
            return outputs
        return reduce_per_replica(outputs, self._trainer.distribute_strategy, reduction="auto")

    # Each of these gives (what `_end_of_group` gives, seconds that steps waited for input).

    def _next_step(self, iterator, done, part):
        batch, waited = clocks.at_once(iterator)
        return self._only_step(batch, done, part), waited

    def _loop(self, iterator, length, done, part):
        def step(number, waited, since, _=None):
            batch, wait = clocks.fetch(iterator, since)
            outputs = self._step_on(batch, None if done is None else done + number, part)
            with tf.device("CPU:0"):
                waited, arrived = waited + wait, since + wait
            ended = clocks.end_of_step(self._trainer.trainable_variables, arrived)
            return number + 1, waited, ended, outputs

        start = tf.constant(0), tf.constant(0.0, tf.float64), tf.timestamp()
        # Metrics stay where they are; logs of another kind are carried along, from the first on.
        _, waited, _, outputs = tf.while_loop(
            lambda number, *_: number < length,
            step,
            (*start, ()) if self._logs_are_metrics else step(*start),
        )
        return self._end_of_group(outputs), waited

    def _several(self, iterator, length, done, part):
        waited = 0.0
        for number in range(int(length)):
            outputs, wait = self._one(iterator, None if done is None else done + number, part)
            waited += wait
        return outputs, waited

    def _as_many_as_there_are(self, iterator, length, part):
        # The batch is fetched before the step begins: within one function, what needs no data
        # (the step counter, weight decay) would still be done after the last batch.
        outputs, waited, since = None, 0.0, time.perf_counter()
        for batch in up_to(length, iterator):
            waited += time.perf_counter() - since
            outputs = self._on_batch(batch, self._count(1), part)
            since = time.perf_counter()
        if outputs is None:
            raise StopIteration
        return outputs, waited


class OnAllReplicas:
    """Runs a step on each replica's share of a batch, in one or several micro-steps.

    Arguments are those of `StepFunction`.
    """

    def __init__(self, trainer, step, accumulators=None, micro_steps=1, rounds=None):
        self._trainer = trainer
        self._rounds = rounds
        self._step = step
        self._accumulators = accumulators
        self._micro_steps = micro_steps
        self._strategy = trainer.distribute_strategy
        self._replicas = self._strategy.num_replicas_in_sync
        self._has_copies = isinstance(
            self._strategy,
            tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy,
        )
        # Of replicas that are on several devices, as `kdist.parallel` has them.
        self._has_groups = hasattr(self._strategy, "groups")
        if isinstance(self._strategy, tf.distribute.experimental.CentralStorageStrategy):
            _check_storage_is_not_shared(self._replicas)

    @property
    def is_a_single_part(self):
        """A batch is not divided: one replica, on one device, and one micro-step."""
        return self._replicas * self._micro_steps == 1 and not self._has_groups

    def __call__(self, data, part=None):
        """What the step gives in the last micro-step, on each replica.

        Args:
            data: a batch.
            part: the `Part` of a batch that this worker has read; None if it is whole.
        """
        if self.is_a_single_part:
            return self._strategy.run(self._step, args=(data,))
        division = BatchDivision.of(data, self._strategy, self._micro_steps, part)
        last = self._micro_steps - 1
        run = functools.partial(self._micro_step, data, division)
        if self._trainer.run_eagerly:
            for number in range(last):
                run(number)
        elif last:
            # One after the other, so that only one micro-step's activations are in memory.
            (done,) = tf.while_loop(
                lambda number: number < last,
                lambda number: (number + 1, run(number))[:1],
                [tf.constant(0)],
                parallel_iterations=1,
            )
            with tf.control_dependencies([done]):
                data = tf.nest.map_structure(tf.identity, data, expand_composites=True)
        return self._micro_step(data, division, last, is_last=True)

    def _micro_step(self, data, division, number, is_last=False):
        def on_replica(data):
            replica = this_replica()
            rows, share = division.take(data, replica, number)
            step = self._kind_of_step(division.sizes[replica])(
                share,
                replica,
                replica % replicas_here(self._strategy),
                self._replicas,
                self._has_copies,
                self._accumulators,
                is_last,
                self._has_groups,
            )
            with step.running():
                with step.counting(self._trainer.metrics_variables):
                    outputs = self._step(rows)
                step.bring_together(except_for=self._equal())
            return outputs

        return self._strategy.run(
            tf.autograph.experimental.do_not_convert(on_replica), args=(data,)
        )

    def _kind_of_step(self, rows):
        """What makes a step of a replica that has `rows` of the batch."""
        if self._rounds is None:
            return ReplicaStep
        return functools.partial(LocalStep, rows, self._rounds)

    def _equal(self):
        """The statistics of synchronised BatchNorm, which all replicas compute alike."""
        return [
            statistic
            for layer in self._trainer._flatten_layers()
            if getattr(layer, "synchronized", False)
            for statistic in layer.non_trainable_variables
        ]


def on_converted(trainer, on_all_replicas, data, part):
    """Runs `on_all_replicas`, with None for each of the data that is an optional, as Keras does."""
    run = functools.partial(on_all_replicas, part=part) if part else on_all_replicas
    return trainer._autoconvert_optionals(run)(data)


def _check_storage_is_not_shared(replicas):
    """Keras reads and then assigns: replicas that share a variable overwrite each other's part."""
    if replicas > 1:
        raise ValueError(
            f"central_storage on {replicas} devices trains to wrong numbers with Keras 3, whose "
            "metrics and layers read a variable and then assign it, each replica over the other; "
            "take --strategy=mirrored, or central_storage on one device"
        )


def _function(python_function, **options):
    return tf.function(python_function, reduce_retracing=True, autograph=False, **options)
