"""Logs that stay in the metrics' variables until a callback reads them.

Reading a metric waits for the device, and with several replicas it adds their parts up. `LazyLogs`
puts this off to the moment when somebody looks, and `CallbackList` hands them on unread.
"""

import time

import keras

from kdist import heartbeat
from kdist.training.keras_internals import ProgbarLogger, pythonify_logs

# Keras's bar prints no more often than this (`keras.utils.Progbar(interval=0.05)`).
_PROGRESS_BAR_SECONDS = 0.05


# Methods of a dict that do not look at what it holds.
_UNREAD = {"__class_getitem__", "__doc__", "__getattribute__", "__hash__", "__init__", "__new__"}


class LazyLogs(dict):
    """The logs of a step: a dict of floats that is filled the first time it is read.

    Args:
        read: a function that gives the dict of metric results; called once, or never.
    """

    def __init__(self, read):
        # json's C code takes a dict of size 0 to be empty without calling any of its methods.
        super().__init__({"not read yet": None})
        self._read = read

    def _fill(self):
        if self._read is not None:
            read, self._read = self._read, None
            super().clear()
            with heartbeat.meeting("reading logs"):  # waits for the device, and so for the others
                super().update(pythonify_logs(read()))
        return self

    def __bool__(self):
        # `logs = logs or {}`, which many callbacks begin with, must not read.
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


# Callbacks of Keras that do nothing but write.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def without_writers(callbacks):
    """The callbacks of a task that is not the chief: only one task writes.

    Of kdist's and the user's own, those are left out that have an attribute `only_writes`.
    """
    return [
        callback
        for callback in keras.tree.flatten(callbacks)
        if callback is not None
        and not isinstance(callback, _WRITERS)
        and not getattr(callback, "only_writes", False)
    ]


class CallbackList(keras.callbacks.CallbackList):
    """Keras's list, but the logs of a step reach each callback unread.

    Callbacks run in the step's own thread, so that what they read is the state after that step.
    The progress bar is given a step only as often as it prints. Callbacks with an attribute
    `comes_last` come after all others, also after Keras's own.
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
