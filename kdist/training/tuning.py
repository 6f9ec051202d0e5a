"""`steps_per_execution="auto"`: the first steps of a training show how many to run in a call.

tuner = GroupTuner()
while not tuner.is_done:
    run(tuner.length)                      # so many steps in one call
    tuner.note(tuner.length, seconds)
tuner.length                               # what is best from now on
"""

import statistics

# Lengths are doubled as long as steps get this much faster, and a call stays short enough for a
# progress bar, Ctrl-C and callbacks.
_WORTH_IT = 0.95
_LONGEST_CALL_SECONDS = 0.5
_CALLS_PER_LENGTH = 4
_LARGEST = 128


class GroupTuner:
    """Doubles the number of steps in a call as long as that makes steps faster.

    Attributes:
        length: steps to run in the next call.
        is_done: `length` will not change any more.
        step_seconds: length -> median seconds a step, as far as measured.
    """

    def __init__(self):
        self.length = 1
        self.is_done = False
        self.step_seconds = {}
        self._calls = []

    def note(self, steps, seconds):
        """Takes the time of one call of `steps` steps.

        The first call of each length is left out: it may compile. So is one that was cut short at
        the end of an epoch.
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
        if before is not None and now > before * _WORTH_IT:
            self._settle(length // 2)
        elif length == _LARGEST or now * length * 2 > _LONGEST_CALL_SECONDS:
            self._settle(length)
        else:
            self.length = length * 2

    def _settle(self, length):
        self.length, self.is_done = length, True

    def __str__(self):
        """What was found, for a person."""
        chosen = f"steps_per_execution={self.length}"
        times = ", ".join(f"{k}: {s * 1000:.2f}" for k, s in self.step_seconds.items())
        return f"{chosen} (milliseconds a step by steps a call: {times})"
