"""The trainer of `kdist.Model`: Keras's TensorFlow trainer with several replicas and step groups.

`Trainer` replaces `keras.src.backend.tensorflow.trainer.TensorFlowTrainer` in the bases of a model.
Losses, gradients, and updates are computed by Keras. One step in order, from `fit` to the logs, is
described in docs/internals/one_step.md.
"""

import contextlib
import functools
import logging
import numbers
import warnings

import keras
import tensorflow as tf

from kdist.compat.keras import (
    TensorFlowTrainer,
    adopt_optimizer,
    adopt_variables,
    check_no_distribution,
    filter_traceback,
    loss_module,
    pythonify_logs,
    train_validation_split,
)
from kdist.compat.tensorflow import run_once
from kdist.layout import Layout
from kdist.training import building, evaluator, local_sgd
from kdist.training.broadcast import wait_for_workers
from kdist.training.groups import inputs
from kdist.training.groups.clock import StepClock
from kdist.training.groups.file_callbacks import (
    share_backups,
    with_whole_state,
    without_writers,
)
from kdist.training.groups.functions import StepFunction
from kdist.training.groups.loop import CallbackList, EpochLoop, LazyLogs, run_groups
from kdist.training.groups.monitors import AsynchronousMonitor, LossMonitor, WorkerVotes
from kdist.training.groups.predictions import PredictFunction, to_numpy
from kdist.training.groups.step_groups import GroupRunner, GroupTuner, StepGroups
from kdist.training.parameter_server.coordinator_loop import AsynchronousFunction
from kdist.training.parameter_server.dispatcher import Dispatcher
from kdist.training.parameter_server.variables import install_partitioned_embedding
from kdist.training.replica import hooks, passes, unseeded
from kdist.training.replica import step as steps
from kdist.training.replica.accumulation import Accumulators, optimizers_of
from kdist.training.replica.batch_gather import over_whole_batch
from kdist.training.replica.shared_trace import NotSharedError
from kdist.training.scopes import (
    has_parameter_servers,
    is_multi_worker,
    outside_any_scope,
    shares_storage,
)
from kdist.training.sharding import whole_state
from kdist.training.sharding.optimizer_state import shard_optimizer
from kdist.training.sharding.parts import sharded_state
from kdist.training.state import Position, TrainingState, data_facts, resumption_of
from kdist.training.strategy_setup import set_up, warn_outside_scope

# Outside a step of kdist the hooks call Keras's own functions, so that nothing else changes.
hooks.install()
install_partitioned_embedding()
share_backups()

_logger = logging.getLogger(__name__)

_LOSS_REDUCTIONS = ("auto", "mean", "sum")


def logs_are_metrics(step):
    """Returns a step method, marked as one whose logs are the metrics' results."""
    step.logs_are_metrics = True
    return step


