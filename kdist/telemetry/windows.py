"""A training in windows of some seconds, each with its figures.

windows = Windows(model, seconds=10)
windows.before_call()                 # of the step function
figures = windows.after_call(steps=4) # after it; those of a window that has just ended, or None
"""

import contextlib
import time
from typing import Any

import keras
import tensorflow as tf

from kdist.parallel.groups import GroupStrategy
from kdist.planner import find_gpu
from kdist.telemetry.flops import training_flops
from kdist.telemetry.profile import SampledProfiles
from kdist.telemetry.split_steps import SplitSteps, split_devices
from kdist.telemetry.step_times import StepTimes


class Windows:
    """Follows the clock of a model in training; of one without a clock there are no figures.

    Args:
        model: compiled; what it was given to train on has to be known by its first call.
        seconds: a window lasts so long, or until `figures` is asked for.
        profiles: whether some steps are profiled once in a while.
    """

    def __init__(self, model: keras.Model, seconds: float, profiles: bool = True):
        self._model, self._seconds = model, seconds
        self._clock = getattr(model, "clock", None)
        strategy = model.distribute_strategy
        flops, peak = _flops(model)
        self._times = StepTimes(
            getattr(model, "global_batch_size", None),
            strategy.num_replicas_in_sync,
            flops,
            peak,
            split_devices(strategy),
        )
        can_profile = self._clock is not None and _computes_here(strategy)
        self._profiles = SampledProfiles() if profiles and can_profile else None
        self._split = SplitSteps(model) if split_devices(strategy) else None
        self._since = time.perf_counter()

    def before_call(self):
        """To be called before each call of the step function."""
        if self._split:
            self._split.before_call()
        if self._profiles:
            self._profiles.begin()

    def after_call(self, steps: int) -> dict[str, Any] | None:
        """To be called after it; the figures of the window, if it ends here.

        Args:
            steps: that the call has made.
        """
        self._note_graphs()
        work = self._profiles.end(steps) if self._profiles else None
        if work is None and time.perf_counter() - self._since < self._seconds:
            return None
        return self.figures(work)

    def figures(self, work=None) -> dict[str, Any]:
        """Those of the window until now, which ends here; empty if there were no steps in it."""
        self._since = time.perf_counter()
        return self._times.window(self._clock.take(), work) if self._clock else {}

    def after_first_call(self):
        """In the place of `after_call`, after a call that traced and compiled: leaves that out."""
        self._note_graphs()
        self._since = time.perf_counter()
        if self._clock:
            self._clock.take()

    def together(self) -> dict[str, Any]:
        """The figures of all windows together; empty if there was none."""
        return self._times.together()

    def _note_graphs(self):
        if self._split:
            self._split.after_call()
            if self._profiles:
                self._profiles.placed = self._split.placed

    def crossing_bytes(self) -> dict[str, int] | None:
        """Of a split model, what a step sends from device to device; None for another model."""
        return self._split.crossing_bytes if self._split else None

    def end(self):
        """Ends what goes on besides."""
        if self._split:
            self._split.end()
        if self._profiles:
            self._profiles.stop()


def _computes_here(strategy):
    """Whether this process runs the steps, and a profile of it shows them."""
    elsewhere = tf.distribute.experimental.ParameterServerStrategy | tf.distribute.TPUStrategy
    return not isinstance(strategy, elsewhere)


def _flops(model):
    """(of an example, what all GPUs could do in a second); None where not known."""
    names = []
    with contextlib.suppress(RuntimeError, ValueError):
        names = [
            tf.config.experimental.get_device_details(gpu).get("device_name", "")
            for gpu in tf.config.list_physical_devices("GPU")
        ]
    gpu = find_gpu(names[0]) if names else None
    peak = gpu.peak_flops(model.dtype_policy.name) if gpu else None
    if peak is None:
        return None, None
    strategy = model.distribute_strategy
    devices = len(strategy.groups[0]) if isinstance(strategy, GroupStrategy) else 1
    return training_flops(model), peak * strategy.num_replicas_in_sync * devices
