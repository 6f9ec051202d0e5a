"""Ends training when the loss is no longer a number, before bad weights overwrite good ones."""

import math
import os
import time

import keras

from kdist.callbacks.epoch_checkpoint import EpochCheckpoint
from kdist.training.together import are_several_workers


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite.

    Attributes:
        step: the optimizer step (from 1) at which it did; None where only the epoch is known.
    """

    def __init__(self, step: int | None, epoch: int, last_good: os.PathLike | None = None):
        where = (
            f"step {step} (epoch {epoch})" if step is not None else f"some step of epoch {epoch}"
        )
        super().__init__(
            f"the loss became NaN or infinite at {where}. Lower the learning rate "
            "(--learning_rate), clip the gradients, or look for bad values in the data"
            + (f". The last good model is {last_good}" if last_good else "")
        )
        self.step = step


class StopOnNonFiniteLoss(keras.callbacks.Callback):
    """Raises `NonFiniteLossError`, which names the first bad step, out of `fit`.

    A `kdist.Model` notes that step on the devices, in every step; this callback asks for it now
    and then and at the end of each epoch. With a plain Keras model it looks at the epoch's loss.
    Put it before callbacks that save.

    Args:
        checkpoint: the callback that saves, so that the error can name the last good model.
        every_seconds: time between two looks. Defaults to 0.5.
    """

    def __init__(self, checkpoint: EpochCheckpoint | None = None, every_seconds: float = 0.5):
        super().__init__()
        self._checkpoint = checkpoint
        self._every_seconds = every_seconds
        self._looked = time.monotonic()
        self._epoch = 1

    def on_train_begin(self, logs=None):
        # Several workers have to stop at the same step, and their clocks differ.
        strategy = getattr(self.model, "distribute_strategy", None)  # none on other backends
        self._looks_at_each_call = strategy is not None and are_several_workers(strategy)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1

    def on_train_batch_end(self, batch, logs=None):
        if self._looks_at_each_call or time.monotonic() - self._looked >= self._every_seconds:
            self._look()

    def on_epoch_end(self, epoch, logs=None):
        self._look()
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            self._stop(None)

    def _look(self):
        self._looked = time.monotonic()
        first_bad_step = getattr(self.model, "first_nonfinite_step", lambda: None)()
        if first_bad_step is not None:
            self._stop(first_bad_step)

    def _stop(self, step):
        last_good = self._checkpoint.newest() if self._checkpoint else None
        raise NonFiniteLossError(step, self._epoch, last_good)
