"""Training under every synchronous strategy: the same step on each replica, one update.

`ReplicatedTrainer` is Keras's own TensorFlow trainer with other loops: it can stand in for it in
any class that derives from it, `kdist.Model` among them. The losses, the gradients and the update
are Keras's.
"""

import functools
import time
import warnings

import keras
import tensorflow as tf

from kdist.training import compiled_parts, inputs, keras_hooks
from kdist.training import step as steps
from kdist.training.accumulation import Accumulators, optimizers_of
from kdist.training.clock import StepClock
from kdist.training.coordinated import (
    CoordinatedFunction,
    Staleness,
    Watch,
    has_parameter_servers,
)
from kdist.training.dispatcher import Dispatcher
from kdist.training.epochs import StepGroups
from kdist.training.feeds import NumberedFeed, SentFeed
from kdist.training.finite import FiniteWatch
from kdist.training.functions import StepFunction
from kdist.training.keras_internals import (
    TensorFlowTrainer,
    filter_traceback,
    loss_module,
    pythonify_logs,
    train_validation_split,
)
from kdist.training.local_steps import Rounds
from kdist.training.local_steps import check as check_local
from kdist.training.logs import CallbackList, LazyLogs, without_writers
from kdist.training.padding import keep_valid, split_mask
from kdist.training.predictions import PredictFunction, concatenated
from kdist.training.sidecar import follow, is_evaluated_elsewhere, is_evaluator
from kdist.training.together import are_several_workers
from kdist.training.tuning import GroupTuner

# Outside of a step of kdist they call Keras's own functions, so that nothing else changes.
keras_hooks.install()


