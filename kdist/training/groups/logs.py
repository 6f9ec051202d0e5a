"""Logs that stay in the metrics' variables until a callback reads them.

Reading a metric waits for the device, and with several replicas adds up their parts. `LazyLogs`
delays this until the first access, and `CallbackList` passes them on unread.
"""

import time

import keras

from kdist.cluster import heartbeat
from kdist.compat.keras import ProgbarLogger, pythonify_logs

# Keras's progress bar draws at most this often (`keras.utils.Progbar(interval=0.05)`).
_PROGRESS_BAR_SECONDS = 0.05


# Methods of a dict that do not read its items.
_UNREAD = {"__class_getitem__", "__doc__", "__getattribute__", "__hash__", "__init__", "__new__"}


class LazyLogs(dict):
    """Logs of a step: a dict of floats that is filled on first access.

    Args:
        read: function that returns a dict of metric results. It is called at most once.
    """

    def __init__(self, read):
        # The C code of json skips a dict of size 0 without calling its methods.
        super().__init__({"not read yet": None})
        self._read = read

    def _fill(self):
        if self._read is not None:
            read, self._read = self._read, None
            super().clear()
            with heartbeat.collective("reading logs"):  # waits for other workers
                super().update(pythonify_logs(read()))
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
