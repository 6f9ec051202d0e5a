"""Loop over step groups, shared by `fit`, `evaluate`, and `predict`, and the epochs of `fit`.

Its logs stay in the metrics' variables until a callback reads them. Reading a metric waits for the
device, and with several replicas adds up their parts. `LazyLogs` delays this until the first
access, and `CallbackList` passes them on unread.
"""

import logging
import time

import keras
import tensorflow as tf

from kdist.cluster import heartbeat
from kdist.compat.keras import ProgbarLogger, pythonify_logs
from kdist.training.groups.clock import StepClock
from kdist.training.scopes import is_multi_worker

_logger = logging.getLogger(__name__)

# Keras's progress bar draws at most this often (`keras.utils.Progbar(interval=0.05)`).
_PROGRESS_BAR_SECONDS = 0.05

# Methods of a dict that do not read its items.
_UNREAD = {"__class_getitem__", "__doc__", "__getattribute__", "__hash__", "__init__", "__new__"}


def run_groups(groups, runner, begin, end, should_stop, clock=None, note=None):
    """Yields the `GroupResult` of each step group of an epoch, and calls the callbacks.

    Args:
        groups: the `StepGroups`.
        runner: the `GroupRunner` that runs them.
        begin: the callbacks' function before a group, called with the index of its first step.
        end: the callbacks' function after a group, called with the index of its last step and its
            logs.
        should_stop: function that returns True if the epoch ends early.
        clock: `StepClock` to update; optional.
        note: function that receives each `GroupResult`, before `end` is called, and the time of
            the call; optional.
    """
    clock = clock or StepClock()
    is_first = True
    now = time.perf_counter
    heartbeat.start()
    with clock.running(), groups.catch_stop_iteration(), runner.in_flight(groups) as due:
        for group in due:
            began = now()
            begin(group.first)
            called = now()
            # Keras counts a group as a full one, even if the epoch's end cuts it short.
            last = group.first + groups.steps_per_execution - 1
            with heartbeat.step(runner, group.first, group.length, is_first) as note_steps:
                result = runner.run(group)
                steps = result.group.length
                note_steps(steps)
                if note:
                    note(result, called)
            is_first = False
            returned = now()
            clock.note_call(steps, returned - called)
            end(last, result.logs)
            clock.note_callbacks(called - began + now() - returned)
            yield result
            if should_stop():
                break
            if result.group.first == group.first and steps < group.length:
                raise StopIteration  # the data have ended; `catch_stop_iteration` ends the epoch


class EpochLoop:
    """The epochs of `fit`.

    Args:
        model: the compiled model.
        groups: the `StepGroups` of an epoch.
        callbacks: a Keras `CallbackList`.
        validate: function that returns validation results; None without validation data.
        validation_freq: as in `fit`.
    """

    def __init__(self, model, groups, callbacks, validate, validation_freq):
        self._model, self._state = model, model.training_state
        self._groups, self._callbacks = groups, callbacks
        self._validate, self._validation_freq = validate, validation_freq

    def run(self, epochs):
        """Runs the epochs of a range, and yields the logs of each."""
        for epoch in epochs:
            yield self._epoch(epoch)
            if self._model.stop_training:
                break

    def _epoch(self, epoch):
        state = self._state
        if epoch != state.epoch:
            state.batches_before_epoch = state.position.batch
        state.epoch, state.steps_in_epoch = epoch, self._groups.first_step
        self._callbacks.on_epoch_begin(epoch)
        logs = self._train()
        if self._validate and self._model._should_eval(epoch, self._validation_freq):
            logs.update({f"val_{name}": value for name, value in self._validate().items()})
        # Not before the validation: a run that resumes there has yet to end this epoch.
        if self._groups.has_ended and self._groups.steps_per_epoch:
            state.data_start = state.position.batch
        self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _train(self):
        """Runs the epoch's steps and returns its logs."""
        model, state, callbacks = self._model, self._state, self._callbacks
        is_resumed = bool(self._groups.first_step)
        if not is_resumed:  # else the metrics hold the first part of the epoch
            model.reset_metrics()
        logs = {}
        for result in run_groups(
            self._groups,
            model.train_function,
            callbacks.on_train_batch_begin,
            callbacks.on_train_batch_end,
            lambda: model.stop_training,
            state.clock,
            self._note,
        ):
            logs = result.logs
        state.average_replicas()
        if logs or not is_resumed:
            state.epoch_logs = state.epoch_results(logs)
        # Else another process has run all steps, and these are its logs.
        return dict(state.epoch_logs)

    def _note(self, result, called):
        """Counts the steps of a group and, while the tuner is active, measures them."""
        length, tuner = result.group.length, self._state.tuner
        if self._state.is_tuning:
            self._model.optimizer.iterations.numpy()  # waits for the device
            tuner.note(length, self._mean_over_workers(time.perf_counter() - called))
            self._groups.steps_per_execution = self._model.steps_per_execution = tuner.length
            if tuner.is_done:
                _logger.info("%s", tuner)
        self._state.steps_in_epoch += length
        if self._state.reader is not None:
            self._state.reader.forget_before(self._state.position.batch)

    def _mean_over_workers(self, number):
        """Returns the mean over workers, so that all of them make the same decisions."""
        strategy = self._model.distribute_strategy
        if not is_multi_worker(strategy):
            return number
        return float(strategy.reduce(tf.distribute.ReduceOp.MEAN, tf.constant(number), None))