class ReplicatedTrainer(TensorFlowTrainer):
    """Keras's TensorFlow trainer: several steps a call, logs read on demand, padding left out.

    `fit`, `evaluate` and `predict` take what Keras's take, and kdist's pipelines as well, which
    know how many steps an epoch has.
    """

    # Examples behind one step of the last `fit`; None where the data did not say.
    global_batch_size: int | None = None

    # Steps of this epoch that are done; what callbacks are told counts groups as whole.
    steps_in_epoch: int = 0

    # Where the time of `fit` goes.
    clock: StepClock | None = None

    _finite_watch: FiniteWatch | Watch | None = None

    # How many micro-batches' gradients are added up before an update; see `compile`.
    accumulate: int = 1

    # How many updates may happen between a step's reading and its own; see `compile`.
    max_staleness: int | None = None

    # Steps that a replica takes alone before weights are averaged; see `compile`.
    local_steps: int | None = None

    local_slots: str = "keep"

    _rounds: Rounds | None = None

    _tuner: GroupTuner | None = None

    _dispatcher: Dispatcher | None = None

    def compile(
        self,
        *args,
        accumulate=1,
        steps_per_execution=1,
        max_staleness=None,
        local_steps=None,
        local_slots="keep",
        **kwargs,
    ):
        """Keras's `compile`, with some things more.

        Args:
            accumulate: into how many micro-batches each replica divides its rows of a batch, one
                after the other, to save memory. Their gradients are added up, reduced once, and
                make one update: the same as without, but for what looks at a whole batch
                (BatchNorm, and means over a mask, see micro-batches). Defaults to 1.
            steps_per_execution: as Keras's, or "auto": the first steps of `fit` try how many steps
                a call are fastest, and a line says what was found.
            max_staleness: under parameter servers, how many updates others may make between a
                step's reading of the weights and its own update; workers that are ahead are held
                back. 0 is one step after the other, the same as on one device; None, the default,
                any number. Under all other strategies there are none in any case.
            local_steps: local SGD: each replica takes so many steps alone, with the gradient of
                its own rows; then weights, their moving averages and the state of layers become
                the mean over all replicas. Rounds begin with an epoch and end with it, so that
                validation, checkpoints and callbacks of an epoch see the mean; in between, what
                is read of the model is the first replica's. Clipping and the loss scale are each
                replica's own within a round. With 1 and plain SGD it is the same as None, the
                default, where gradients are added up in every step. Several workers add up their
                metrics at each call's end: let `steps_per_execution` be a multiple. With one
                replica it changes nothing.
            local_slots: what becomes of the optimizer's slots, such as momenta, at the end of a
                round: "keep", the default, each replica its own (a file holds the first one's),
                "average", or "reset" to what they begin with.

        Raises:
            ValueError: `accumulate` or `local_steps` is no whole number from 1 on, or
                `max_staleness` none from 0; an unknown `local_slots`, or `local_steps` under a
                strategy where replicas share their variables.
        """
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate must be a whole number from 1 on, got {accumulate!r}")
        if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
            raise ValueError(
                f"max_staleness must be None or a whole number from 0 on, got {max_staleness!r}"
            )
        check_local(local_steps, local_slots, self.distribute_strategy)
        self.average_replicas()
        finds_out = steps_per_execution == "auto"
        super().compile(
            *args, steps_per_execution=1 if finds_out else steps_per_execution, **kwargs
        )
        self.accumulate, self.max_staleness = accumulate, max_staleness
        self.local_steps, self.local_slots = local_steps, local_slots
        self._dispatcher = self._rounds = None
        self._tuner = GroupTuner() if finds_out else None

    # What one replica does with its share of a batch.

    def train_step(self, data):
        if not self._compiles_parts():
            return super().train_step(data)
        return compiled_parts.train_step(self, data)

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        valid, sample_weight = split_mask(sample_weight)
        if valid is None:
            return super().test_step(data)
        y_pred = keep_valid(self._predictions(x), valid)
        x, y = keep_valid((x, y), valid)
        loss = self._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False
        )
        examples = tf.shape(keras.tree.flatten(x)[0])[0]
        self._loss_tracker.update_state(loss_module.unscale_loss_for_distribution(loss), examples)
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def predict_step(self, data):
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return keep_valid(self._predictions(x), split_mask(sample_weight)[0])

    def _predictions(self, x):
        return self(x, training=False) if self._call_has_training_arg else self(x)

    def _compiles_parts(self):
        """XLA cannot compile a step in which replicas meet; it compiles what each does alone."""
        in_a_divided_step = steps.current() is not None
        return self.jit_compile and not self.run_eagerly and in_a_divided_step

    def _leaves_own_step_uncompiled(self):
        is_divided = self.distribute_strategy.num_replicas_in_sync * self.accumulate > 1
        is_own = type(self).train_step is not ReplicatedTrainer.train_step
        return self.jit_compile and not self.run_eagerly and is_divided and is_own

    # What is called for a group of steps.

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return self.train_function
        asynchronous = has_parameter_servers(self.distribute_strategy)
        self.clock = StepClock(times_steps=not asynchronous)
        if asynchronous:
            self._finite_watch = Watch()
            self.train_function = self._coordinated(
                self.train_step,
                self._logs_are_metrics("train_step"),
                updates=True,
                micro_steps=self.accumulate,
                watch=self._finite_watch,
            )
        else:
            self._finite_watch = FiniteWatch(self)
            if self._leaves_own_step_uncompiled():
                warnings.warn(
                    "jit_compile=True: a train_step of the model's own is run as it is under "
                    "several replicas or micro-steps; XLA compiles what it leaves to "
                    "super().train_step()",
                    stacklevel=3,
                )
            self._rounds = self._new_rounds()
            self.train_function = StepFunction(
                self,
                self._finite_watch.watching(self.train_step),
                self._logs_are_metrics("train_step"),
                self._accumulators(),
                self.accumulate,
                self._finite_watch,
                self._rounds,
                self.clock,
            )
        return self.train_function

    def _new_rounds(self):
        self.average_replicas()
        if self.local_steps is None or self.distribute_strategy.num_replicas_in_sync == 1:
            return None
        return Rounds(self, self.local_steps, self.local_slots)

    def average_replicas(self):
        """Ends a round of local steps (see `compile`) that is under way; else does nothing.

        `fit`, `evaluate` and `predict` do so by themselves. For loops of one's own, with
        `train_on_batch`, before weights are read; all workers have to call it.
        """
        if self._rounds is not None:
            self._rounds.end()

    def _accumulators(self):
        if self.accumulate == 1:
            return None
        with self.distribute_strategy.scope():
            return Accumulators(optimizers_of(self))

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            lazy = self._logs_are_metrics("test_step")
            asynchronous = has_parameter_servers(self.distribute_strategy)
            make = self._coordinated if asynchronous else functools.partial(StepFunction, self)
            self.test_function = make(self.test_step, lazy)
        return self.test_function

    def make_predict_function(self, force=False):
        if self.predict_function is None or force:
            asynchronous = has_parameter_servers(self.distribute_strategy)
            self.predict_function = (
                self._coordinated(self.predict_step, gives_outputs=True)
                if asynchronous
                else PredictFunction(self, self.predict_step)
            )
        return self.predict_function

    def _coordinated(self, step, *args, **kwargs):
        """Steps are handed to workers, by one dispatcher for all kinds of them."""
        if self._dispatcher is None:
            self._dispatcher = Dispatcher(self.distribute_strategy, self.max_staleness)
        return CoordinatedFunction(self, step, self._dispatcher, *args, **kwargs)

    @property
    def is_tuning(self) -> bool:
        """Whether `fit` tries how many steps a call are fastest."""
        return self._tuner is not None and not self._tuner.is_done

    def first_nonfinite_step(self) -> int | None:
        """The optimizer step (from 1) whose loss was the first to be NaN or infinite, if any."""
        return self._finite_watch.first_bad_step() if self._finite_watch else None

    @property
    def staleness(self) -> Staleness:
        """How old the weights were that the steps of the last `fit` computed with.

        Under parameter servers; elsewhere no update comes between a step's reading and its own.
        """
        watch = self._finite_watch
        return watch.staleness() if isinstance(watch, Watch) else Staleness()

    def _logs_are_metrics(self, step_name):
        """Whether a step's logs are just the metrics' results: nobody has overridden either."""
        return all(
            getattr(type(self), name) is getattr(ReplicatedTrainer, name)
            for name in (step_name, "compute_metrics", "get_metrics_result")
        )

    def reset_metrics(self):
        """Keras's; each replica by itself, as TensorFlow reads across workers what it assigns."""
        if are_several_workers(self.distribute_strategy):
            self.distribute_strategy.run(super().reset_metrics)
        else:
            super().reset_metrics()

    # The loops.

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
        """
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
        feed, part = self._feed(x, initial_epoch)
        if inputs.is_pipeline(x):
            x, steps_per_epoch = inputs.training_data(x, steps_per_epoch, initial_epoch, part)
            shuffle = False  # the pipeline does; Keras would warn that it does not
        groups = self._step_groups(
            feed=feed,
            x=x,
            y=y,
            sample_weight=inputs.as_float(sample_weight),
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        self.global_batch_size = part.batch_rows if part else groups.data_adapter.batch_size
        callbacks = self._callback_list(callbacks, verbose, epochs, groups, add_history=True)
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
        callbacks.on_train_begin()
        logs = {}
        for epoch in range(self._initial_epoch or initial_epoch, epochs):
            callbacks.on_epoch_begin(epoch)
            logs = self._train_epoch(groups, callbacks)
            if validate and self._should_eval(epoch, validation_freq):
                logs.update({f"val_{name}": value for name, value in validate().items()})
            callbacks.on_epoch_end(epoch, logs)
            if self.stop_training:
                break
        if isinstance(self.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            self.optimizer.finalize_variable_values(self.trainable_weights)
        callbacks.on_train_end(logs=logs)
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
        logs = self._results(logs)
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

    def _train_epoch(self, groups, callbacks):
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
        return self._results(logs)

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
        logs = {}
        now = time.perf_counter
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
                logs = call(group.iterator, group.length, group.may_run_out)
                returned = now()
                clock.note_call(group.length, returned - called)
                self.steps_in_epoch = group.first + group.length
                at_end(last, logs)
                clock.note_callbacks(called - began + now() - returned)
                if stopped():
                    break
        return logs

    def _results(self, logs):
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

    def _step_groups(self, **data):
        groups = StepGroups(
            distribute_strategy=self.distribute_strategy,
            steps_per_execution=self.steps_per_execution,
            **data,
        )
        self._build_for(groups.data_adapter.get_tf_dataset().element_spec)
        return groups

    def _feed(self, x, initial_epoch=0):
        """(what makes a group's iterator of the data set that `x` is, or becomes; its `Part`)."""
        part = inputs.part_of(x, self.distribute_strategy)
        if part:
            return lambda dataset: inputs.InParts(iter(dataset), part), part
        if not has_parameter_servers(self.distribute_strategy):
            return iter, None
        if inputs.is_pipeline(x) and x.arrays() is not None:
            start = initial_epoch * x.steps_per_epoch
            return lambda _: NumberedFeed(x, start), None
        return lambda dataset: SentFeed(iter(dataset)), None

    def _build_for(self, element_spec):
        """Makes all variables before data flow: replicas and micro-steps cannot make them."""
        if self._distribute_strategy is None and self.accumulate == 1:
            return
        with self.distribute_strategy.scope():
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


def _at_most(limit, epochs):
    """The number of epochs, within the limit that Keras's configuration sets to debug a run."""
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        return limit
    return epochs
