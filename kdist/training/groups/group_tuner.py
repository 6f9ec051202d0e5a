"""Length of a step group for `steps_per_execution="auto"`, from the first steps of a training."""

import statistics

# The tuner doubles the length while a step gets at least this much faster and a call stays short
# enough for a progress bar, Ctrl-C, and callbacks.
_REQUIRED_RATIO = 0.95
_MAX_CALL_SECONDS = 0.5
_CALLS_PER_LENGTH = 4
_MAX_LENGTH = 128


class GroupTuner:
    """Doubles the length of a step group while that makes a step faster.

        tuner = GroupTuner()
        while not tuner.is_done:
            run(tuner.length)                      # steps in one call
            tuner.note(tuner.length, seconds)

    Attributes:
        length: number of steps for the next call.
        is_done: `length` is final.
        step_seconds: dict that maps each measured length to the median seconds per step.
    """

    def __init__(self):
        self.length = 1
        self.is_done = False
        self.step_seconds = {}
        self._calls = []

    def note(self, steps, seconds):
        """Adds the time of one call of `steps` steps.

        The first call of each length may compile and is ignored, as is a shorter call at the end
        of an epoch.
        """
        if self.is_done or steps != self.length:
            return
        self._calls.append(seconds / steps)
        if len(self._calls) < _CALLS_PER_LENGTH:
            return
        self.step_seconds[self.length] = statistics.median(self._calls[1:])
        self._calls = []
        self._choose()

    def _choose(self):
        length, now = self.length, self.step_seconds[self.length]
        before = self.step_seconds.get(length // 2)
        if before is not None and now > before * _REQUIRED_RATIO:
            self._finish(length // 2)
        elif length == _MAX_LENGTH or now * length * 2 > _MAX_CALL_SECONDS:
            self._finish(length)
        else:
            self.length = length * 2

    def _finish(self, length):
        self.length, self.is_done = length, True

    def __str__(self):
        times = ", ".join(f"{k}: {s * 1000:.2f}" for k, s in self.step_seconds.items())
        return (
            f"steps_per_execution={self.length} (milliseconds per step, by steps per call: {times})"
        )
