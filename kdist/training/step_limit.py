"""A limit on how long a step waits for the other workers.

TensorFlow's own limit on a collective keeps a thread asleep for as long as the limit is, for each
collective: thousands of them at a thousand steps a minute. Here one thread looks at the clock.
"""

import contextlib
import threading
import time
import weakref

import tensorflow as tf

from kdist.tensorflow_internals import abort_collectives

_LOOKS_PER_LIMIT = 20


def limit_steps(strategy: tf.distribute.Strategy, seconds: float):
    """Steps under `strategy`, a multi-worker one, wait for other workers so long; 0 is for ever."""
    if seconds:
        strategy.extended._kdist_step_limit = StepLimit(seconds)


def within_limit(strategy: tf.distribute.Strategy):
    """A context for a call that waits for other workers: past the limit, the call raises.

    Raises:
        tf.errors.DeadlineExceededError: another worker does not take part. From then on nothing
            that needs the others works in this process.
    """
    limit = getattr(strategy.extended, "_kdist_step_limit", None)
    return contextlib.nullcontext() if limit is None else limit.running()


class StepLimit:
    """Has collectives fail that are waited for longer than `seconds`."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._began: float | None = None
        look = threading.Thread(target=_look, args=(weakref.ref(self), seconds), daemon=True)
        look.start()

    @contextlib.contextmanager
    def running(self):
        """A context in which time is taken."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def check(self):
        """Aborts what is waited for, if that takes too long."""
        began = self._began
        if began is not None and time.monotonic() - began > self._seconds:
            abort_collectives(
                f"a step took longer than {self._seconds:g} s: another worker has stopped, died, "
                "or runs something else. Look at its output; if a step does take so long, raise "
                "--step_timeout_seconds"
            )
            self._began = None


def _look(limit_of, seconds):
    while (limit := limit_of()) is not None:
        limit.check()
        del limit
        time.sleep(seconds / _LOOKS_PER_LIMIT)
