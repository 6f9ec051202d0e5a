"""End of training when the loss becomes NaN or infinite, before bad weights are saved."""

import math
import os
import time

import keras

from kdist.callbacks.epoch_checkpoint import EpochCheckpoint
from kdist.training.scopes import is_multi_worker
from kdist.training.state import training_state_of


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite; raised by `StopOnNonFiniteLoss`.

    Args:
        step: the first optimizer step (from 1) with such a loss; None if only the epoch is known.
        epoch: the epoch (from 1).
        last_good: file of the last good model. Defaults to None.

    Attributes:
        step: as above.

    Example:

        try:
            model.fit(train, callbacks=[kdist.callbacks.StopOnNonFiniteLoss()])
        except kdist.callbacks.NonFiniteLossError as error:
            print(error.step)
    """

    def __init__(self, step: int | None, epoch: int, last_good: os.PathLike | None = None):
        where = f"step {step} (epoch {epoch})" if step is not None else f"a step of epoch {epoch}"
        super().__init__(
            f"the loss became NaN or infinite at {where}. Lower the learning rate "
            "(--learning_rate), clip the gradients, or check the data for invalid values"
            + (f". The last good model is {last_good}" if last_good else "")
        )
        self.step = step


class StopOnNonFiniteLoss(keras.callbacks.Callback):
    """Ends `fit` with a `NonFiniteLossError` that names the first step with a NaN or infinite loss.

    A `kdist.Model` records that step on the devices; this callback reads it periodically and at the
    end of each epoch. With a plain Keras model it checks the loss of the epoch. Place it before
    callbacks that save the model.

    Args:
        checkpoint: the `EpochCheckpoint` whose newest file the error names. Defaults to None.
        every_seconds: seconds between two checks. Defaults to 0.5.

    Example:

        save = kdist.callbacks.EpochCheckpoint("runs/a/models")
        model.fit(train, callbacks=[kdist.callbacks.StopOnNonFiniteLoss(save), save])
    """

    def __init__(self, checkpoint: EpochCheckpoint | None = None, every_seconds: float = 0.5):
        super().__init__()
        self._checkpoint = checkpoint
        self._every_seconds = every_seconds
        self._last_check = time.monotonic()
        self._epoch = 1

    def on_train_begin(self, logs=None):
        # Several workers must stop at the same step, but their clocks differ.
        strategy = getattr(self.model, "distribute_strategy", None)  # absent with other backends
        self._checks_each_call = strategy is not None and is_multi_worker(strategy)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1

    def on_train_batch_end(self, batch, logs=None):
        if self._checks_each_call or time.monotonic() - self._last_check >= self._every_seconds:
            self._check()

    def on_epoch_end(self, epoch, logs=None):
        self._check()
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            self._stop(None)

    def _check(self):
        self._last_check = time.monotonic()
        state = training_state_of(self.model)
        first_bad_step = state.first_nonfinite_step() if state else None
        if first_bad_step is not None:
            self._stop(first_bad_step)

    def _stop(self, step):
        last_good = self._checkpoint.newest() if self._checkpoint else None
        raise NonFiniteLossError(step, self._epoch, last_good)
