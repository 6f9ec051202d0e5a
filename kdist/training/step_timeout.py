"""Limit on how long a step waits for the other workers.

TensorFlow's own timeout of a collective keeps one thread asleep per collective for its whole
duration, thousands of threads at a thousand steps per minute. Here one thread checks the time.
"""

import contextlib
import threading
import time
import weakref

import tensorflow as tf

from kdist.compat.tensorflow import abort_collectives

_CHECKS_PER_LIMIT = 20


def set_step_timeout(strategy: tf.distribute.Strategy, seconds: float):
    """Limits how long steps under a multi-worker strategy wait for other workers.

    Args:
        strategy: the strategy.
        seconds: the limit in seconds; 0 for none.
    """
    if seconds:
        strategy.extended._kdist_step_limit = StepTimeout(seconds)


def step_timeout_of(strategy: tf.distribute.Strategy):
    """Returns a context manager for a call that waits for other workers, and fails past the limit.

    Raises:
        tf.errors.DeadlineExceededError: another worker does not take part. From then on, every
            collective of this process fails.
    """
    limit = getattr(strategy.extended, "_kdist_step_limit", None)
    return contextlib.nullcontext() if limit is None else limit.running()


class StepTimeout:
    """Aborts collectives that take longer than `seconds`."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._began: float | None = None
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), seconds), daemon=True)
        thread.start()

    @contextlib.contextmanager
    def running(self):
        """Measures the time of the enclosed call."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def check(self):
        """Aborts collectives if the current call exceeds the limit."""
        began = self._began
        if began is not None and time.monotonic() - began > self._seconds:
            abort_collectives(
                f"a step took longer than {self._seconds:g} s: another worker has stopped, died, "
                "or runs something else. Look at its output; if steps are that slow, raise "
                "--step_timeout_seconds"
            )
            self._began = None


def _watch(limit_of, seconds):
    while (limit := limit_of()) is not None:
        limit.check()
        del limit
        time.sleep(seconds / _CHECKS_PER_LIMIT)
