"""Measures a training, inside of it: how fast it goes, where the time goes, what devices do."""

import os
import time
from typing import Any

import keras

from kdist.run_directory import RunDirectory
from kdist.strategies import is_chief
from kdist.telemetry import Writer, create_writer
from kdist.telemetry.collector import collector_of
from kdist.telemetry.means import DeviceMeans
from kdist.telemetry.verdict import verdict
from kdist.telemetry.windows import Windows


class Telemetry(keras.callbacks.Callback):
    """Writes `metrics.jsonl` and `devices.jsonl` of a run, and says what slows the training down.

    In `metrics.jsonl` there is a `train` line every so often, an `epoch` line after each epoch, and
    a `timing` line for each window: examples a second, the share of a step that goes to waiting
    for input, to callbacks and to the rest, percentiles of the seconds a step. Once in a while
    a profile of some steps tells the rest apart: computing, and adding gradients up.
    `devices.jsonl` holds what the GPUs, cores, disks, network and processes of all hosts do.

    Times are of training alone: from the beginning of an epoch to the end of its last step, without
    validation. The first call of the first epoch, in which TensorFlow traces and compiles the
    step, counts in `seconds_per_epoch`, and in nothing else.

    Args:
        run_directory: where to write; made if it is not there.
        every_seconds: time between two `train` lines. Logs are read from the devices only then.
            Defaults to 1.
        window_seconds: time that a `timing` line is about. Defaults to 10.
        device_seconds: time between two samples of the devices; None samples none. Defaults to 5.
        profiles: whether some steps are profiled once in a while, at a cost of 0.4 % at most.
        writer: gets the records in the place of the files of `run_directory`, and is closed by
            whoever made it. By default the run directory alone is written to.

    Attributes:
        epoch_seconds: the training time of each epoch.
        first_call_seconds: the time of the first call.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike | RunDirectory,
        every_seconds: float = 1.0,
        *,
        window_seconds: float = 10.0,
        device_seconds: float | None = 5.0,
        profiles: bool = True,
        writer: Writer | None = None,
    ):
        super().__init__()
        if not isinstance(run_directory, RunDirectory):
            run_directory = RunDirectory(run_directory)
        self._run = run_directory
        self._every_seconds, self._window_seconds = every_seconds, window_seconds
        self._device_seconds = device_seconds
        self._given_writer = writer
        self._profiles = profiles
        self.epoch_seconds: list[float] = []
        self.first_call_seconds: float | None = None
        self._windows: Windows | None = None
        self._devices = DeviceMeans()
        self._whole_seconds = 0.0
        # Of the processes that worked at the run before this one.
        self._seconds_before = self._useful_before = 0.0

    @property
    def seconds_per_epoch(self) -> float | None:
        """The mean training time of an epoch; None before the first has ended."""
        return sum(self.epoch_seconds) / len(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        """Examples trained on per second, after the first call; None where it can't be known."""
        return self._timing().get("examples_per_second")

    def summary(self) -> dict[str, Any]:
        """What was measured, for `summary.json`.

        `goodput` is the share of the time since training began in which steps were made that
        count: not compiling, validating, or saving. Of a run that went on after a kill, the time
        between, and the steps that were made again, are lost as well.
        """
        timing = self._timing()
        useful, whole = self._useful_seconds(), self._whole_seconds
        return {
            "seconds_per_epoch": self.seconds_per_epoch,
            "first_call_seconds": self.first_call_seconds,
            "examples_per_second": self.examples_per_second,
            "verdict": verdict(timing, self._devices.gpus()),
            "breakdown": _breakdown(timing),
            "goodput": useful / whole if useful and whole else None,
            "model_flops_utilization": timing.get("model_flops_utilization"),
            **{name: timing[name] for name in timing if name.startswith("step_seconds_")},
            **self._of_split_model(timing),
        }

    def _of_split_model(self, timing):
        """What each device did, and sent; nothing of a model that is not split."""
        crossing = self._windows.crossing_bytes() if self._windows else None
        if crossing is None and "device_busy_share" not in timing:
            return {}
        return {
            "device_busy_share": timing.get("device_busy_share"),
            "bubble_share": timing.get("bubble_share"),
            "crossing_bytes_per_step": crossing,
        }

    def on_train_begin(self, logs=None):
        strategy = self.model.distribute_strategy
        self._writer = self._given_writer or create_writer(self._run, is_chief=is_chief(strategy))
        self._step = int(self.model.optimizer.iterations.numpy())
        # Other than 0 where another process did an epoch's first steps.
        self._first_step_here = self._steps_in_epoch(-1)
        self._step_at_epoch = self._step - self._first_step_here
        self._began = self._last_line = time.perf_counter()
        self._epoch_ended, self._epoch_so_far = self._began, 0.0
        self._windows = Windows(self.model, self._window_seconds, self._profiles)
        self._collector = collector_of(strategy)
        if self._device_seconds is not None and is_chief(strategy):
            self._collector.start(self._write_device, self._device_seconds)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1
        self._epoch_ended = None
        self._epoch_began = time.perf_counter()

    def get_state(self):
        """What another process needs to go on: see `kdist.callbacks.Checkpoint`."""
        now = time.perf_counter()
        here = now - self._began
        epoch_here = now - self._epoch_began if self._epoch_ended is None else 0.0
        return {
            "seconds": here + self._seconds_before,
            "useful_seconds": self._useful_seconds(),
            "whole_seconds": here + self._whole_seconds,
            "epoch_seconds": self.epoch_seconds,
            "epoch_so_far": epoch_here + self._epoch_so_far,
            "time": time.time(),
        }

    def set_state(self, state):
        """Goes on with the clock of the process that `get_state` was called in."""
        self.epoch_seconds, self._epoch_so_far = state["epoch_seconds"], state["epoch_so_far"]
        self._seconds_before, self._useful_before = state["seconds"], state["useful_seconds"]
        self._whole_seconds = state["whole_seconds"] + time.time() - state["time"]

    def on_train_batch_begin(self, batch, logs=None):
        self._windows.before_call()

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        before, self._step = self._step, self._step_at_epoch + self._steps_in_epoch(batch)
        figures = None
        if self.first_call_seconds is None:
            self.first_call_seconds = now - self._epoch_began
            self._windows.after_first_call()
        else:
            figures = self._windows.after_call(self._step - before)
        if now - self._last_line >= self._every_seconds:
            self._last_line = now
            self._write("train", dict(logs))
        if figures:
            self._write("timing", figures)

    def on_test_begin(self, logs=None):
        self._end_training_part()

    def on_epoch_end(self, epoch, logs=None):
        self._end_training_part()
        here = self._epoch_ended - self._epoch_began
        seconds, self._epoch_so_far = here + self._epoch_so_far, 0.0
        self.epoch_seconds.append(seconds)
        steps = self._step - self._step_at_epoch - self._first_step_here
        self._step_at_epoch, self._first_step_here = self._step, 0
        examples = self._examples(steps)
        rate = examples / here if examples else None
        self._write(
            "epoch", {"epoch_seconds": seconds, "examples_per_second": rate, **(logs or {})}
        )

    def on_train_end(self, logs=None):
        self._whole_seconds += time.perf_counter() - self._began
        self._windows.end()
        self._collector.stop()
        if self._given_writer is None:
            self._writer.close()

    def _end_training_part(self):
        if self._epoch_ended is None:
            self._epoch_ended = time.perf_counter()
            if figures := self._windows.figures():
                self._write("timing", figures)

    def _useful_seconds(self):
        return self._useful_before + (self._timing().get("window_seconds") or 0.0)

    def _timing(self):
        """The figures of the whole training; empty before there are any."""
        return self._windows.together() if self._windows else {}

    def _steps_in_epoch(self, batch):
        return getattr(self.model, "steps_in_epoch", batch + 1)

    def _examples(self, steps):
        batch = getattr(self.model, "global_batch_size", None)
        return steps * batch if batch else None

    def _staleness(self):
        """Under parameter servers: how old the weights were that steps computed with."""
        staleness = getattr(self.model, "staleness", None)
        if staleness is None or not staleness.steps:
            return {}
        return {"staleness_mean": staleness.mean, "staleness_largest": staleness.largest}

    def _write_device(self, record):
        self._devices.note(record)
        self._writer.write_device(record)

    def _write(self, kind, values):
        # Several optimizers in one have no common rate.
        rate = getattr(self.model.optimizer, "learning_rate", None)
        self._writer.write(
            {
                "kind": kind,
                "epoch": self._epoch,
                "step": self._step,
                "examples": self._examples(self._step),
                "seconds": time.perf_counter() - self._began + self._seconds_before,
                "learning_rate": None if rate is None else float(keras.ops.convert_to_numpy(rate)),
                **self._staleness(),
                **{name: _plain(value) for name, value in values.items()},
            }
        )


def _breakdown(timing):
    """Which share of a step goes where; they add up to 1."""
    names = {"input": "input_share", "callbacks": "callback_share"}
    known = timing.get("compute_share") is not None
    parts = {"compute": "compute_share", "reduce": "reduce_share"} if known else {}
    names |= parts or {"step": "step_share"}
    return {part: timing[name] for part, name in names.items() if timing.get(name) is not None}


def _plain(value):
    return value if value is None or isinstance(value, list) else float(value)
