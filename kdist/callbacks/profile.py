"""Traces some steps for TensorBoard and xprof, and names the most expensive operations."""

import dataclasses
import os
import pathlib
from typing import Any

import keras
import tensorflow as tf

from kdist.telemetry.trace import read_trace


class Profile(keras.callbacks.Callback):
    """Traces the steps from `first` to `last`, in whole calls of the step function.

    Steps are slower while they are traced. A run that ends before `first` has no profile; a line
    says so.

    Args:
        directory: where the trace is written, in TensorBoard's layout
            (`plugins/profile/<time>/<host>.xplane.pb`); open it with `tensorboard --logdir=…`
            (package `tensorboard-plugin-profile`) or with `xprof`.
        first: the first step to trace, counted from 1. Take one after the compilation.
        last: the last one.

    Attributes:
        steps: how many were traced.

    Raises:
        ValueError: `last` comes before `first`, or `first` is less than 1.
    """

    only_writes = True

    def __init__(self, directory: str | os.PathLike, first: int, last: int):
        super().__init__()
        if not 1 <= first <= last:
            raise ValueError(
                f"Profile(first={first}, last={last}): steps are counted from 1, and the last one "
                "does not come before the first (--profile=10:20)"
            )
        self._directory = pathlib.Path(directory)
        self._first, self._last = first, last
        self._marker: Any = None
        self._runs = False
        self.steps = 0

    def top_operations(self, number: int = 10) -> list[dict[str, Any]]:
        """The operations that took the most time, as records; empty if nothing was traced."""
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
        self._done = self._done_before + getattr(self.model, "steps_in_epoch", batch + 1)
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
            print(f"kdist: no profile: training ended after {self._done} steps")

    def _length(self):
        return getattr(self.model, "steps_per_execution", 1)

    def _stop(self):
        tf.profiler.experimental.stop()
        self._runs = False
