"""Short profiles now and then, so seldom that nobody notices.

profiles = SampledProfiles()
profiles.begin()                  # before a call of the step function
work = profiles.end(steps=4)      # after it: a Work, when a profile has just ended
"""

import shutil
import tempfile
import time
from collections.abc import Mapping

import tensorflow as tf

from kdist.telemetry.trace import Work, read_trace

# Profiles take no more than this share of the time of training, reading them included.
_LARGEST_SHARE = 0.004
# While it is being made, a profile slows steps down by about half.
_SLOWDOWN = 0.5
_SHORTEST_SECONDS = 0.2


class SampledProfiles:
    """Profiles some steps whenever enough time has passed since the last one.

    Args:
        first_after_seconds: of training; by then everything is compiled. Defaults to 30.

    Attributes:
        placed: of a split model, the device of each of its operations.
    """

    placed: Mapping[str, str] | None = None

    def __init__(self, first_after_seconds: float = 30.0):
        self._due = time.perf_counter() + first_after_seconds
        self._directory: str | None = None
        self._steps = 0

    def begin(self):
        """Starts a profile if one is due; to be called between steps."""
        if self._directory is None and time.perf_counter() >= self._due:
            self._began = time.perf_counter()
            self._directory = tempfile.mkdtemp(prefix="kdist-profile-")
            self._steps, self._seconds = 0, 0.0
            try:
                tf.profiler.experimental.start(self._directory)
            except tf.errors.AlreadyExistsError:  # somebody else profiles; theirs shall be whole
                self._forget()
            self._started = time.perf_counter()

    def end(self, steps: int) -> Work | None:
        """Ends the profile that runs, when it has seen enough; gives what it has shown.

        Args:
            steps: made since `begin`.
        """
        if self._directory is None:
            return None
        self._steps += steps
        steps_took = time.perf_counter() - self._started
        if steps_took < _SHORTEST_SECONDS:
            return None
        return self._ended(steps_took)

    def stop(self):
        """Ends a profile that runs, without reading it."""
        if self._directory is not None:
            tf.profiler.experimental.stop(save=False)
            self._forget()

    def _ended(self, steps_took):
        try:
            tf.profiler.experimental.stop()
            return read_trace(self._directory, self._steps, self.placed)
        except (tf.errors.OpError, OSError):  # a full disk, or ended by somebody else
            return None
        finally:
            now = time.perf_counter()
            cost = now - self._began - steps_took + steps_took * _SLOWDOWN
            self._due = now + cost / _LARGEST_SHARE
            self._forget()

    def _forget(self):
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
        self._due = max(self._due, time.perf_counter() + 1.0)
