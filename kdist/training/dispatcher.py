"""Hands functions out to the workers of a parameter server strategy.

Thin, over TensorFlow's `ClusterCoordinator`, which keeps the workers, notices when one dies, and
gives what it had to another. Added are the order in which results come (that in which they end),
copies of data that a worker keeps, and a bound on staleness.
"""

import collections
import itertools
import queue
import time

import tensorflow as tf

from kdist.tensorflow_internals import current_device, number_of_workers, schedule

# Groups a worker has before it: one that it computes, and one to go on with.
_GROUPS_PER_WORKER = 2
_SECONDS_BETWEEN_LOOKS = 1.0


class Dispatcher:
    """Runs functions on the workers, and gives what they give in the order in which they end.

    Args:
        strategy: a `ParameterServerStrategy`.
        max_staleness: updates that may happen between a step's reading and its writing; None for
            any number.
    """

    def __init__(self, strategy: tf.distribute.Strategy, max_staleness: int | None = None):
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._max_staleness = max_staleness
        self._most = _GROUPS_PER_WORKER * max(1, number_of_workers(strategy))
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        self._under_way: dict[int, int] = {}  # group -> its steps
        self._passed: dict[int, int] = {}  # group -> steps that ended since it was handed out
        self._groups = 0
        self._repeats = 0
        self._copies: dict[str, dict] = collections.defaultdict(dict)

    def may_start(self, steps: int) -> bool:
        """Whether a group of `steps` more may be handed out now.

        A group that is under way may write after all others that are: with those that have ended
        meanwhile, they are the updates that it may miss.
        """
        if not self._under_way:
            return True
        if len(self._under_way) >= self._most:
            return False
        if self._max_staleness is None:
            return True
        all_steps = sum(self._under_way.values()) + steps
        missed = [self._passed[group] + all_steps - own for group, own in self._under_way.items()]
        return max(*missed, all_steps - steps) <= self._max_staleness

    def start(self, function, arguments, arrays=(), steps=1) -> int:
        """Hands out a group.

        Args:
            function: a concrete function of `arguments` and of the worker's copies of `arrays`.
            arguments: tensors.
            arrays: NumPy arrays that every worker keeps a copy of.
            steps: that the group makes.

        Returns:
            The group's number.
        """
        group, self._groups = self._groups, self._groups + 1
        self._under_way[group], self._passed[group] = steps, 0
        attempts = itertools.count()

        def on_worker():
            self._repeats += next(attempts) > 0
            device, began = current_device(), time.perf_counter()
            try:
                results = function(*arguments, *self._copies_on(device, arrays))
                results = tf.nest.map_structure(_on_coordinator, results, expand_composites=True)
            except Exception:
                self._copies.pop(device, None)  # the worker may come back without them
                raise
            self._ended.put((group, results, time.perf_counter() - began))

        schedule(self._coordinator, on_worker)
        return group

    def wait(self):
        """(number of a group that has ended, what its function gave, the seconds it took).

        Raises:
            tf.errors.OpError: what went wrong on a worker, if it is not that the worker died.
        """
        while True:
            try:
                group, results, seconds = self._ended.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                self._coordinator.done()  # raises
                continue
            if group in self._under_way:
                steps = self._under_way.pop(group)
                del self._passed[group]
                for other in self._passed:
                    self._passed[other] += steps
                return group, results, seconds

    def repeats(self) -> int:
        """How many groups a worker began that another had begun and not ended, since last asked."""
        repeats, self._repeats = self._repeats, 0
        return repeats

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return not self._under_way

    def forget(self):
        """Lets go of what is under way, after an error."""
        self._under_way.clear()
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
