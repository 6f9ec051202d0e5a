"""Dispatches functions to the workers of a parameter-server strategy.

A thin layer over TensorFlow's `ClusterCoordinator`, which manages the workers, detects failures,
and retries a failed worker's functions on another one. It adds results in order of completion,
copies of data that workers keep, and a bound on staleness.
"""

import collections
import itertools
import queue
import time

import tensorflow as tf

from kdist.compat.tensorflow import current_device, number_of_workers, schedule

# In-flight groups per worker: one running, one queued.
_GROUPS_PER_WORKER = 2
_POLL_SECONDS = 1.0


class Dispatcher:
    """Runs functions on the workers, and returns their results in order of completion.

    Args:
        strategy: a `ParameterServerStrategy`.
        max_staleness: maximum number of updates by other workers between a step's read and its
            own update; None for no limit.
    """

    def __init__(self, strategy: tf.distribute.Strategy, max_staleness: int | None):
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._max_staleness = max_staleness
        self._max_groups = _GROUPS_PER_WORKER * max(1, number_of_workers(strategy))
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        self._in_flight: dict[int, int] = {}  # group -> its steps
        self._passed: dict[int, int] = {}  # group -> steps that have ended since its dispatch
        self._groups = 0
        self._repeats = 0
        self._copies: dict[str, dict] = collections.defaultdict(dict)

    def may_start(self, steps: int) -> bool:
        """Returns True if a group of `steps` steps may be dispatched now.

        A group in flight may write after all others. Those in flight and those that have ended
        since its dispatch are the updates that it may miss.
        """
        if not self._in_flight:
            return True
        if len(self._in_flight) >= self._max_groups:
            return False
        if self._max_staleness is None:
            return True
        all_steps = sum(self._in_flight.values()) + steps
        missed = [self._passed[group] + all_steps - own for group, own in self._in_flight.items()]
        return max(*missed, all_steps - steps) <= self._max_staleness

    def start(self, function, arguments, arrays=(), steps=1) -> int:
        """Dispatches a group.

        Args:
            function: concrete function of `arguments` and the worker's copies of `arrays`.
            arguments: tensors.
            arrays: NumPy arrays of which every worker keeps a copy.
            steps: number of steps in the group.

        Returns:
            The group's number.
        """
        group, self._groups = self._groups, self._groups + 1
        self._in_flight[group], self._passed[group] = steps, 0
        attempts = itertools.count()

        def on_worker():
            self._repeats += next(attempts) > 0
            device, began = current_device(), time.perf_counter()
            try:
                results = function(*arguments, *self._copies_on(device, arrays))
                results = tf.nest.map_structure(_on_coordinator, results, expand_composites=True)
            except Exception:
                self._copies.pop(device, None)  # the worker may restart without them
                raise
            self._ended.put((group, results, time.perf_counter() - began))

        schedule(self._coordinator, on_worker)
        return group

    def wait(self):
        """Returns (number of a group that has ended, results of its function, its seconds).

        Raises:
            tf.errors.OpError: a worker failed, other than by dying.
        """
        while True:
            try:
                group, results, seconds = self._ended.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._coordinator.done()  # raises
                continue
            if group in self._in_flight:
                steps = self._in_flight.pop(group)
                del self._passed[group]
                for other in self._passed:
                    self._passed[other] += steps
                return group, results, seconds

    def repeats(self) -> int:
        """Returns how many groups were repeated after a worker's failure, since the last call."""
        repeats, self._repeats = self._repeats, 0
        return repeats

    @property
    def is_sequential(self) -> bool:
        """True if groups run one at a time."""
        return self._max_staleness == 0

    @property
    def is_idle(self) -> bool:
        """True if no group is in flight."""
        return not self._in_flight

    def forget(self):
        """Drops the groups in flight, after an error."""
        self._in_flight.clear()
        self._passed.clear()

    def _copies_on(self, device, arrays):
        held = self._copies[device]
        for array in arrays:
            if id(array) not in held:
                held[id(array)] = array, tf.constant(array)
        return [held[id(array)][1] for array in arrays]


def _on_coordinator(tensor):
    with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
        return tf.identity(tensor)
