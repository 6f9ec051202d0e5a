"""Step clock: how much of the training time goes to steps, input, and callbacks.

    with clock.running():                  # the steps of an epoch
        batch, waited = fetch(iterator, since=tf.timestamp(), device=None)
        clock.note_input(waited)
        clock.note_call(steps=4, seconds=0.1)
        clock.note_callbacks(0.001)
    clock.take()                           # the Times since the last `take`

The time that steps wait for input is measured inside the function that runs them: from the end of
a step, or the beginning of the function, until the next batch arrives. Prefetching during a step
does not count. On a GPU, with one step per call, the previous step may still compute when the
function begins; part of that time then counts as waiting.
"""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from kdist.training.sharding.weights import stored

# Step times are counted in bins of a hundredth of their natural logarithm.
_BINS_PER_LOG = 100


@dataclasses.dataclass(frozen=True)
class Times:
    """Times between two calls of `StepClock.take`.

    Attributes:
        steps: number of steps.
        seconds: seconds during which the clock ran.
        input_seconds: seconds during which steps waited for input; None if unknown.
        callback_seconds: seconds spent in callbacks before and after each call.
        step_seconds: histogram that maps seconds per step, rounded to one percent, to the number of
            steps. Steps of one call count with their mean.
    """

    steps: int
    seconds: float
    input_seconds: float | None
    callback_seconds: float
    step_seconds: Mapping[float, int]


class StepClock:
    """Accumulates times between two calls of `take`. Runs only while steps do.

    Args:
        times_steps: whether the time of a call is the time of its steps. This is not so if other
            processes run the steps of several calls at the same time. Defaults to True.
    """

    def __init__(self, times_steps: bool = True):
        self._times_steps = times_steps
        self._since: float | None = None
        self._forget()

    def _forget(self):
        self._seconds = self._callback_seconds = 0.0
        self._input_seconds = None
        self._steps = 0
        # A histogram, so that memory does not grow with the number of calls.
        self._steps_by_log: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets the clock run."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._count()
            self._since = None

    def _count(self):
        """Adds the time since the last count, if the clock runs."""
        if self._since is not None:
            now = time.perf_counter()
            self._seconds += now - self._since
            self._since = now

    def note_call(self, steps: int, seconds: float):
        """Adds one call of the train function: `steps` steps in `seconds` seconds."""
        self._steps += steps
        if not self._times_steps:
            return
        log_seconds = math.log(max(seconds / steps, 1e-9))
        self._steps_by_log[round(log_seconds * _BINS_PER_LOG)] += steps

    def note_callbacks(self, seconds: float):
        """Adds seconds spent in callbacks."""
        self._callback_seconds += seconds

    def note_input(self, seconds: Any):
        """Adds seconds that a step waited for its batch, a float or a scalar tensor."""
        self._input_seconds = (self._input_seconds or 0.0) + float(seconds)

    def take(self) -> Times:
        """Returns the times since the last `take`, and starts again from zero."""
        self._count()
        times = Times(
            self._steps,
            self._seconds,
            self._input_seconds,
            self._callback_seconds,
            {math.exp(key / _BINS_PER_LOG): n for key, n in sorted(self._steps_by_log.items())},
        )
        self._forget()
        return times


def fetch(iterator, since, device):
    """Returns (the next batch of an iterator, seconds by which it arrived later than `since`).

    Args:
        iterator: iterator over a dataset.
        since: `tf.timestamp()` of the moment from which the batch could have been used.
        device: device of the iterator, where the batch stays. If None, TensorFlow may copy it.
    """
    batch = next(iterator)
    parts = [x for x in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(x)]
    # On the host: reading a number from a GPU would wait for the GPU.
    with tf.control_dependencies(parts), tf.device("CPU:0"):
        arrived = tf.timestamp()
        waited = tf.maximum(arrived - since, 0.0)
    # The step begins afterwards; else the time is read whenever its operations leave a thread free.
    place = tf.device(device) if device else contextlib.nullcontext()
    with tf.control_dependencies([arrived]), place:
        return tf.nest.map_structure(identity, batch, expand_composites=True), waited


def identity(part):
    """Returns `tf.identity` of a tensor, and anything else, such as None, as it is."""
    return tf.identity(part) if tf.is_tensor(part) else part


def fetch_now(iterator, device):
    """Returns `fetch` with the current time as `since`."""
    since = tf.timestamp()
    with tf.control_dependencies([since]):
        return fetch(iterator, since, device)


def step_end_time(variables, otherwise):
    """Returns the time at which a step has written its weights, inside a function.

    Args:
        variables: the weights. The first layer's are written last, as its gradients come last.
        otherwise: the result if there are no weights.
    """
    if not variables:
        return otherwise
    # A copy on the host waits for the GPU.
    with tf.device("CPU:0"):
        written = tf.identity(
            tf.reshape(tf.convert_to_tensor(stored(variables[0]).value), [-1])[:1]
        )
    with tf.control_dependencies([written]):
        return tf.timestamp()
