"""Training loops that a program writes itself, run by the machinery of `fit`.

    with kdist.session(model, optimizer) as session:
        for logs in session.run(train_step, dataset, epochs=3):
            print(logs)

A model without layers of its own holds the models, optimizers, and metrics of the program. The
program's function is its `train_step`, so that kdist scales, reduces, saves, and resumes as in
`fit`.
"""

import atexit
import contextlib
import inspect
import pathlib
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.callbacks import Checkpoint, Telemetry
from kdist.compat.keras import pythonify_logs
from kdist.compat.tensorflow import undistributed
from kdist.model import Model
from kdist.training.groups import inputs
from kdist.training.optimizers import unwrapped
from kdist.training.replica import step as steps
from kdist.training.sharding.weights import stored


class Step:
    """Training step of a program, created by `kdist.step` and run by `kdist.session`.

    Args:
        function: function of a batch that returns a dict of logs.
        strategy: the strategy that runs it.
        options: arguments of `kdist.Model.compile`.
    """

    def __init__(self, function, strategy, options):
        self.function, self.strategy, self.options = function, strategy, options
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{self.__name__} is a kdist.step, which a session runs: "
            f"session.run({self.__name__}, data, epochs=1)"
        )


def step(
    strategy: tf.distribute.Strategy,
    *,
    accumulate: int = 1,
    steps_per_execution: int = 1,
    max_staleness: int | None = 0,
) -> Callable[[Callable], Step]:
    """Returns a decorator for a function that trains on one batch.

    The function is written for one device. Each replica runs it on its rows of the global batch,
    and kdist computes the losses, gradients, metrics, and logs of the global batch. Rows may be
    divided unevenly, and replicas may have none.

    Args:
        strategy: the strategy in whose scope models, optimizers, and metrics were created.
        accumulate: number of micro-batches per update; see `kdist.Model.compile`. Defaults to 1.
        steps_per_execution: number of steps per call of the compiled function. Defaults to 1.
        max_staleness: with parameter servers, the bound on the staleness of gradients. None is no
            bound. Defaults to 0, which gives the results of one device.

    Returns:
        A decorator, which returns a step for `Session.run`.

    Raises:
        TypeError: `strategy` is not a strategy, or the function does not accept one argument.

    Example:

        @kdist.step(strategy, accumulate=2)
        def train_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = kdist.mean(tf.square(model(x, training=True) - y))
            variables = model.trainable_variables
            kdist.apply(optimizer, tape.gradient(loss, variables), variables)
            return {"loss": loss}
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"kdist.step needs a strategy, got {strategy!r}. Write "
            '@kdist.step(kdist.create_strategy("mirrored"))'
        )
    options = {
        "accumulate": accumulate,
        "steps_per_execution": steps_per_execution,
        "max_staleness": max_staleness,
    }

    def decorate(function):
        _check_signature(function)
        return Step(function, strategy, options)

    return decorate


def _check_signature(function):
    with contextlib.suppress(ValueError):  # not every callable has a signature
        signature = inspect.signature(function)
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"{function.__name__}{signature} must accept one argument, the batch ({error}); "
                f"write def {function.__name__}(batch), and in it, such as, x, y = batch"
            ) from None


@tf.autograph.experimental.do_not_convert
def mean(values: tf.Tensor) -> tf.Tensor:
    """Returns the mean of values per example, whose gradient is that of the global batch.

    In a `kdist.step`, each replica has the mean of its own rows. kdist weights it by their number
    in gradients and logs. Outside of a step it is the mean of `values`.

    Args:
        values: values per example, of shape (B, …).

    Returns:
        A scalar.

    Raises:
        RuntimeError: called by `strategy.run` without a `kdist.step`.

    Example:

        loss = kdist.mean(tf.square(model(x, training=True) - y))
    """
    current = _current_step("mean")
    value = tf.reduce_mean(values)
    if current is None or current.mixes_rows(value):
        return value
    return current.note_mean(value)


@tf.autograph.experimental.do_not_convert
def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor | None],
    variables: Sequence[keras.Variable],
):
    """Updates variables with the gradients of the global batch.

    Gradients are reduced over replicas before the optimizer clips them. With a
    `LossScaleOptimizer`, differentiate `optimizer.scale_loss(loss)`.

    Args:
        optimizer: the optimizer, one of those of the session.
        gradients: one gradient per variable, as a tape returns them.
        variables: the variables to update.

    Raises:
        RuntimeError: called by `strategy.run` without a `kdist.step`.
        ValueError: the optimizer scales losses, and the loss was not scaled.

    Example:

        kdist.apply(optimizer, tape.gradient(loss, variables), variables)
    """
    current = _current_step("apply")
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_scaling and current is not None and not current.has_scaled(optimizer):
        raise ValueError(
            f"{optimizer.name!r} scales losses, and this gradient is that of an unscaled loss. "
            "Write tape.gradient(optimizer.scale_loss(loss), variables), and call scale_loss in "
            "the block of the tape"
        )
    optimizer.apply(gradients, variables)


def _current_step(name):
    """Returns the step of this replica; None outside of replicas."""
    current = steps.current()
    if current is None and not tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"kdist.{name} in strategy.run would see one replica's rows only. Decorate the "
                "function with @kdist.step(strategy), and run it by kdist.session(...).run"
            )
    return current


class Session:
    """Models, optimizers, and metrics of a training loop, with checkpoints and telemetry.

    `kdist.session` is this class.

    Args:
        models: a Keras model or layer, or a list of them.
        optimizers: a Keras optimizer, or a list of them.
        metrics: Keras metrics, which are reset when an epoch begins. Defaults to none.
        run_dir: run directory. It gets telemetry and `checkpoints`, from the newest of which
            training resumes, also within an epoch. Defaults to None, nothing is written.
        checkpoint_steps: number of steps between checkpoints. Defaults to None: a checkpoint is
            written at the end of each epoch, on SIGTERM, and when the terminal is closed.
        callbacks: Keras callbacks. Their `model` holds the models of the session. Defaults to none.
        wandb_mode: mode of Weights & Biases; see `kdist.callbacks.Telemetry`. Defaults to "off".

    Raises:
        TypeError: a model, optimizer, or metric is not one of Keras.
        ValueError: `checkpoint_steps` or `wandb_mode` is given without `run_dir`, or one of several
            optimizers has `use_ema`.

    Example:

        with kdist.session(model, optimizer, run_dir="runs/own", checkpoint_steps=100) as session:
            for logs in session.run(train_step, train, epochs=3):
                print(logs)
    """

    def __init__(
        self,
        models: keras.Layer | Sequence[keras.Layer],
        optimizers: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer],
        metrics: keras.metrics.Metric | Sequence[keras.metrics.Metric] = (),
        *,
        run_dir: str | pathlib.Path | None = None,
        checkpoint_steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        wandb_mode: str = "off",
    ):
        self._models = _all_of(models, keras.Layer, "models")
        self._optimizers = _all_of(optimizers, keras.optimizers.Optimizer, "optimizers")
        self._metrics = _all_of(metrics, keras.metrics.Metric, "metrics")
        if not self._optimizers:
            raise ValueError("kdist.session needs an optimizer: session(model, optimizer)")
        leaves = [leaf for optimizer in self._optimizers for leaf in unwrapped(optimizer)]
        if len(self._optimizers) > 1 and any(leaf.use_ema for leaf in leaves):
            raise ValueError(
                "use_ema=True with several optimizers: kdist does not know which weights each "
                "averages. Remove use_ema"
            )
        if run_dir is None and (checkpoint_steps is not None or wandb_mode != "off"):
            raise ValueError("checkpoint_steps and wandb_mode need a run_dir: add run_dir='runs/a'")
        self._callbacks = list(callbacks)
        if run_dir is not None:
            self._callbacks += [
                Telemetry(run_dir, wandb_mode=wandb_mode),
                Checkpoint(pathlib.Path(run_dir, "checkpoints"), every_steps=checkpoint_steps),
            ]
        self._step: Step | None = None
        self._carrier: _Carrier | None = None
        self._epochs: Generator[dict[str, float], None, None] | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            self.close()
        elif self._epochs is not None:
            # Releases the run directory, and does not wait for other workers.
            with contextlib.suppress(kind):
                self._epochs.throw(error)

    def close(self):
        """Ends a run whose loop was left early, and releases its run directory."""
        if self._epochs is not None:
            self._epochs.close()

    def run(
        self, step: Step, data: Any, epochs: int = 1, steps_per_epoch: int | None = None
    ) -> Iterator[dict[str, float]]:
        """Trains, and yields the logs of each epoch: what the last step returned.

        Results of metrics are those of the epoch so far. After a restart, the first epoch is the
        one that was interrupted, and only its remaining steps run.

        Args:
            step: function that `kdist.step` decorates.
            data: a `tf.data.Dataset` of global batches (also a distributed one), a pipeline of
                `kdist.data`, or the result of `kdist.data.from_batches`.
            epochs: total number of epochs, including those of earlier processes. Defaults to 1.
            steps_per_epoch: number of steps per epoch of an endless dataset. Defaults to that of
                the data.

        Returns:
            An iterator over the logs of epochs.

        Raises:
            TypeError: `step` is not decorated with `kdist.step`, or `data` is not a dataset.
            ValueError: the session runs another step, or a model or metric was created outside
                the scope of the step's strategy.
            CheckpointError: the checkpoint is of other models or data.

        Example:

            for logs in session.run(train_step, train, epochs=3):
                print(logs["loss"])
        """
        if not isinstance(step, Step):
            raise TypeError(f"session.run needs a step, got {step!r}. Write @kdist.step(strategy)")
        data = undistributed(data)
        is_own = inputs.is_pipeline(data) or inputs.is_batch_source(data)
        if not (is_own or isinstance(data, tf.data.Dataset)):
            raise TypeError(
                f"session.run needs a dataset, got {type(data).__name__}. Write "
                "tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch)"
            )
        if self._step is not None and self._step is not step:
            raise ValueError(
                f"this session runs {self._step.__name__}; create one session per step, got "
                f"{step.__name__}"
            )
        self.close()
        if self._carrier is None:
            _check_scope(step.strategy, [*self._models, *self._metrics])
            with step.strategy.scope():
                self._carrier = _Carrier(step.function, self._models, self._optimizers)
                self._carrier.program_metrics = self._metrics
                self._carrier.compile(self._optimizers[0], auto_scale_loss=False, **step.options)
            self._step = step
        self._epochs = self._carrier._iterate_epochs(
            data, epochs, self._callbacks, steps_per_epoch=steps_per_epoch, shuffle=False
        )
        _runs.add(self._epochs)
        return self._epochs


session = Session

_runs: weakref.WeakSet[Generator] = weakref.WeakSet()


@atexit.register
def _end_runs():
    """Ends the runs that a program has left. Later, they would wait forever for their threads."""
    for epochs in list(_runs):
        epochs.close()


class _Carrier(Model):
    """Model whose training step is a function of the program."""

    def __init__(self, function, models, optimizers):
        super().__init__(name=function.__name__)
        self._function = function
        self.program_models, self.program_optimizers = models, optimizers
        self.built = True

    def train_step(self, data):
        logs = self._function(data)
        if not isinstance(logs, dict):
            raise TypeError(
                f"{self.name} returned {type(logs).__name__}; return a dict of logs, such as "
                '{"loss": loss}'
            )
        return logs

    def _epoch_results(self, logs):
        """Returns the step's logs. Keras would replace a "loss" by its own tracker, which is 0."""
        return pythonify_logs(dict(logs))


def _all_of(values, kind, name):
    """Returns a list of objects, each of which is checked to be of a class."""
    found = list(values) if isinstance(values, list | tuple) else [values]
    for value in found:
        if not isinstance(value, kind):
            raise TypeError(
                f"kdist.session: {name} must be of {kind.__name__}, got {type(value).__name__}"
            )
    return found


def _check_scope(strategy, owners):
    """Raises a ValueError unless all variables were created in the scope of the strategy."""
    for owner in owners:
        for variable in owner.variables:
            if not strategy.extended.variable_created_in_scope(stored(variable).value):
                raise ValueError(
                    f"{variable.path} of {owner.name!r} was created outside the scope of the "
                    "step's strategy. Create it in `with strategy.scope():`"
                )
