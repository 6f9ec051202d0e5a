"""Training state: everything that kdist adds to a model in training, behind one attribute.

    model.fit(train)
    model.training_state.position               # Position(epoch=2, step=250, batch=750, …)
    model.training_state.first_nonfinite_step() # None

The module also defines how `fit` resumes in the middle of an epoch. A callback that restores a run
implements `Resumption`; `fit` calls its methods in this order:

    position = callback.load(model)        # before data is opened; None: start from the beginning
    callback.place                         # attribute: where to begin in a BatchSource, or None
    callback.restore(facts)                # the model is built; before any on_train_begin
    callback.on_train_begin()              # after that of other callbacks, whose state it restores
    callback.release()                     # whether fit ends normally or not

Any callback may define `on_train_exit()`, which `fit` also calls whether it ends normally or not.
"""

import contextlib
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import keras

from kdist.cluster import heartbeat
from kdist.training.groups.monitors import AsynchronousMonitor, LossMonitor, Staleness
from kdist.training.replica.dependence.fallbacks import WholeBatchError
from kdist.training.replica.row_shares import DifferentRowsError
from kdist.training.sharding import whole_state

if TYPE_CHECKING:
    from kdist.training.groups.clock import StepClock
    from kdist.training.groups.monitors import WorkerVotes
    from kdist.training.groups.step_groups import GroupTuner
    from kdist.training.local_sgd import Rounds
    from kdist.training.parameter_server.dispatcher import Dispatcher


class Position(NamedTuple):
    """A point between two steps of training.

    Attributes:
        epoch: the current epoch, from 0.
        step: number of steps of this epoch that have been run.
        batch: number of batches consumed over all epochs; a pipeline resumes with this one.
        data_start: number of batches consumed when the data last began with their first batch, not
            counting what follows from their length. Defaults to 0.
    """

    epoch: int
    step: int
    batch: int
    data_start: int = 0

    @property
    def next_epoch(self) -> "Position":
        """The beginning of the following epoch."""
        return self._replace(epoch=self.epoch + 1, step=0)


