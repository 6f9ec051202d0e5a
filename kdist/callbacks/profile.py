"""Profile of some steps for TensorBoard and xprof, and their most expensive operations."""

import dataclasses
import logging
import os
import pathlib
from typing import Any

import keras
import tensorflow as tf

from kdist.telemetry.steps.trace import read_trace
from kdist.training.state import training_state_of

_logger = logging.getLogger(__name__)


class Profile(keras.callbacks.Callback):
    """Traces the steps from `first` to `last`, rounded to whole calls of the train function.

    Traced steps are slower. A run that ends before `first` writes no profile and logs a message.

    Args:
        directory: directory of the trace, in TensorBoard's format
            (`plugins/profile/<time>/<host>.xplane.pb`). Open it with `tensorboard --logdir=…`
            (package `tensorboard-plugin-profile`) or with `xprof`.
        first: first step to trace, counted from 1; choose one after the compilation.
        last: last step to trace.

    Attributes:
        steps: number of traced steps.

    Raises:
        ValueError: `last` is less than `first`, or `first` is less than 1.

    Example:

        profile = kdist.callbacks.Profile("runs/a/profile", first=10, last=20)
        model.fit(train, callbacks=[profile])
        profile.top_operations(3)
    """

    only_writes = True

    def __init__(self, directory: str | os.PathLike, first: int, last: int):
        super().__init__()
        if not 1 <= first <= last:
            raise ValueError(
                f"Profile(first={first}, last={last}) is invalid; steps are counted from 1, and "
                "last is at least first (--profile=10:20)"
            )
        self._directory = pathlib.Path(directory)
        self._first, self._last = first, last
        self._marker: Any = None
        self._runs = False
        self.steps = 0

    def top_operations(self, number: int = 10) -> list[dict[str, Any]]:
        """Returns the operations with the most time, as dicts; empty without a trace."""
        work = read_trace(self._directory, self.steps) if self.steps else None
        return [dataclasses.asdict(op) for op in work.operations[:number]] if work else []

    def on_train_begin(self, logs=None):
        self._done = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._done_before = self._done

    def on_train_batch_begin(self, batch, logs=None):
        # A call is traced if one of its steps is.
        if not self._runs and not self.steps and self._done + self._length() >= self._first:
            tf.profiler.experimental.start(os.fspath(self._directory))
            self._runs = True
        if self._runs:
            # Without such marks xprof does not know where a step begins.
            self._marker = tf.profiler.experimental.Trace("train", step_num=self._done + 1, _r=1)
            self._marker.__enter__()

    def on_train_batch_end(self, batch, logs=None):
        before = self._done
        state = training_state_of(self.model)
        self._done = self._done_before + (state.steps_in_epoch if state else batch + 1)
        if not self._runs:
            return
        self._marker.__exit__(None, None, None)
        self.steps += self._done - before
        if self._done >= self._last:
            self._stop()

    def on_train_end(self, logs=None):
        if self._runs:
            self._stop()
        if not self.steps:
            _logger.warning("no profile: training ended after %d steps", self._done)

    def _length(self):
        return getattr(self.model, "steps_per_execution", 1)

    def _stop(self):
        tf.profiler.experimental.stop()
        self._runs = False
