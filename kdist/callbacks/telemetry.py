"""Telemetry of a run: throughput, time per part of a step, and utilization of devices."""

import atexit
import dataclasses
import logging
import os
import time
from typing import Any

import keras

from kdist.run_directory import RunDirectory
from kdist.strategies import is_chief, num_workers, planned_workers
from kdist.telemetry.devices.collector import Collector, collector_of
from kdist.telemetry.facts import shares_cores, training_config, training_summary
from kdist.telemetry.samples import Samples
from kdist.telemetry.steps.verdict import DeviceMeans, is_long_enough, verdict
from kdist.telemetry.steps.windows import TimingWindows, WindowMeans, running_means
from kdist.telemetry.writers import NullWriter, Writer, create_writer, write_results
from kdist.telemetry.writers.run_directory import Axes, last_values, note_largest
from kdist.training.optimizers import counter_of
from kdist.training.state import training_state_of

_logger = logging.getLogger(__name__)


class Telemetry(keras.callbacks.Callback):
    """Records a whole run: configuration, curves, devices, summary, verdict, and a report page.

    `config.json` gets the model, optimizer, strategy, batch, versions, and commit.

    `metrics.jsonl` gets periodic `train` lines, an `epoch` line per epoch, and a `timing` line per
    window. A `train` line has the mean of each loss and metric since the line before. An `epoch`
    line has Keras's logs. A `timing` line has examples per second, percentiles of the step time,
    and the fractions of a step for input, callbacks, telemetry, and the rest. Occasional profiles
    divide the rest into computation and gradient reduction.

    `devices.jsonl` gets the utilization of GPUs, cores, disks, network, and processes of all hosts.
    `summary.json` gets the results and the verdict, which names the bottleneck. `report.html` shows
    all of this.

    Times cover training only, from the start of an epoch to the end of its last step, without
    validation. The first call of the first epoch, which compiles the step, counts in
    `seconds_per_epoch` only.

    A further `fit` with the same directory continues its axes. For a new run, use another one.

    Args:
        run_directory: the run directory; created if missing.
        every_seconds: seconds between two `train` lines, the only times at which logs are read
            from the devices. Defaults to 1.
        window_seconds: length of the window of a `timing` line, in seconds. Defaults to 10.
        device_seconds: seconds between two samples of the devices, or None for no samples.
            Defaults to 5.
        profiles: whether to profile some steps, which takes at most 0.4 % of the time. Defaults to
            True.
        writer: a `kdist.telemetry.Writer` that receives the configuration and the records. Its
            creator writes the summary and the report, and closes it. Defaults to a writer of the
            files in `run_directory`.
        wandb_mode: Weights & Biases, in addition to the files: "auto", "online", "offline", or
            "off"; see `kdist.telemetry.create_writer`, which has more options. Defaults to "off".
        tensorboard: whether to write event files for TensorBoard as well. Defaults to False.
        report: whether to write the report page when training ends. Defaults to True.
        samples: `kdist.telemetry.Samples`, a few examples whose predictions become a table in W&B
            after each epoch. All workers predict them together, and the chief writes. Defaults to
            None.

    Attributes:
        epoch_seconds: seconds of training of each epoch.
        first_call_seconds: seconds of the first call, which compiles the step.

    Raises:
        ValueError: `writer` is given together with `wandb_mode` or `tensorboard`.

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
        wandb_mode: str = "off",
        tensorboard: bool = False,
        report: bool = True,
        samples: Samples | None = None,
    ):
        super().__init__()
        if writer is not None and (tensorboard or wandb_mode != "off"):
            raise ValueError(
                "Telemetry(writer=…) writes to that writer only; pass wandb_mode and tensorboard "
                "to kdist.telemetry.create_writer, which creates it"
            )
        if not isinstance(run_directory, RunDirectory):
            run_directory = RunDirectory(run_directory)
        self._run = run_directory
        self._every_seconds, self._window_seconds = every_seconds, window_seconds
        self._device_seconds = device_seconds
        self._given_writer = writer
        self._writer_options = {"wandb_mode": wandb_mode, "tensorboard": tensorboard}
        self._profiles = profiles
        self._report = report
        self._samples = samples
        self.epoch_seconds: list[float] = []
        self.first_call_seconds: float | None = None
        self._windows: TimingWindows | None = None
        self._writer: Writer = NullWriter()
        self._collector: Collector | None = None
        self._means = WindowMeans()
        self._devices = DeviceMeans()
        self._whole_seconds = self._useful_before = 0.0
        self._epoch_ended: float | None = 0.0  # of training; None while steps run
        self._axes = Axes()
        self._last: dict[str, Any] = {}  # largest values on the axes
        self._results: dict[str, Any] = {}  # logs of the last epoch

    @property
    def seconds_per_epoch(self) -> float | None:
        """Mean seconds of training per epoch; None before the first epoch has ended."""
        return sum(self.epoch_seconds) / len(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        """Training examples per second after the first call; None if unknown."""
        return self._timing().get("examples_per_second")

    def summary(self) -> dict[str, Any]:
        """Returns the results for `summary.json`, and facts about the training.

        `goodput` is the fraction of the time since the start in which useful steps ran, as opposed
        to compilation, validation, and saving. For a resumed run, the time between its processes
        and repeated steps are lost as well.
        """
        timing = self._timing()
        useful, whole = self._useful_seconds(), self._whole_seconds
        return {
            **(training_summary(self.model, num_workers(self._strategy)) if self.model else {}),
            "epochs": len(self.epoch_seconds),
            **self._results,
            "seconds_per_epoch": self.seconds_per_epoch,
            "first_call_seconds": self.first_call_seconds,
            "examples_per_second": self.examples_per_second,
            "verdict": verdict(timing, self._devices.gpus(), self._shares_cores()),
            "measured_steps": timing.get("window_steps"),
            "measured_seconds": timing.get("window_seconds"),
            "measured_enough": is_long_enough(timing),
            "breakdown": _breakdown(timing),
            "goodput": useful / whole if useful and whole else None,
            "model_flops_utilization": timing.get("model_flops_utilization"),
            **{name: timing[name] for name in timing if name.startswith("step_seconds_")},
            **self._communication(timing),
            "total_seconds": whole or None,
        }

    def _shares_cores(self):
        return self.model is not None and shares_cores(self._strategy)

    @property
    def _strategy(self):
        return self.model.distribute_strategy

    def _communication(self, timing):
        """Returns what devices of split models or sharded replicas send, and how busy they are."""
        crossing = self._windows.crossing_bytes() if self._windows else None
        found = {} if crossing is None else {"crossing_bytes_per_step": crossing}
        return found | {n: timing[n] for n in ("device_busy_share", "bubble_share") if n in timing}

    def on_train_begin(self, logs=None):
        strategy = self._strategy
        self._writes = self._given_writer is None and is_chief(strategy)
        self._has_begun = self._is_resumed = False
        self._step = None
        self._began = self._last_line = time.perf_counter()
        self._began_at = time.time()
        self._epoch_ended, self._epoch_so_far = self._began, 0.0
        self._useful_before = self._useful_seconds()
        self._windows = TimingWindows(self.model, self._window_seconds, self._profiles)
        self._means = WindowMeans(running_means(self.model))
        self._collector = collector_of(strategy)
        self._writer = self._given_writer or self._own_writer()
        self._writer.write_config(training_config(self.model, num_workers(strategy), self.params))

    def _own_writer(self):
        self._close()  # that of a training of Keras's trainer that was interrupted
        if not self._writes:
            return NullWriter()
        writer = create_writer(self._run, is_chief=True, **self._writer_options)
        atexit.register(writer.close)  # Keras's own trainer does not call `on_train_exit`.
        return writer

    def _close(self):
        """Closes a writer of its own."""
        if self._given_writer is None:
            atexit.unregister(self._writer.close)
            self._writer.close()

    def on_epoch_begin(self, epoch, logs=None):
        if not self._has_begun:
            self._begin(epoch)
        self._epoch = epoch + 1
        self._epoch_ended = None
        if not self._first_step_here:
            self._means.begin_epoch()
        self._epoch_began = time.perf_counter()

    def _begin(self, epoch):
        """Begins the first epoch, when all callbacks have restored their state."""
        self._has_begun = True
        # The optimizer counts its own steps, which those of a program make as they like. Older
        # checkpoints have no other count.
        if self._step is None:
            self._step = int(counter_of(self.model.optimizer).numpy())
        # Not 0 if another process ran the first steps of the epoch.
        self._first_step_here = self._steps_in_epoch(-1)
        self._step_at_epoch = self._step - self._first_step_here
        if self._is_resumed:
            if self._writes:
                self._run.discard_after(self._step + self._axes.steps)
        else:
            self._continue_axes(epoch)
        if is_chief(self._strategy):
            self._record_workers()
        if self._device_seconds is not None and is_chief(self._strategy):
            began = self._began_at - self._axes.seconds
            self._collector.start(self._write_device, self._device_seconds, began)

    def _record_workers(self):
        """Records how many of the planned workers train from here on, if some may be missing."""
        planned, workers = planned_workers(self._strategy), num_workers(self._strategy)
        if planned is None:
            return
        try:
            recorded = self._run.record_workers(self._step + self._axes.steps, workers, planned)
        except (OSError, ValueError) as error:
            _logger.warning("the number of workers is not in %s: %s", self._run.config, error)
            return
        self._writer.write_config(recorded)

    def _continue_axes(self, epoch):
        """Continues after the records of an earlier `fit` in this directory."""
        last = self._last or (last_values(self._run.metrics) if self._writes else {})
        if not last:
            return
        self._axes = Axes.after(last, epoch, self._step, self._global_batch)
        if self._axes.steps and not self._last:
            _logger.info(
                "%s holds a run of %d steps; this training continues its axes. For a new run, use "
                "another directory",
                self._run.path,
                last["step"],
            )

    def get_state(self):
        """Returns the state for a resumed run: see `kdist.callbacks.Checkpoint`."""
        now = time.perf_counter()
        here = now - self._began
        epoch_here = now - self._epoch_began if self._epoch_ended is None else 0.0
        return {
            "seconds": here + self._axes.seconds,
            "useful_seconds": self._useful_seconds(),
            "whole_seconds": here + self._whole_seconds,
            "epoch_seconds": self.epoch_seconds,
            "epoch_so_far": epoch_here + self._epoch_so_far,
            "time": time.time(),
            "step": self._step,
            "axes": dataclasses.asdict(self._axes),
            "window": self._means.get_state(),
            "results": self._results,
        }

    def set_state(self, state):
        """Restores the clock of the process that called `get_state`."""
        self._is_resumed = True
        self.epoch_seconds, self._epoch_so_far = state["epoch_seconds"], state["epoch_so_far"]
        self._useful_before = state["useful_seconds"]
        self._whole_seconds = state["whole_seconds"] + time.time() - state["time"]
        # Checkpoints of older versions have no offsets and no window.
        self._axes = dataclasses.replace(Axes(**state.get("axes", {})), seconds=state["seconds"])
        self._step = state.get("step")
        self._results = state.get("results", {})
        if "window" in state:
            self._means.set_state(state["window"])

    def on_train_batch_begin(self, batch, logs=None):
        began = time.perf_counter()
        self._windows.before_call()
        self._windows.note_own(time.perf_counter() - began)

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
            self._means.add(logs, self._step - self._step_at_epoch)
            self._write("train", self._means.take())
        if figures:
            self._write("timing", figures)
        self._windows.note_own(time.perf_counter() - now)

    def on_test_begin(self, logs=None):
        self._end_training_part()

    def on_epoch_end(self, epoch, logs=None):
        self._end_training_part()
        here = self._epoch_ended - self._epoch_began
        seconds, self._epoch_so_far = here + self._epoch_so_far, 0.0
        self.epoch_seconds.append(seconds)
        steps = self._step - self._step_at_epoch - self._first_step_here
        logs = {name: _plain(value) for name, value in (logs or {}).items()}
        validation = {name: logs[name] for name in logs if name.startswith("val_")}
        training = {name: logs[name] for name in logs if name not in validation}
        self._means.add(training, self._step - self._step_at_epoch)
        self._results = logs
        self._step_at_epoch, self._first_step_here = self._step, 0
        examples = steps * self._global_batch if self._global_batch else None
        rate = examples / here if examples else None
        self._write("epoch", {"epoch_seconds": seconds, "examples_per_second": rate, **logs})
        if self._samples is not None:
            self._write_samples()

    def _write_samples(self):
        outputs = self.model.predict(self._samples.x, verbose=0)  # collective
        try:
            self._writer.write_samples({**self._axes_now(), "rows": self._samples.rows(outputs)})
        except ValueError as error:
            _logger.warning("no table of samples: %s", error)
            self._samples = None

    def on_train_end(self, logs=None):
        if self._has_begun and self._means.steps:
            self._write("train", self._means.take())
        self._whole_seconds += time.perf_counter() - self._began
        self._windows.end()
        self._collector.stop()
        # A finished training that is started again has no epochs left, and keeps its summary.
        if self._writes and (self._has_begun or not self._run.summary.exists()):
            self._write_results()
        self.on_train_exit()

    def on_train_exit(self):
        """Stops sampling and writing, also if `fit` fails or is interrupted, as in a notebook."""
        if self._collector is not None:
            self._collector.stop()
        self._close()

    def _write_results(self):
        summary = self.summary()
        for finding in summary["verdict"]:
            _logger.info("%s", finding)
        try:
            page = write_results(self._run, self._writer, summary, self._report)
        except FileNotFoundError as error:
            _logger.warning("%s", error)
            return
        if page:
            _logger.info("report: %s", page)

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
        if state:
            return state.steps_in_epoch
        # Keras counts a group of steps that the end of an epoch cuts short as a full one.
        return min(batch + 1, self.params.get("steps") or batch + 1)

    @property
    def _global_batch(self):
        """Examples per step; None if they are unknown."""
        return getattr(training_state_of(self.model), "global_batch_size", None)

    def _examples(self):
        """Returns the examples seen in the run; None if the batch is unknown."""
        batch = self._global_batch
        return self._step * batch + self._axes.examples if batch else None

    def _staleness(self):
        """Returns the staleness of the weights under parameter servers; otherwise empty."""
        staleness = getattr(training_state_of(self.model), "staleness", None)
        if staleness is None or not staleness.steps:
            return {}
        return {"staleness_mean": staleness.mean, "staleness_largest": staleness.largest}

    def _axes_now(self):
        return {
            "epoch": self._epoch + self._axes.epochs,
            "step": self._step + self._axes.steps,
            "examples": self._examples(),
            "seconds": time.perf_counter() - self._began + self._axes.seconds,
        }

    def _write_device(self, record):
        self._devices.add(record)
        self._writer.write_device(record)

    def _write(self, kind, values):
        # A combination of several optimizers has no common rate.
        rate = getattr(self.model.optimizer, "learning_rate", None)
        record = {
            "kind": kind,
            **self._axes_now(),
            "learning_rate": None if rate is None else float(keras.ops.convert_to_numpy(rate)),
            **self._staleness(),
            **{name: _plain(value) for name, value in values.items()},
        }
        note_largest(self._last, record)
        self._writer.write(record)


def _breakdown(timing):
    """Returns {part: fraction of a step}; the fractions add up to 1."""
    names = {
        "input": "input_share",
        "callbacks": "callback_share",
        "telemetry": "telemetry_share",
    }
    known = timing.get("compute_share") is not None
    parts = {"compute": "compute_share", "reduce": "reduce_share"} if known else {}
    names |= parts or {"step": "step_share"}
    return {part: timing[name] for part, name in names.items() if timing.get(name) is not None}


def _plain(value):
    return value if value is None or isinstance(value, list) else float(value)