class Trainer(TensorFlowTrainer):
    """Keras's TensorFlow trainer with step groups, lazily read logs, and padding left out.

    `fit`, `evaluate`, and `predict` accept the arguments of `keras.Model`, and also pipelines of
    `kdist.data`, which define the number of steps per epoch.

    Attributes:
        training_state: the `TrainingState`: progress, timing, and settings of `compile`.
    """

    @property
    def training_state(self) -> TrainingState:
        # Created on demand, because `Model.of` changes the class of models that already exist.
        if "_training_state" not in self.__dict__:
            self.__dict__["_training_state"] = TrainingState(self)
        return self.__dict__["_training_state"]

    def compile(
        self,
        *args,
        accumulate=1,
        steps_per_execution=1,
        max_staleness=None,
        local_steps=None,
        local_slots="keep",
        gather_batch=False,
        loss_reduction="auto",
        share_trace=False,
        **kwargs,
    ):
        """Configures the model for training. Extends `keras.Model.compile`.

        Files hold the arguments of Keras. A model that has been loaded or cloned is compiled with
        the defaults of the others; call `compile` again to change them.

        Args:
            *args: positional arguments of `keras.Model.compile`.
            accumulate: number of micro-batches into which each replica divides its rows of a
                batch, to save memory. Their gradients are added up, reduced once, and make one
                update. The result is the same as without, except for layers and losses that
                depend on the whole batch, such as BatchNorm. Defaults to 1.
            steps_per_execution: number of steps per call of the train function, as in Keras, or
                "auto": the first steps of `fit` search the fastest number, which is logged.
                Defaults to 1.
            max_staleness: with parameter servers, the maximum number of updates by other workers
                between a step's read of the weights and its own update. Workers that are ahead
                wait. 0 runs one step at a time, with the results of one device. Defaults to
                None, no limit. Other strategies have no staleness, and a number above 0 is logged.
            local_steps: number of local steps per round of local SGD. Each replica takes them
                alone, with the gradient of its own rows. Then weights, their moving averages, and
                the state of layers become the mean over all replicas. Rounds begin and end with
                an epoch, so that validation, checkpoints, and epoch callbacks see the mean. In
                between, reads return the first replica's values. Clipping and loss scaling are
                per replica within a round. Several workers add up their metrics at the end of
                each call, so let `steps_per_execution` be a multiple. Has no effect on one
                replica. Defaults to None: gradients are reduced in every step.
            local_slots: what happens to the optimizer's slots, such as momenta, at the end of a
                round. "keep": each replica keeps its own, and files hold those of the first one.
                "average": the mean over replicas. "reset": the initial values. Defaults to
                "keep".
            gather_batch: whether the compiled losses receive the targets, predictions, sample
                weights, and masks of the whole batch instead of those of one replica's rows. For
                losses that compare rows with each other, such as contrastive ones; every loss may
                be used. In each step, two more reductions of the size of the outputs take place,
                and each replica computes the whole loss. "step" gives every replica the whole
                batch in each step, with the speed of one device, for programs that cannot run on
                a part of it. Not stored in files. See `kdist.gather_batch` for layers and custom
                steps. Defaults to False.
            loss_reduction: what the scalar losses that a custom `train_step` differentiates are
                over the rows of a batch: "mean" or "sum". Gradients of means are averaged over
                replicas, those of sums are added up. Losses of `compile` and `add_loss` do not
                need it. Defaults to "auto": kdist reads it from the step's graph. Where the graph
                does not tell, every replica computes the whole batch, with a warning. A pipeline
                warns, and counts it as a mean.
            share_trace: whether the replicas of a process share one trace of the forward and
                backward passes, so that the first step on many devices takes less time. Replicas
                trace their own where they meet in the passes, as in a synchronized BatchNorm, and
                in a `train_step` of your own that does not call Keras's. A layer must not use
                `tf.distribute.get_replica_context`. Defaults to False.
            **kwargs: further arguments of `keras.Model.compile`.

        Raises:
            ValueError: `accumulate`, `local_steps`, or `steps_per_execution` is not a positive
                integer (the last one may be `"auto"`), `max_staleness`
                is not a non-negative integer, `local_slots`, `gather_batch`, or `loss_reduction`
                is unknown, `local_steps` is set under a strategy in which replicas share
                variables, `gather_batch` is True without a loss or set with `accumulate`,
                `local_steps`, or micro-batches of a pipeline, `jit_compile` is True and replicas
                divide the weights, or the layout is for split models and this one is not split.
            RuntimeError: a `keras.distribution` is set.

        Example:

            model.compile("adam", "mse", accumulate=4, steps_per_execution="auto")
        """
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate must be a positive integer, got {accumulate!r}")
        is_auto = isinstance(steps_per_execution, str) and steps_per_execution == "auto"
        is_integer = isinstance(steps_per_execution, numbers.Integral)
        is_integer &= not isinstance(steps_per_execution, bool)
        if not is_auto and not (is_integer and steps_per_execution >= 1):
            raise ValueError(
                'steps_per_execution must be a positive integer or "auto", '
                f"got {steps_per_execution!r}"
            )
        if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
            raise ValueError(
                f"max_staleness must be None or a non-negative integer, got {max_staleness!r}"
            )
        if max_staleness and not has_parameter_servers(self.distribute_strategy):
            _logger.warning(
                "max_staleness=%d has no effect under %s: only parameter servers apply gradients "
                "of earlier weights",
                max_staleness,
                type(self.distribute_strategy).__name__,
            )
        if loss_reduction not in _LOSS_REDUCTIONS:
            raise ValueError(
                f"loss_reduction must be one of {', '.join(_LOSS_REDUCTIONS)}, "
                f"got {loss_reduction!r}"
            )
        if gather_batch not in (False, True, "step"):
            raise ValueError(f'gather_batch must be True, False, or "step", got {gather_batch!r}')
        micro_batches = getattr(self.distribute_strategy, "layout", Layout()).micro_batches
        if gather_batch and (accumulate > 1 or local_steps is not None or micro_batches > 1):
            raise ValueError(
                f"gather_batch={gather_batch!r} needs a whole batch in one step, which accumulate, "
                f"local_steps, and micro_batches of a layout divide; got accumulate={accumulate}, "
                f"local_steps={local_steps}, micro_batches={micro_batches}"
            )
        check_no_distribution()
        self._check_is_split()
        set_up(self.distribute_strategy)
        local_sgd.check(local_steps, local_slots, self.distribute_strategy)
        state = self.training_state
        state.average_replicas()
        super().compile(*args, steps_per_execution=1 if is_auto else steps_per_execution, **kwargs)
        if self.jit_compile and sharded_state(self.distribute_strategy) == "weights":
            raise ValueError(
                'jit_compile=True: XLA would gather all weights at once, which shard="weights" '
                "divides over the devices to save memory. Leave jit_compile (--jit_compile) out, "
                'or use shard="optimizer"'
            )
        if gather_batch is True:
            if self._compile_loss is None:
                raise ValueError(
                    "gather_batch=True gathers the rows for compiled losses, and there is no loss. "
                    "Pass `loss`, or call kdist.gather_batch in train_step"
                )
            self._compile_loss.call = over_whole_batch(self._compile_loss.call)
        state.accumulate, state.max_staleness = accumulate, max_staleness
        state.local_steps, state.local_slots = local_steps, local_slots
        state.loss_reduction, state.shares_trace = loss_reduction, share_trace
        state.dispatcher = state.rounds = None
        state.dry_runs, state.reduces_early, state.hides_rows = set(), False, None
        is_repeated = gather_batch == "step"
        state.repeated_steps = {"train_step", "test_step", "predict_step"} if is_repeated else set()
        state.tuner = GroupTuner() if is_auto else None
        self._adopt_optimizers()

    def _adopt_optimizers(self):
        """Moves optimizers that were created outside of the strategy's scope into it.

        Else the replicas share a step counter, and each of them increments it. Optimizers are also
        sharded, if the strategy's layout says so.
        """
        if self._distribute_strategy:
            for optimizer in optimizers_of(self):
                adopt_optimizer(optimizer, self._distribute_strategy)
                shard_optimizer(optimizer, self._distribute_strategy)

    def get_compile_config(self):
        """Returns the compile configuration for a file; empty if plain Keras could not read it.

        A model that is compiled with a schedule of kdist is saved as not compiled, so that its file
        opens without kdist. Call `compile` with the schedule again after loading.
        """
        return readable_without_kdist(super().get_compile_config())

    def compile_from_config(self, config):
        """Compiles the model as its file says, unless a subclass has its own `compile`.

        Args:
            config: the result of `get_compile_config`.
        """
        if type(self).compile is not Trainer.compile:
            super().compile_from_config(config)  # warns
        elif not self._must_be_split():
            self.compile(**keras.saving.deserialize_keras_object(config))
            if self.built and self.optimizer is not None:
                self.optimizer.build(self.trainable_variables)

    def _assert_compile_called(self, method_name=None):
        self._check_is_split()  # a file may have been loaded before
        super()._assert_compile_called(method_name)

    def _must_be_split(self):
        layout = getattr(self.distribute_strategy, "layout", None)
        is_split = getattr(self, "is_split", False)
        return layout is not None and layout.group_size > 1 and not is_split

    def _check_is_split(self):
        if self._must_be_split():
            layout = self.distribute_strategy.layout
            for layer in self._flatten_layers(include_self=False):
                if getattr(layer, "is_split", False):
                    raise ValueError(
                        f"{self.name!r} trains the split model {layer.name!r} by a step of its "
                        "own. Split models train only by their own fit: call compile and fit of "
                        f"{layer.name!r}, or use a layout with only data parallelism"
                    )
            raise ValueError(
                f"the layout {layout} is for split models, and {self.name!r} is not split. Call "
                "kdist.parallel.split(model, placement), or use a layout with only data parallelism"
            )

    def _aggregate_additional_loss(self, loss):
        """Returns the sum of a loss that a layer adds, which may be one over rows."""
        step = steps.current()
        if step is not None:
            step.check_loss(loss)
            loss = step.as_mean(loss)
        return super()._aggregate_additional_loss(loss)

    # One replica's step on its rows of a batch.

    @logs_are_metrics
    def train_step(self, data):
        """Runs one training step on one replica's rows."""
        step = steps.current()
        if step is None or step.is_dry_run or self.run_eagerly:
            return super().train_step(data)
        if self.jit_compile:
            # XLA cannot compile collectives. With several replicas it compiles the rest.
            return passes.train_step(self, data, passes.compiled)
        if step.shared_trace is not None:
            with contextlib.suppress(NotSharedError):
                return passes.train_step(self, data, passes.shared)
        return super().train_step(data)

    @logs_are_metrics
    def test_step(self, data):
        """Runs one evaluation step on one replica's rows, without padding."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        valid, sample_weight = inputs.split_mask(sample_weight)
        if valid is None:
            return super().test_step(data)
        y_pred = inputs.keep_valid(self._predictions(x), valid)
        x, y = inputs.keep_valid((x, y), valid)
        loss = self._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False
        )
        examples = tf.shape(keras.tree.flatten(x)[0])[0]
        self._loss_tracker.update_state(loss_module.unscale_loss_for_distribution(loss), examples)
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def predict_step(self, data):
        """Returns the outputs for one replica's rows, without padding."""
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return inputs.keep_valid(self._predictions(x), inputs.split_mask(sample_weight)[0])

    def _predictions(self, x):
        return self(x, training=False) if self._call_has_training_arg else self(x)

    # Functions that run a step group: a `GroupRunner` each.

    def make_train_function(self, force=False):
        """Returns the function that trains on a step group; creates it on the first call."""
        is_new = not isinstance(self.train_function, GroupRunner)
        if not (is_new or force):
            return self.train_function
        state = self.training_state
        is_asynchronous = has_parameter_servers(self.distribute_strategy)
        if is_new:  # else callbacks of a running `fit` use them
            state.clock = StepClock(times_steps=not is_asynchronous)
            state.votes = WorkerVotes(self.distribute_strategy)
            state.monitor = AsynchronousMonitor() if is_asynchronous else LossMonitor(self)
        options = {
            "logs_are_metrics": self._logs_are_metrics("train_step"),
            "micro_steps": state.accumulate,
        }
        if is_asynchronous:
            self.train_function = self._asynchronous(
                self.train_step, updates=True, monitor=state.monitor, **options
            )
            return self.train_function
        if self._leaves_own_step_uncompiled():
            warnings.warn(
                "jit_compile=True: with several replicas or micro-steps, a custom train_step runs "
                "uncompiled; XLA compiles only its call of super().train_step()",
                stacklevel=3,
            )
        state.rounds = self._new_rounds()
        self.train_function = StepFunction(
            self,
            state.monitor.watching(self.train_step),
            accumulators=self._accumulators(),
            monitor=state.monitor,
            rounds=state.rounds,
            clock=state.clock,
            **options,
        )
        return self.train_function

    def make_test_function(self, force=False):
        """Returns the function that evaluates a step group; creates it on the first call."""
        if force or not isinstance(self.test_function, GroupRunner):
            is_asynchronous = has_parameter_servers(self.distribute_strategy)
            make = self._asynchronous if is_asynchronous else functools.partial(StepFunction, self)
            logs_are_metrics = self._logs_are_metrics("test_step")
            self.test_function = make(self.test_step, logs_are_metrics=logs_are_metrics)
        return self.test_function

    def make_predict_function(self, force=False):
        """Returns the function that predicts a step group; creates it on the first call."""
        if force or not isinstance(self.predict_function, GroupRunner):
            self.predict_function = (
                self._asynchronous(self.predict_step, returns_outputs=True)
                if has_parameter_servers(self.distribute_strategy)
                else PredictFunction(self, self.predict_step)
            )
        return self.predict_function

    def _asynchronous(self, step, **options):
        """Returns a function that dispatches step groups; all of them share one dispatcher."""
        state = self.training_state
        if state.dispatcher is None:
            state.dispatcher = Dispatcher(self.distribute_strategy, state.max_staleness)
        return AsynchronousFunction(self, step, state.dispatcher, **options)

    def _leaves_own_step_uncompiled(self):
        replicas = self.distribute_strategy.num_replicas_in_sync
        is_divided = replicas * self.training_state.accumulate > 1
        is_own = type(self).train_step is not Trainer.train_step
        return self.jit_compile and not self.run_eagerly and is_divided and is_own

    def _new_rounds(self):
        state = self.training_state
        state.average_replicas()
        if state.local_steps is None or self.distribute_strategy.num_replicas_in_sync == 1:
            return None
        return local_sgd.Rounds(self, state.local_steps, state.local_slots)

    def _accumulators(self):
        if self.training_state.accumulate == 1:
            return None
        strategy = self.distribute_strategy
        if shares_storage(strategy):
            return [
                outside_any_scope(lambda: Accumulators(optimizers_of(self)))
                for _ in strategy.extended.worker_devices
            ]
        with strategy.scope():
            return Accumulators(optimizers_of(self))

    def _logs_are_metrics(self, step_name):
        """Returns True if a step's logs are the metrics' results, and no subclass changes them."""
        return getattr(getattr(type(self), step_name), "logs_are_metrics", False) and all(
            getattr(type(self), name) is getattr(Trainer, name)
            for name in ("compute_metrics", "get_metrics_result")
        )

    def reset_metrics(self):
        """Resets all metrics, on each replica if there are several workers.

        TensorFlow would read a value across workers before it assigns it.
        """
        if is_multi_worker(self.distribute_strategy):
            run_once(self.distribute_strategy, super().reset_metrics)
        else:
            super().reset_metrics()

    # fit, evaluate, and predict.

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
        """Trains the model. Arguments, callbacks, and the returned `History` are those of Keras.

        `x` and `validation_data` may also be pipelines of `kdist.data`. A pipeline defines the
        steps per epoch, and `initial_epoch` continues where that epoch begins.

        In a job with an evaluator, that task evaluates each checkpoint on `validation_data`, and
        the other tasks do not.

        Raises:
            RuntimeError: a `keras.distribution` is set, which has no effect on TensorFlow.
        """
        check_no_distribution()
        self._assert_compile_called("fit")
        warn_outside_scope(self)
        self._adopt_optimizers()
        epochs = _at_most(keras.config.max_epochs(), epochs)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        validation = validation_data, validation_batch_size or batch_size, validation_steps
        if evaluator.is_evaluator(self.distribute_strategy):
            return evaluator.evaluate_checkpoints(self, callbacks, self._validation(*validation))
        if evaluator.is_evaluated_elsewhere(self.distribute_strategy):
            validation = (None, *validation[1:])
        for _ in self._iterate_epochs(
            x,
            epochs,
            callbacks,
            verbose=verbose,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation=validation,
            validation_freq=validation_freq,
            y=y,
            sample_weight=inputs.as_float(sample_weight),
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
        ):
            pass
        return self.history

    def _iterate_epochs(
        self,
        x,
        epochs,
        callbacks,
        *,
        steps_per_epoch,
        shuffle,
        verbose=0,
        initial_epoch=0,
        validation=(None, None, None),
        validation_freq=1,
        **data,
    ):
        """Yields the logs of each epoch of a training. The arguments are those of `fit`.

        `validation` holds the data, batch size, and number of steps of validation.
        """
        resumption = resumption_of(callbacks)
        resumed = resumption.load(self) if resumption else None
        start = resumed or _beginning(x, initial_epoch, steps_per_epoch)
        groups = self._training_groups(
            x,
            start,
            builds=bool(resumed),  # variables must exist before they are restored
            resumption=resumption,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            **data,
        )
        state = self.training_state
        callbacks = self._callback_list(callbacks, verbose, epochs, groups, add_history=True)
        state.callbacks = callbacks.callbacks
        validate = self._validation(*validation, callbacks)
        self.stop_training = False
        self.make_train_function()
        state.clock.take()
        state.monitor.reset()
        state.average_replicas()
        try:
            if resumed:
                resumption.restore(state.data_facts)
            callbacks.on_train_begin()
            if resumed and self.stop_training:  # a callback of the earlier process stopped it
                epochs = start.epoch
            loop = EpochLoop(self, groups, callbacks, validate, validation_freq)
            logs = {}
            for logs in loop.run(range(self._initial_epoch or start.epoch, epochs)):
                try:
                    yield logs
                except GeneratorExit:  # the program has left its loop, which ends the training
                    break
            if isinstance(self.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                self.optimizer.finalize_variable_values(self.trainable_weights)
            callbacks.on_train_end(logs=logs)
            # The chief's callbacks write files that programs read on all workers after `fit`.
            wait_for_workers(self.distribute_strategy, "ending a training")
        finally:
            groups.close()
            whole_state.forget(self)
            for callback in callbacks.callbacks:
                if exits := getattr(callback, "on_train_exit", None):
                    exits()
            if resumption:
                resumption.release()

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
        """Returns the loss and metrics over all examples, as Keras does.

        `x` may also be a pipeline of `kdist.data`. A boolean sample weight in a dataset marks
        padding: its False rows count nowhere.
        """
        self._assert_compile_called("evaluate")
        groups = kwargs.pop("_step_groups", None)
        if kwargs:
            raise ValueError(f"Arguments not recognized: {kwargs}")
        if groups is None:
            groups = self._evaluation_groups("test_step", x, y, sample_weight, batch_size, steps)
        groups.reset()
        callbacks = self._callback_list(callbacks, verbose, 1, groups)
        self.training_state.average_replicas()
        self.make_test_function()
        self.stop_evaluating = False
        callbacks.on_test_begin()
        self.reset_metrics()
        logs = {}
        for result in run_groups(
            groups,
            self.test_function,
            callbacks.on_test_batch_begin,
            callbacks.on_test_batch_end,
            lambda: self.stop_evaluating,
        ):
            logs = result.logs
        logs = self._epoch_results(logs)
        callbacks.on_test_end(logs)
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    @filter_traceback
    def predict(self, x, batch_size=None, verbose="auto", steps=None, callbacks=None):
        """Returns the outputs for `x`, in order, as Keras does. `x` may also be a pipeline."""
        groups = self._evaluation_groups("predict_step", x, None, None, batch_size, steps)
        callbacks = self._callback_list(callbacks, verbose, 1, groups)
        self.training_state.average_replicas()
        self.make_predict_function()
        self.stop_predicting = False
        callbacks.on_predict_begin()
        results = run_groups(
            groups,
            self.predict_function,
            callbacks.on_predict_batch_begin,
            callbacks.on_predict_batch_end,
            lambda: self.stop_predicting,
        )
        in_order = sorted(results, key=lambda result: result.group.first)
        callbacks.on_predict_end()
        return to_numpy([result.logs["outputs"] for result in in_order])

    @functools.wraps(TensorFlowTrainer.train_on_batch)
    def train_on_batch(self, x, y=None, sample_weight=None, *args, **kwargs):
        self._assert_compile_called("train_on_batch")
        self._build_on("train_step", inputs.specs_of((x, y, sample_weight)))
        return super().train_on_batch(x, y, sample_weight, *args, **kwargs)

    @functools.wraps(TensorFlowTrainer.test_on_batch)
    def test_on_batch(self, x, y=None, sample_weight=None, *args, **kwargs):
        self._assert_compile_called("test_on_batch")
        self._build_on("test_step", inputs.specs_of((x, y, sample_weight)))
        return super().test_on_batch(x, y, sample_weight, *args, **kwargs)

    @functools.wraps(TensorFlowTrainer.predict_on_batch)
    def predict_on_batch(self, x):
        self._build_on("predict_step", inputs.specs_of((x,)))
        return super().predict_on_batch(x)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Does nothing, where Keras would build for `train_on_batch` and `test_on_batch`."""

    def _epoch_results(self, logs):
        """Returns the epoch's logs as floats: metrics, or the last logs of a custom step."""
        if isinstance(logs, LazyLogs):
            return logs.of_epoch()
        return pythonify_logs(self._get_metrics_result_or_logs(logs))

    def _training_groups(self, x, start, steps_per_epoch, shuffle, resumption, **data):
        """Returns the step groups of `fit`, from the position `start` on."""
        reader = None
        source, (feed, worker_slice) = x, inputs.feed_of(x, self.distribute_strategy, start.batch)
        is_pipeline = inputs.is_pipeline(x)
        if is_pipeline:
            x, steps_per_epoch = inputs.training_data(x, steps_per_epoch, start.batch, worker_slice)
            shuffle = False  # the pipeline shuffles; Keras would warn that it does not
        elif inputs.is_batch_source(x):
            reader = inputs.reader_at(x, start, steps_per_epoch, resumption)
            x, shuffle = reader.dataset(), False
        groups = self._step_groups(
            "train_step",
            worker_slice,
            feed=feed,
            x=x,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            **data,
        )
        groups.reset()  # as in Keras, where a `PyDataset` shuffles before the first epoch, too
        if reader is not None:
            groups.begin_at(start, reader.length)
        elif not is_pipeline:
            groups.skip_to(start)
        state = self.training_state
        state.reader = reader
        if reader is not None:
            state.global_batch_size = reader.batch_rows
        elif worker_slice:
            state.global_batch_size = worker_slice.batch_rows
        else:
            state.global_batch_size = groups.data_adapter.batch_size
        groups.first_step = state.steps_in_epoch = start.step
        state.epoch, state.batches_before_epoch = start.epoch, start.batch - start.step
        state.data_start = start.data_start
        state.data_facts = data_facts(source, state.global_batch_size, steps_per_epoch)
        return groups

    def _validation(self, data, batch_size, steps, callbacks=None):
        """Returns a function that evaluates on `data`, prepared once; None without data."""
        if data is None:
            return None
        x, y, sample_weight = inputs.unpack_validation_data(data)

        @functools.cache
        def step_groups():
            return self._evaluation_groups("test_step", x, y, sample_weight, batch_size, steps)

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

    def _evaluation_groups(self, step_name, x, y, sample_weight, batch_size, steps):
        """Returns the step groups of `evaluate` or `predict`."""
        feed, worker_slice = inputs.feed_of(x, self.distribute_strategy)
        x, steps = inputs.evaluation_data(x, steps, worker_slice)
        return self._step_groups(
            step_name,
            worker_slice,
            feed=feed,
            x=x,
            y=y,
            sample_weight=inputs.as_float(sample_weight),
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=False,
        )

    def _step_groups(self, step_name, worker_slice, builds=False, **data):
        """Returns step groups of data; `builds` says that the variables must exist after this."""
        groups = StepGroups(
            distribute_strategy=self.distribute_strategy,
            steps_per_execution=self.steps_per_execution,
            **data,
        )
        spec = groups.data_adapter.get_tf_dataset().element_spec
        self._build_on(step_name, spec, worker_slice, builds)
        return groups

    def _build_on(self, step_name, spec, worker_slice=None, must_succeed=False):
        """Creates a step's variables: replicas and micro-steps cannot create any."""
        unseeded.share(self)
        must_succeed |= self.training_state.accumulate > 1
        must_succeed |= has_parameter_servers(self.distribute_strategy)
        if must_succeed or self._distribute_strategy:
            building.build(self, step_name, spec, worker_slice, must_succeed)
        if self._distribute_strategy:
            # Metrics that were created outside of the scope. Replicas would share their state.
            adopt_variables(self.metrics_variables, self._distribute_strategy)

    def _callback_list(self, callbacks, verbose, epochs, groups, add_history=False):
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        callbacks = with_whole_state(callbacks, self.distribute_strategy)
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


def readable_without_kdist(config):
    """Returns the compile configuration of a model; empty if it contains a class of kdist."""
    return {} if _names_kdist(config) else config


def _names_kdist(config):
    if isinstance(config, dict):
        return str(config.get("module")).startswith("kdist") or any(
            map(_names_kdist, config.values())
        )
    return isinstance(config, list | tuple) and any(map(_names_kdist, config))


def _beginning(x, initial_epoch, steps_per_epoch):
    """Returns the position of an epoch's beginning: as in Keras, that of the data.

    A pipeline begins with the first batch of that epoch instead.
    """
    if inputs.is_pipeline(x):
        return Position(initial_epoch, 0, initial_epoch * (steps_per_epoch or x.steps_per_epoch))
    batches = initial_epoch * (steps_per_epoch or 0)
    return Position(initial_epoch, 0, batches, data_start=batches)


def _at_most(limit, epochs):
    """Returns the number of epochs within Keras's `max_epochs`, a setting for debugging."""
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        return limit
    return epochs
