"""When the stages of a pipeline did what, as measured.

    with recorded_timeline() as timeline:
        model.fit(x, y, epochs=2)        # the step is traced within the block: fit's first call
    pieces = timeline.steps()[-1]
    waiting_share(pieces), overlapped_share(pieces)      # of kdist.parallel.schedule

The time stamps are stateless functions of the data: TensorFlow would run stateful ones, such as
`tf.timestamp`, one after the other, and show stages that do not overlap. Each takes the host some
tenths of a millisecond, so that pieces of work should take some milliseconds.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from kdist.parallel.schedule import TimedWork, Work
from kdist.training.beside import beside_inputs

_recorder: "Timeline | None" = None


class Timeline:
    """Times of pieces of work, by replica and step."""

    def __init__(self):
        self._times = collections.defaultdict(list)

    def on(self, replica: int) -> Callable:
        """What takes a replica's time stamps.

        It is called, where a step is traced, with a piece of work, whether it ends, and the tensors
        that are there by then; it gives a tensor that is there when the time is taken.
        """
        return functools.partial(self._stamp, replica)

    def steps(self, replica: int = 0) -> list[list[TimedWork]]:
        """The work of each step that has run, in the order of its starts.

        Args:
            replica: its number in the job.
        """
        works = {work for mine, work, _ in self._times if mine == replica}
        columns = [
            [
                TimedWork(work, start, end)
                for start, end in zip(
                    self._times[replica, work, False],
                    self._times[replica, work, True],
                    strict=False,  # of a step that has failed, the ends are missing
                )
            ]
            for work in works
        ]
        return [sorted(step, key=lambda timed: timed.start) for step in zip(*columns, strict=False)]

    def _stamp(self, replica, work: Work, is_end: bool, tensors):
        def note(*_):
            self._times[replica, work, is_end].append(time.perf_counter())
            return np.float32(0.0)

        flat = [t for t in tf.nest.flatten(tensors, expand_composites=True) if t is not None]
        with beside_inputs():  # of constants alone, TensorFlow would compute it beforehand
            some = [tf.reshape(tensor, [-1])[:1] for tensor in flat]
        with tf.device("CPU:0"), tf.control_dependencies(flat):
            stamp = tf.numpy_function(note, some, tf.float32, stateful=False)
        stamp.set_shape([])
        return stamp


def current() -> "Timeline | None":
    """What steps that are traced now shall write to."""
    return _recorder


@contextlib.contextmanager
def recorded_timeline() -> Iterator[Timeline]:
    """Steps that are traced meanwhile note, whenever they run, when each piece of work is done."""
    global _recorder
    before, _recorder = _recorder, Timeline()
    try:
        yield _recorder
    finally:
        _recorder = before
