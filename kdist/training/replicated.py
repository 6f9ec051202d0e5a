"""Training under every synchronous strategy: the same step on each replica, one update.

`ReplicatedTrainer` is Keras's own TensorFlow trainer with other loops: it can stand in for it in
any class that derives from it, `kdist.Model` among them. The losses, the gradients and the update
are Keras's.
"""

import functools
import warnings

import keras
import tensorflow as tf

from kdist import heartbeat
from kdist.backend import check_no_distribution
from kdist.training import compiled_parts, keras_hooks
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
from kdist.training.finite import FiniteWatch
from kdist.training.functions import StepFunction
from kdist.training.keras_internals import TensorFlowTrainer, loss_module
from kdist.training.local_steps import Rounds
from kdist.training.local_steps import check as check_local
from kdist.training.loops import Loops
from kdist.training.padding import keep_valid, split_mask
from kdist.training.predictions import PredictFunction
from kdist.training.together import Asked, are_several_workers
from kdist.training.tuning import GroupTuner

# Outside of a step of kdist they call Keras's own functions, so that nothing else changes.
keras_hooks.install()


def logs_are_metrics(step):
    """Decorator of a method: its logs are the metrics' results, which stay in their variables."""
    step.logs_are_metrics = True
    return step


class ReplicatedTrainer(Loops, TensorFlowTrainer):
    """Keras's TensorFlow trainer: several steps a call, logs read on demand, padding left out."""

    # Where the time of `fit` goes.
    clock: StepClock | None = None

    # What workers ask of each other between groups of steps.
    asked: Asked | None = None

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

    # Whether its operations are on several devices of a replica's group.
    is_split: bool = False

    # Whether, under parameter servers, no more steps are handed out until `is_paused`.
    shall_pause: bool = False

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
            RuntimeError: a `keras.distribution` is set.
        """
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate must be a whole number from 1 on, got {accumulate!r}")
        if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
            raise ValueError(
                f"max_staleness must be None or a whole number from 0 on, got {max_staleness!r}"
            )
        check_no_distribution()
        self._check_is_split()
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

    def _check_is_split(self):
        layout = getattr(self.distribute_strategy, "layout", None)
        if layout is not None and layout.group_size > 1 and not self.is_split:
            raise ValueError(
                f"the layout {layout} is for models that are split, and {self.name!r} is not: "
                "take kdist.parallel.split(model, plan), or a layout with data alone"
            )

    # What one replica does with its share of a batch.

    @logs_are_metrics
    def train_step(self, data):
        if not self._compiles_parts():
            return super().train_step(data)
        return compiled_parts.train_step(self, data)

    @logs_are_metrics
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
        self.asked = Asked(self.distribute_strategy)
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

    @property
    def local_steps_done(self) -> int:
        """Local steps of the round that is under way."""
        return self._rounds.done if self._rounds else 0

    @local_steps_done.setter
    def local_steps_done(self, steps: int):
        if self._rounds:
            self._rounds.done = steps

    @property
    def is_paused(self) -> bool:
        """Whether no step is under way between two calls; only parameter servers have some."""
        function = self.train_function
        return not isinstance(function, CoordinatedFunction) or function.is_idle

    def average_replicas(self):
        """Ends a round of local steps (see `compile`) that is under way; else does nothing.

        `fit`, `evaluate` and `predict` do so by themselves. For loops of one's own, with
        `train_on_batch`, before weights are read; all workers have to call it.
        """
        if self._rounds is not None:
            with heartbeat.meeting("averaging replicas"):
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
        return getattr(getattr(type(self), step_name), "logs_are_metrics", False) and all(
            getattr(type(self), name) is getattr(ReplicatedTrainer, name)
            for name in ("compute_metrics", "get_metrics_result")
        )

    def reset_metrics(self):
        """Keras's; each replica by itself, as TensorFlow reads across workers what it assigns."""
        if are_several_workers(self.distribute_strategy):
            self.distribute_strategy.run(super().reset_metrics)
        else:
            super().reset_metrics()
