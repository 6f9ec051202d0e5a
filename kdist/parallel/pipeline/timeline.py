"""Measured times of the passes of a pipeline.

    with recorded_timeline() as timeline:
        model.fit(x, y, epochs=2)        # the first call of fit traces the step
    passes = timeline.steps()[-1]
    waiting_share(passes), overlapped_share(passes)      # of kdist.parallel.pipeline.schedule

Timestamps are stateless functions of the data. TensorFlow would run stateful ones, such as
`tf.timestamp`, one after the other, so that stages would not overlap. Each timestamp costs the host
some tenths of a millisecond, so that passes should take several milliseconds.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from kdist.parallel.pipeline.schedule import StageWork, TimedWork
from kdist.training.replica.colocation import colocate_with_inputs

_recorder: "Timeline | None" = None


class Timeline:
    """Times of passes, by replica and step."""

    def __init__(self):
        self._times = collections.defaultdict(list)

    def on(self, replica: int) -> Callable:
        """Returns a function that adds a replica's timestamps to a graph.

        It is called while a step is traced, with a pass, whether the pass ends, and the tensors
        that are computed by then. It returns a tensor that is computed with the timestamp.
        """
        return functools.partial(self._stamp, replica)

    def steps(self, replica: int = 0) -> list[list[TimedWork]]:
        """Returns the passes of each step that has run on a replica, ordered by their starts."""
        works = {work for own, work, _ in self._times if own == replica}
        columns = [
            [
                TimedWork(work, start, end)
                for start, end in zip(
                    self._times[replica, work, False],
                    self._times[replica, work, True],
                    strict=False,  # a failed step has no ends
                )
            ]
            for work in works
        ]
        return [sorted(step, key=lambda timed: timed.start) for step in zip(*columns, strict=False)]

    def _stamp(self, replica, work: StageWork, is_end: bool, tensors):
        def note(*_):
            self._times[replica, work, is_end].append(time.perf_counter())
            return np.float32(0.0)

        flat = [t for t in tf.nest.flatten(tensors, expand_composites=True) if t is not None]
        with colocate_with_inputs():  # TensorFlow would fold a stamp of constants alone
            some = [tf.reshape(tensor, [-1])[:1] for tensor in flat]
        with tf.device("CPU:0"), tf.control_dependencies(flat):
            stamp = tf.numpy_function(note, some, tf.float32, stateful=False)
        stamp.set_shape([])
        return stamp


def active_timeline() -> "Timeline | None":
    """Returns the timeline for steps that are traced now."""
    return _recorder


@contextlib.contextmanager
def recorded_timeline() -> Iterator[Timeline]:
    """Yields a timeline. Steps traced in the context record their passes whenever they run."""
    global _recorder
    before, _recorder = _recorder, Timeline()
    try:
        yield _recorder
    finally:
        _recorder = before