class LazyLogs(dict):
    """Logs of a step: a dict of floats that is filled on first access.

    Args:
        read: function that returns a dict of metric results. It is called at most once.
        read_metrics: function that returns the results of all metrics; None if these are the logs.
    """

    def __init__(self, read, read_metrics=None):
        # The C code of json skips a dict of size 0 without calling its methods.
        super().__init__({"not read yet": None})
        self._read, self._read_metrics = read, read_metrics

    def of_epoch(self) -> dict:
        """Returns the epoch's logs: results of metrics instead of a step's logs of these names.

        Keras does the same, and ignores what callbacks added to the logs of the step.
        """
        logs, read = self._fill()._as_read, self._read_metrics
        results = pythonify_logs(read()) if read else logs
        return results if results.keys() == logs.keys() else logs

    def _fill(self):
        if self._read is not None:
            read, self._read = self._read, None
            super().clear()
            with heartbeat.collective("reading logs"):  # waits for other workers
                self._as_read = pythonify_logs(read())
            super().update(self._as_read)
        return self

    def __bool__(self):
        # Many callbacks begin with `logs = logs or {}`, which must not read.
        return True

    def __getattribute__(self, name):
        # Named methods (`get`, `items`, `update`, …) read first; special ones are listed below.
        if not name.startswith("_"):
            object.__getattribute__(self, "_fill")()
        return object.__getattribute__(self, name)


def _filled(name):
    method = getattr(dict, name)

    def call(self, *arguments):
        return method(self._fill(), *arguments)

    call.__name__ = name
    return call


for _name in vars(dict):
    if _name.startswith("__") and _name not in _UNREAD:
        setattr(LazyLogs, _name, _filled(_name))


class CallbackList(keras.callbacks.CallbackList):
    """Keras's callback list, which passes the logs of a step on unread.

    Callbacks run in the thread of the step, so that they read the state after that step. The
    progress bar is called only as often as it draws. Callbacks with an attribute `comes_last` run
    after all others, including Keras's own.
    """

    _bar_drawn = float("-inf")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.callbacks.sort(key=lambda callback: getattr(callback, "comes_last", False))

    def on_train_batch_end(self, batch, logs=None):
        logs = _unread(logs)
        for callback in self._due():
            callback.on_train_batch_end(batch, logs=logs)

    def on_test_batch_end(self, batch, logs=None):
        logs = _unread(logs)
        for callback in self._due():
            callback.on_test_batch_end(batch, logs=logs)

    def _due(self):
        now = time.monotonic()
        draw_bar = now - self._bar_drawn >= _PROGRESS_BAR_SECONDS
        if draw_bar:
            self._bar_drawn = now
        return [
            callback
            for callback in self.callbacks
            if draw_bar or not isinstance(callback, ProgbarLogger)
        ]


def _unread(logs):
    return logs if isinstance(logs, LazyLogs) else pythonify_logs(logs)
