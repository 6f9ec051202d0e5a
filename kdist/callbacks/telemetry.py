"""Telemetry of a run: throughput, time per part of a step, and utilization of devices."""

import os
import time
from typing import Any

import keras

from kdist.run_directory import RunDirectory
from kdist.strategies import is_chief
from kdist.telemetry.devices.collector import collector_of
from kdist.telemetry.steps.verdict import DeviceMeans, verdict
from kdist.telemetry.steps.windows import TimingWindows
from kdist.telemetry.writers.base import Writer, create_writer
from kdist.training.state import training_state_of


class Telemetry(keras.callbacks.Callback):
    """Writes `metrics.jsonl` and `devices.jsonl` of a run, and diagnoses its bottleneck.

    `metrics.jsonl` gets periodic `train` lines, an `epoch` line per epoch, and a `timing` line per
    window: examples per second, percentiles of the step time, and the fractions of a step for
    input, callbacks, and the rest. Occasional profiles divide the rest into computation and
    gradient reduction. `devices.jsonl` gets the utilization of GPUs, cores, disks, network, and
    processes of all hosts.

    Times cover training only, from the start of an epoch to the end of its last step, without
    validation. The first call of the first epoch, which compiles the step, counts in
    `seconds_per_epoch` only.

    Args:
        run_directory: the run directory; created if missing.
        every_seconds: seconds between two `train` lines, the only times at which logs are read
            from the devices. Defaults to 1.
        window_seconds: length of the window of a `timing` line, in seconds. Defaults to 10.
        device_seconds: seconds between two samples of the devices, or None for no samples.
            Defaults to 5.
        profiles: whether to profile some steps, which takes at most 0.4 % of the time. Defaults to
            True.
        writer: a `kdist.telemetry.Writer` that receives the records; its creator closes it.
            Defaults to a writer of the files in `run_directory`.

    Attributes:
        epoch_seconds: seconds of training of each epoch.
        first_call_seconds: seconds of the first call, which compiles the step.

    Example:

        telemetry = kdist.callbacks.Telemetry("runs/first")
        model.fit(train, epochs=3, callbacks=[telemetry])
        print(telemetry.summary()["verdict"])
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
        self._windows: TimingWindows | None = None
        self._devices = DeviceMeans()
        self._whole_seconds = 0.0
        # Seconds of earlier processes of this run, before a restart.
        self._seconds_before = self._useful_before = 0.0

    @property
    def seconds_per_epoch(self) -> float | None:
        """Mean seconds of training per epoch; None before the first epoch has ended."""
        return sum(self.epoch_seconds) / len(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        """Training examples per second after the first call; None if unknown."""
        return self._timing().get("examples_per_second")

    def summary(self) -> dict[str, Any]:
        """Returns the results for `summary.json`.

        `goodput` is the fraction of the time since the start in which useful steps ran, as opposed
        to compilation, validation, and saving. For a resumed run, the time between its processes
        and repeated steps are lost as well.
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
            **self._split_model_figures(timing),
        }

    def _split_model_figures(self, timing):
        """Returns utilization and communication of a split model; empty for other models."""
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
        # Not 0 if another process ran the first steps of the epoch.
        self._first_step_here = self._steps_in_epoch(-1)
        self._step_at_epoch = self._step - self._first_step_here
        self._began = self._last_line = time.perf_counter()
        self._epoch_ended, self._epoch_so_far = self._began, 0.0
        self._windows = TimingWindows(self.model, self._window_seconds, self._profiles)
        self._collector = collector_of(strategy)
        if self._device_seconds is not None and is_chief(strategy):
            self._collector.start(self._write_device, self._device_seconds)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1
        self._epoch_ended = None
        self._epoch_began = time.perf_counter()

    def get_state(self):
        """Returns the state for a resumed run: see `kdist.callbacks.Checkpoint`."""
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
        """Restores the clock of the process that called `get_state`."""
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
            if figures := self._windows.metrics():
                self._write("timing", figures)

    def _useful_seconds(self):
        return self._useful_before + (self._timing().get("window_seconds") or 0.0)

    def _timing(self):
        """Returns the figures of the whole training; empty before the first window."""
        return self._windows.total() if self._windows else {}

    def _steps_in_epoch(self, batch):
        state = training_state_of(self.model)
        return state.steps_in_epoch if state else batch + 1

    def _examples(self, steps):
        batch = getattr(training_state_of(self.model), "global_batch_size", None)
        return steps * batch if batch else None

    def _staleness(self):
        """Returns the staleness of the weights under parameter servers; otherwise empty."""
        staleness = getattr(training_state_of(self.model), "staleness", None)
        if staleness is None or not staleness.steps:
            return {}
        return {"staleness_mean": staleness.mean, "staleness_largest": staleness.largest}

    def _write_device(self, record):
        self._devices.add(record)
        self._writer.write_device(record)

    def _write(self, kind, values):
        # A combination of several optimizers has no common rate.
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
    """Returns {part: fraction of a step}; the fractions add up to 1."""
    names = {"input": "input_share", "callbacks": "callback_share"}
    known = timing.get("compute_share") is not None
    parts = {"compute": "compute_share", "reduce": "reduce_share"} if known else {}
    names |= parts or {"step": "step_share"}
    return {part: timing[name] for part, name in names.items() if timing.get(name) is not None}


def _plain(value):
    return value if value is None or isinstance(value, list) else float(value)