class TrainingState:
    """State of a model's training, as `model.training_state`.

    Args:
        model: a `kdist.Model`.

    Attributes:
        accumulate: micro-batches per update; see `kdist.Model.compile`.
        max_staleness: bound on the staleness of a gradient; see `kdist.Model.compile`.
        local_steps: local steps per round of local SGD; see `kdist.Model.compile`.
        local_slots: what happens to slots at the end of a round; see `kdist.Model.compile`.
        loss_reduction: what scalar losses of a custom step are; see `kdist.Model.compile`.
        shares_trace: whether replicas share one trace of the forward and backward passes.
        reduces_early: tapes of a custom step return gradients of the global batch, because the step
            changes them, such as by clipping. A dry run finds this out.
        hides_rows: steps are traced with an unknown number of rows, because a loss is computed from
            those of all replicas. None if no loss has needed it yet, False if the program fails.
        repeated_steps: names of steps that every replica runs on the whole batch, because they fail
            on a part of it. See `repeat_step`.
        clock: where the time of `fit` goes, a `StepClock`; None before the first `fit`.
        votes: requests that workers make to each other between step groups, a `WorkerVotes`.
        callbacks: callbacks of the last `fit`, including Keras's own.
        global_batch_size: examples per step of the last `fit`; None if the data does not tell.
        data_facts: facts about the data that must not change when another process resumes.
        reader: reader of the batches of the last `fit`, which knows the place in their source; None
            for data that are no `kdist.data.BatchSource`.
        epoch: the current epoch, from 0.
        steps_in_epoch: number of steps of this epoch that have been run. Keras's callbacks
            receive batch numbers in which each group counts as a full one.
        batches_before_epoch: batches of the data consumed before this epoch.
        data_start: number of batches consumed when the data last began; see `Position`.
        epoch_logs: training logs of the last epoch, without validation.
        pause_requested: set by a callback with parameter servers, so that no further step group
            is dispatched until `is_paused`.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.accumulate = 1
        self.max_staleness: int | None = None
        self.local_steps: int | None = None
        self.local_slots = "keep"
        self.loss_reduction = "auto"
        self.shares_trace = False
        self.reduces_early = False
        self.hides_rows: bool | None = None
        self.repeated_steps: set[str] = set()
        self.tuner: GroupTuner | None = None
        self.rounds: Rounds | None = None
        self.dispatcher: Dispatcher | None = None
        self.monitor: LossMonitor | AsynchronousMonitor | None = None
        self.clock: StepClock | None = None
        self.votes: WorkerVotes | None = None
        self.callbacks: Sequence[keras.callbacks.Callback] = ()
        self.global_batch_size: int | None = None
        self.data_facts: dict[str, Any] | None = None
        self.reader: Any = None
        self.epoch = self.steps_in_epoch = self.batches_before_epoch = self.data_start = 0
        self.epoch_logs: Mapping[str, float] = types.MappingProxyType({})
        self.pause_requested = False
        self.dry_runs: set[tuple] = set()  # of `kdist.training.building`, since `compile`

    def repeat_step(self, name: str, error: Exception):
        """Lets every replica run a step on the whole batch, and warns about it.

        Args:
            name: name of the step, such as "train_step".
            error: what the step raised on one replica's rows.
        """
        self.repeated_steps.add(name)
        if isinstance(error, WholeBatchError | DifferentRowsError):
            reason = str(error)
        else:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = (
                f"it fails on the rows of one replica: {first_line} If the program has a constant "
                "number of rows, use keras.ops.shape(x)[0] instead"
            )
        warnings.warn(
            f"In {name} of {self._model.name!r}, every replica computes the whole batch, with the "
            f"numbers and the speed of one device. The reason: {reason}",
            stacklevel=2,
        )

    @property
    def position(self) -> Position:
        """The current position, between two calls of the train function."""
        batch = self.batches_before_epoch + self.steps_in_epoch
        return Position(self.epoch, self.steps_in_epoch, batch, self.data_start)

    @property
    def is_paused(self) -> bool:
        """True if no step is running between two calls of the train function."""
        return getattr(self._model.train_function, "is_idle", True)

    @property
    def is_tuning(self) -> bool:
        """True while `fit` searches the best number of steps per call."""
        return self.tuner is not None and not self.tuner.is_done

    @property
    def logs_are_metrics(self) -> bool:
        """True if the logs of `fit` are results of metrics, and no subclass changes them."""
        return self._model._logs_are_metrics("train_step")

    @property
    def local_steps_done(self) -> int:
        """Number of local steps of the current round that have been run."""
        return self.rounds.done if self.rounds else 0

    @local_steps_done.setter
    def local_steps_done(self, steps: int):
        if self.rounds:
            self.rounds.done = steps

    @property
    def staleness(self) -> Staleness:
        """Staleness of the gradients of the last `fit`; zero without parameter servers."""
        monitor = self.monitor
        return monitor.staleness() if isinstance(monitor, AsynchronousMonitor) else Staleness()

    def first_nonfinite_step(self) -> int | None:
        """Returns the first optimizer step (from 1) with a NaN or infinite loss, if any."""
        return self.monitor.first_bad_step() if self.monitor else None

    def average_replicas(self):
        """Ends the current round of local SGD (see `kdist.Model.compile`), if there is one.

        `fit`, `evaluate`, and `predict` call it. Custom loops over `train_on_batch` call it on all
        workers before they read weights.
        """
        if self.rounds is not None:
            with heartbeat.collective("averaging replicas"):
                self.rounds.end()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which this worker can read and save the whole model.

        Workers that divide weights or slots (`shard`) each have parts of them. All workers enter
        the context together, and gather all parts on their hosts. They may then do different things
        in it, but no step. Elsewhere it does nothing.

        Returns:
            The context manager.

        Example:

        ```python
        with model.training_state.whole():
            if strategy.extended.should_checkpoint:  # one worker
                model.save("model.keras")
        ```
        """
        return whole_state.whole(self._model)

    def epoch_results(self, logs) -> dict[str, float]:
        """Returns an epoch's logs as floats, given the logs of its last step."""
        return self._model._epoch_results(logs)


def training_state_of(model: keras.Model) -> TrainingState | None:
    """Returns the training state of a `kdist.Model`; None for a plain Keras model."""
    return getattr(model, "training_state", None)


class Resumption(Protocol):
    """Protocol of a callback that resumes training.

    Attributes:
        place: the fields of the place in a `kdist.data.BatchSource` at the position that `load`
            returns; None if it is not known.
    """

    place: Mapping[str, Any] | None

    def load(self, model: keras.Model) -> Position | None:
        """Returns the position to resume from; None if there is none."""

    def restore(self, facts: dict[str, Any]):
        """Restores the model's state.

        Args:
            facts: the facts about the data from `data_facts`.
        """

    def release(self):
        """Called when training has ended or failed."""


def resumption_of(callbacks) -> Resumption | None:
    """Returns the callback that implements `Resumption`, if any.

    Raises:
        ValueError: more than one callback does.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    methods = ("load", "restore", "release")
    able = [c for c in keras.tree.flatten(callbacks) if all(hasattr(c, m) for m in methods)]
    if len(able) > 1:
        raise ValueError(f"fit accepts one callback that resumes, got {len(able)}: {able}")
    return able[0] if able else None


def data_facts(x, global_batch_size, steps_per_epoch) -> dict[str, Any]:
    """Returns the facts about the data that must not change when training is resumed."""
    facts = {"global_batch_size": global_batch_size, "steps_per_epoch": steps_per_epoch}
    return {**facts, **{name: getattr(x, name, None) for name in ("num_examples", "seed")}}
