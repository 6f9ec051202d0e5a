"""The loops of `fit`, `evaluate` and `predict`: epochs of groups of steps, with callbacks.

class ReplicatedTrainer(Loops, TensorFlowTrainer):
    ...                       # makes the functions that the loops call for a group of steps
"""

import functools
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import keras
import tensorflow as tf

from kdist import heartbeat
from kdist.backend import check_no_distribution
from kdist.training import inputs
from kdist.training.clock import StepClock
from kdist.training.coordinated import has_parameter_servers
from kdist.training.epochs import StepGroups
from kdist.training.feeds import NumberedFeed, SentFeed
from kdist.training.keras_internals import (
    filter_traceback,
    pythonify_logs,
    train_validation_split,
)
from kdist.training.logs import CallbackList, LazyLogs, without_writers
from kdist.training.predictions import concatenated
from kdist.training.resume import Position, data_facts, resumption_of
from kdist.training.sidecar import follow, is_evaluated_elsewhere, is_evaluator
from kdist.training.together import are_several_workers


class Loops:
    """What a trainer of Keras does for epochs and batches, in kdist's way; the rest is Keras's.

    `fit`, `evaluate` and `predict` take what Keras's take, and kdist's pipelines as well, which
    know how many steps an epoch has.
    """

    # What has to be the same when another process goes on with the last `fit`.
    data_facts: dict | None = None

    # Of the epoch's steps, without validation; known when they are done.
    logs_of_epoch: Mapping[str, float] = types.MappingProxyType({})

    # Those of the last `fit`, with Keras's own.
    callbacks_of_fit: Sequence[keras.callbacks.Callback] = ()

    # Examples behind one step of the last `fit`; None where the data did not say.
    global_batch_size: int | None = None

    # Steps of this epoch that are done; what callbacks are told counts groups as whole.
    steps_in_epoch: int = 0

    # The epoch that is under way, and the batches of the data that were behind when it began.
    _epoch_number: int = 0
    _batches_before_epoch: int = 0

    @property
    def position(self) -> Position:
        """Where training is, between two calls of the step function."""
        batch = self._batches_before_epoch + self.steps_in_epoch
        return Position(self._epoch_number, self.steps_in_epoch, batch)

    @filter_traceback
    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
    ):
        """Trains the model; arguments, callbacks and the `History` returned are Keras's.

        `x` and `validation_data` may also be pipelines of `kdist.data`. With one, an epoch has
        the steps that the pipeline says, and `initial_epoch` goes on where that epoch begins.

        In a job with an evaluator, that task evaluates each checkpoint on `validation_data`, and
        the others do not.

        Raises:
            RuntimeError: a `keras.distribution` is set, which does nothing on TensorFlow.
        """
        check_no_distribution()
        self._assert_compile_called("fit")
        epochs = _at_most(keras.config.max_epochs(), epochs)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        if is_evaluator(self.distribute_strategy):
            validate = self._validation(
                validation_data, validation_batch_size or batch_size, validation_steps, None
            )
            return follow(self, callbacks, validate)
        if is_evaluated_elsewhere(self.distribute_strategy):
            validation_data = None
        resumption = resumption_of(callbacks)
        resumed = resumption.load(self) if resumption else None
        start = resumed or _beginning(x, initial_epoch, steps_per_epoch)
        groups = self._training_groups(
            x,
            start,
            builds=bool(resumed),  # what is restored has to be there before the first step
            y=y,
            sample_weight=inputs.as_float(sample_weight),
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        callbacks = self._callback_list(callbacks, verbose, epochs, groups, add_history=True)
        self.callbacks_of_fit = callbacks.callbacks
        validate = self._validation(
            validation_data,
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
            callbacks=callbacks,
        )
        self.stop_training = False
        self.make_train_function()
        self.clock.take()
        self._finite_watch.reset()
        self.average_replicas()
        try:
            if resumed:
                resumption.restore(self.data_facts)
            callbacks.on_train_begin()
            if resumed and self.stop_training:  # a callback had decided so
                epochs = start.epoch
            numbers = range(self._initial_epoch or start.epoch, epochs)
            logs = self._train_epochs(numbers, groups, callbacks, validate, validation_freq)
            if isinstance(self.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                self.optimizer.finalize_variable_values(self.trainable_weights)
            callbacks.on_train_end(logs=logs)
        finally:
            if resumption:
                resumption.release()
        return self.history

    @filter_traceback
    def evaluate(
        self,
        x=None,
        y=None,
        batch_size=None,
        verbose="auto",
        sample_weight=None,
        steps=None,
        callbacks=None,
        return_dict=False,
        **kwargs,
    ):
        """Gives loss and metrics over all examples; arguments and result are Keras's.

        `x` may also be a pipeline of `kdist.data`. A boolean sample weight marks padding: rows
        that are False count nowhere.
        """
        self._assert_compile_called("evaluate")
        groups = kwargs.pop("_step_groups", None)
        if kwargs:
            raise ValueError(f"Arguments not recognized: {kwargs}")
        if groups is None:
            groups = self._evaluation_groups(x, y, sample_weight, batch_size, steps)
        groups.reset()
        callbacks = self._callback_list(callbacks, verbose, 1, groups)
        self.average_replicas()
        self.make_test_function()
        self.stop_evaluating = False
        callbacks.on_test_begin()
        self.reset_metrics()
        logs = self._run_groups(
            groups,
            self.test_function,
            self.test_function,
            callbacks.on_test_batch_begin,
            callbacks.on_test_batch_end,
            lambda: self.stop_evaluating,
            StepClock(),
        )
        logs = self.epoch_results(logs)
        callbacks.on_test_end(logs)
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    @filter_traceback
    def predict(self, x, batch_size=None, verbose="auto", steps=None, callbacks=None):
        """Gives the outputs for `x`, in its order, as Keras does; `x` may also be a pipeline."""
        feed, part = self._feed(x)
        x, steps = inputs.evaluation_data(x, steps, part)
        groups = StepGroups(
            self.distribute_strategy,
            feed=feed,
            x=x,
            batch_size=batch_size,
            steps_per_epoch=steps,
            steps_per_execution=self.steps_per_execution,
        )
        callbacks = self._callback_list(callbacks, verbose, 1, groups)
        self.average_replicas()
        self.make_predict_function()
        self.stop_predicting = False
        callbacks.on_predict_begin()
        outputs = []

        def predict_group(*group):
            outputs.append(self.predict_function.group(*group))
            return {"outputs": outputs[-1]}

        self._run_groups(
            groups,
            self.predict_function,
            predict_group,
            callbacks.on_predict_batch_begin,
            callbacks.on_predict_batch_end,
            lambda: self.stop_predicting,
            StepClock(),
        )
        callbacks.on_predict_end()
        return concatenated(self.predict_function.in_order(outputs))

    def _training_groups(self, x, start, steps_per_epoch, shuffle, **data):
        """The groups of steps of `fit`, from where training begins or goes on."""
        facts_of, (feed, part) = x, self._feed(x, start.batch)
        is_pipeline = inputs.is_pipeline(x)
        if is_pipeline:
            x, steps_per_epoch = inputs.training_data(x, steps_per_epoch, start.batch, part)
            shuffle = False  # the pipeline does; Keras would warn that it does not
        groups = self._step_groups(
            feed=feed, x=x, steps_per_epoch=steps_per_epoch, shuffle=shuffle, **data
        )
        self.global_batch_size = part.batch_rows if part else groups.data_adapter.batch_size
        if not is_pipeline:
            groups.leave_out(start)
        groups.first_step = self.steps_in_epoch = start.step
        self._epoch_number, self._batches_before_epoch = start.epoch, start.batch - start.step
        self.data_facts = data_facts(facts_of, self.global_batch_size, steps_per_epoch)
        return groups

    def _train_epochs(self, numbers, groups, callbacks, validate, validation_freq):
        """Gives the logs of the last one."""
        logs = {}
        for epoch in numbers:
            is_due = validate and self._should_eval(epoch, validation_freq)
            logs = self._epoch(epoch, groups, callbacks, validate if is_due else None)
            if self.stop_training:
                break
        return logs

    def _epoch(self, epoch, groups, callbacks, validate):
        self._epoch_number, self.steps_in_epoch = epoch, groups.first_step
        callbacks.on_epoch_begin(epoch)
        logs = self._train_epoch(groups, callbacks)
        if validate:
            logs.update({f"val_{name}": value for name, value in validate().items()})
        callbacks.on_epoch_end(epoch, logs)
        self._batches_before_epoch += self.steps_in_epoch
        return logs

    def _train_epoch(self, groups, callbacks):
        first_step = groups.first_step
        if not first_step:  # else the metrics are those of the epoch's first part
            self.reset_metrics()
        logs = self._run_groups(
            groups,
            self.train_function,
            functools.partial(self._tune, groups) if self._tuner else self.train_function,
            callbacks.on_train_batch_begin,
            callbacks.on_train_batch_end,
            lambda: self.stop_training,
            self.clock,
        )
        self.average_replicas()
        if logs or not first_step:
            self.logs_of_epoch = self.epoch_results(logs)
        # Else all its steps were done by another process, whose logs these are.
        return dict(self.logs_of_epoch)

    def _tune(self, groups, iterator, length, may_run_out):
        """Runs a group and notes how long it took, until the best length is found."""
        tuner = self._tuner
        began = time.perf_counter()
        logs = self.train_function(iterator, length, may_run_out)
        if not tuner.is_done:
            self.optimizer.iterations.numpy()  # waits for the device
            tuner.note(length, self._mean_over_workers(time.perf_counter() - began))
            groups.steps_per_execution = self.steps_per_execution = tuner.length
            if tuner.is_done:
                print(f"kdist: {tuner}")
        return logs

    def _mean_over_workers(self, number):
        """The same number on all workers, so that they go on alike."""
        strategy = self.distribute_strategy
        if not are_several_workers(strategy):
            return number
        return float(strategy.reduce(tf.distribute.ReduceOp.MEAN, tf.constant(number), None))

    def _run_groups(self, groups, function, call, at_begin, at_end, stopped, clock):
        """Has `function` run each group of one epoch, by `call`; gives the last one's logs."""
        logs, is_first = {}, True
        now = time.perf_counter
        heartbeat.start()
        with (
            clock.running(),
            groups.catch_stop_iteration(),
            function.under_way(groups) as under_way,
        ):
            for group in under_way:
                began = now()
                at_begin(group.first)
                called = now()
                # As Keras counts them, also for a group that is cut short at the epoch's end.
                last = group.first + groups.steps_per_execution - 1
                with heartbeat.step(function, group.first, group.length, is_first):
                    logs = call(group.iterator, group.length, group.may_run_out)
                is_first = False
                returned = now()
                clock.note_call(group.length, returned - called)
                if function is self.train_function:
                    self.steps_in_epoch = group.first + group.length
                at_end(last, logs)
                clock.note_callbacks(called - began + now() - returned)
                if stopped():
                    break
        return logs

    def epoch_results(self, logs):
        """The epoch's logs as floats: the metrics, or what the user's own step gave last."""
        if isinstance(logs, LazyLogs):
            return dict(logs)
        return pythonify_logs(self._get_metrics_result_or_logs(logs))

    # What the loops need.

    def _validation(self, data, batch_size, steps, callbacks):
        """A function that evaluates on `data`, set up once for all epochs; None without data."""
        if data is None:
            return None
        x, y, sample_weight = inputs.unpack(data)

        @functools.cache
        def step_groups():
            return self._evaluation_groups(x, y, sample_weight, batch_size, steps)

        def validate():
            return self.evaluate(
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                verbose="auto" if callbacks else 0,
                steps=steps,
                callbacks=callbacks,
                return_dict=True,
                _step_groups=step_groups(),
            )

        return validate

    def _evaluation_groups(self, x, y, sample_weight, batch_size, steps):
        feed, part = self._feed(x)
        x, steps = inputs.evaluation_data(x, steps, part)
        return self._step_groups(
            feed=feed,
            x=x,
            y=y,
            sample_weight=inputs.as_float(sample_weight),
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=False,
        )

    def _step_groups(self, builds=False, **data):
        groups = StepGroups(
            distribute_strategy=self.distribute_strategy,
            steps_per_execution=self.steps_per_execution,
            **data,
        )
        if builds or self._distribute_strategy or self.accumulate > 1:
            self._build_for(groups)
        return groups

    def _feed(self, x, start=0):
        """(what makes a group's iterator of the data set that `x` is, or becomes; its `Part`).

        Args:
            x: the data.
            start: the number of the first batch that is wanted of a pipeline.
        """
        part = inputs.part_of(x, self.distribute_strategy)
        if part:
            return lambda dataset: inputs.InParts(iter(dataset), part), part
        if not has_parameter_servers(self.distribute_strategy):
            return iter, None
        if inputs.is_pipeline(x) and x.arrays() is not None:
            return lambda _: NumberedFeed(x, start), None
        return lambda dataset: SentFeed(iter(dataset)), None

    def _build_for(self, groups):
        """Makes all variables before data flow: replicas and micro-steps cannot make them."""
        element_spec = groups.data_adapter.get_tf_dataset().element_spec
        scope = self._distribute_strategy.scope if self._distribute_strategy else nullcontext
        with scope():
            self._symbolic_build(data_batch=inputs.with_open_batch(element_spec))

    def _callback_list(self, callbacks, verbose, epochs, groups, add_history=False):
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        if not self.distribute_strategy.extended.should_checkpoint:
            verbose, callbacks = 0, without_writers(callbacks)
        return CallbackList(
            callbacks,
            add_history=add_history,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=groups.num_batches,
            model=self,
        )


def _beginning(x, initial_epoch, steps_per_epoch):
    """The position of an epoch's beginning: of a pipeline, where that epoch of it begins."""
    own = x.steps_per_epoch if inputs.is_pipeline(x) else steps_per_epoch
    return Position(initial_epoch, 0, initial_epoch * (own or 0))


def _at_most(limit, epochs):
    """The number of epochs, within the limit that Keras's configuration sets to debug a run."""
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        return limit
    return epochs
