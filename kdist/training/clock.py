"""Where the time of training goes: to the steps, to waiting for input, to callbacks.

    with clock.running():                  # an epoch's steps
        batch, waited = fetch(iterator, since=tf.timestamp())
        clock.note_input(waited)
        clock.note_call(steps=4, seconds=0.1)
        clock.note_callbacks(0.001)
    clock.take()                           # Times since the last one was taken

Waiting for input is measured where it happens, in the function that takes several steps: from the
end of a step, or the beginning of the function, until the next batch is there. Reading ahead while
a step computes is not waiting. On a GPU, in calls of a single step, the step before may still
compute when the function begins: then some of that time counts as waiting.
"""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

# Natural logarithms of seconds are kept in steps of this fraction.
_LOG_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Times:
    """What a clock saw between two calls of `take`.

    Attributes:
        steps: that were done.
        seconds: while the clock ran, all together.
        input_seconds: in which a step waited for its batch; None where that is not known.
        callback_seconds: spent in callbacks at the beginning and end of calls.
        step_seconds: seconds a step, rounded to a hundredth of themselves -> how many steps took so
            long. Of steps that were made in one call, it is their mean.
    """

    steps: int
    seconds: float
    input_seconds: float | None
    callback_seconds: float
    step_seconds: Mapping[float, int]


class StepClock:
    """Adds up where time goes, from one `take` to the next; runs only while steps are made.

    Args:
        times_steps: whether the time of a call is that of its steps; not so where other processes
            make several calls' steps at a time.
    """

    def __init__(self, times_steps: bool = True):
        self._times_steps = times_steps
        self._since: float | None = None
        self._forget()

    def _forget(self):
        self._seconds = self._callback_seconds = 0.0
        self._input_seconds = None
        self._steps = 0
        # A million calls shall take no more memory than a hundred.
        self._steps_by_log: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which time counts."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._count()
            self._since = None

    def _count(self):
        """Adds what has passed, if it runs."""
        if self._since is not None:
            now = time.perf_counter()
            self._seconds += now - self._since
            self._since = now

    def note_call(self, steps: int, seconds: float):
        """A call of the step function took so long."""
        self._steps += steps
        if not self._times_steps:
            return
        log_seconds = math.log(max(seconds / steps, 1e-9))
        self._steps_by_log[round(log_seconds * _LOG_STEPS)] += steps

    def note_callbacks(self, seconds: float):
        """Callbacks took so long."""
        self._callback_seconds += seconds

    def note_input(self, seconds: Any):
        """A step waited so long for its batch; a float, or a scalar tensor."""
        self._input_seconds = (self._input_seconds or 0.0) + float(seconds)

    def take(self) -> Times:
        """What was seen since the last `take`; then it begins anew."""
        self._count()
        times = Times(
            self._steps,
            self._seconds,
            self._input_seconds,
            self._callback_seconds,
            {math.exp(key / _LOG_STEPS): n for key, n in sorted(self._steps_by_log.items())},
        )
        self._forget()
        return times


def fetch(iterator, since):
    """(the next batch of an iterator, seconds that it came later than `since`).

    Args:
        iterator: of a data set.
        since: `tf.timestamp()` of the moment from which on the batch could have been used.
    """
    batch = next(iterator)
    parts = [x for x in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(x)]
    # On the host, as a number that a GPU holds would have to be waited for.
    with tf.control_dependencies(parts), tf.device("CPU:0"):
        arrived = tf.timestamp()
        waited = tf.maximum(arrived - since, 0.0)
    # The step begins after this, else the clock is read when its operations leave a thread free.
    with tf.control_dependencies([arrived]):
        return tf.nest.map_structure(_same, batch, expand_composites=True), waited


def _same(part):
    return tf.identity(part) if tf.is_tensor(part) else part


def at_once(iterator):
    """`fetch` from now on."""
    since = tf.timestamp()
    with tf.control_dependencies([since]):
        return fetch(iterator, since)


def end_of_step(variables, otherwise):
    """The moment at which a step has written its weights; within a function.

    Args:
        variables: the weights. The first layer's are written last: its gradients come last.
        otherwise: what is given if there are none.
    """
    if not variables:
        return otherwise
    # A copy on the host waits for a GPU to have come so far.
    with tf.device("CPU:0"):
        written = tf.identity(tf.reshape(tf.convert_to_tensor(variables[0].value), [-1])[:1])
    with tf.control_dependencies([written]):
        return tf.timestamp()
