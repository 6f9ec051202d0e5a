"""Writes what happens in training to the run directory, and measures how fast it goes."""

import os
import time

import keras

from kdist.run_directory import RunDirectory
from kdist.strategies import is_chief
from kdist.telemetry import JsonlWriter, NullWriter, Writer


class Telemetry(keras.callbacks.Callback):
    """Writes `metrics.jsonl`: a `train` line every so often, an `epoch` line after each epoch.

    Times are of training alone: from the beginning of an epoch to the end of its last step, without
    validation. The first call of the first epoch, in which TensorFlow traces and compiles the
    step, counts in `seconds_per_epoch` but not in `examples_per_second`.

    Args:
        run_directory: where to write; made if it is not there.
        every_seconds: time between two `train` lines. Logs are read from the devices only then.
            Defaults to 1.
        writer: takes the lines, on the chief, in the place of `metrics.jsonl`; whoever made it
            closes it. By default they go to the run directory alone.

    Attributes:
        epoch_seconds: the training time of each epoch.
        first_call_seconds: the time of the first call.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike | RunDirectory,
        every_seconds: float = 1.0,
        *,
        writer: Writer | None = None,
    ):
        super().__init__()
        if not isinstance(run_directory, RunDirectory):
            run_directory = RunDirectory(run_directory)
        self._run = run_directory
        self._every_seconds = every_seconds
        self._given_writer = writer
        self.epoch_seconds: list[float] = []
        self.first_call_seconds: float | None = None
        self._steps_done = 0
        self._steps_in_first_call = 0

    @property
    def seconds_per_epoch(self) -> float | None:
        """The mean training time of an epoch; None before the first has ended."""
        return sum(self.epoch_seconds) / len(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        """Examples trained on per second, after the first call; None where it can't be known."""
        steps = self._steps_done - self._steps_in_first_call
        batch = getattr(self.model, "global_batch_size", None)
        if not (self.epoch_seconds and steps and batch) or self.first_call_seconds is None:
            return None
        return steps * batch / (sum(self.epoch_seconds) - self.first_call_seconds)

    def on_train_begin(self, logs=None):
        self._writer = self._new_writer()
        self._step_at_epoch = int(self.model.optimizer.iterations.numpy())
        self._began = self._last_line = time.perf_counter()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1
        self._epoch_ended = None
        self._epoch_began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        steps = getattr(self.model, "steps_in_epoch", batch + 1)
        self._step = self._step_at_epoch + steps
        if self.first_call_seconds is None:
            self.first_call_seconds = now - self._epoch_began
            self._steps_in_first_call = steps
        if now - self._last_line >= self._every_seconds:
            self._last_line = now
            self._write("train", dict(logs))

    def on_test_begin(self, logs=None):
        self._end_training_part()

    def on_epoch_end(self, epoch, logs=None):
        self._end_training_part()
        seconds = self._epoch_ended - self._epoch_began
        self.epoch_seconds.append(seconds)
        steps = self._step - self._step_at_epoch
        self._steps_done += steps
        self._step_at_epoch = self._step
        examples = self._examples(steps)
        rate = examples / seconds if examples else None
        self._write(
            "epoch", {"epoch_seconds": seconds, "examples_per_second": rate, **(logs or {})}
        )

    def on_train_end(self, logs=None):
        if self._writer is not self._given_writer:
            self._writer.close()

    def _new_writer(self):
        """Of several workers only the chief writes."""
        if not is_chief(self.model.distribute_strategy):
            return NullWriter()
        if self._given_writer is not None:
            return self._given_writer
        self._run.path.mkdir(parents=True, exist_ok=True)
        return JsonlWriter(self._run.metrics)

    def _end_training_part(self):
        if self._epoch_ended is None:
            self._epoch_ended = time.perf_counter()

    def _examples(self, steps):
        batch = getattr(self.model, "global_batch_size", None)
        return steps * batch if batch else None

    def _staleness(self):
        """Under parameter servers: how old the weights were that steps computed with."""
        staleness = getattr(self.model, "staleness", None)
        if staleness is None or not staleness.steps:
            return {}
        return {"staleness_mean": staleness.mean, "staleness_largest": staleness.largest}

    def _write(self, kind, values):
        learning_rate = keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
        self._writer.write(
            {
                "kind": kind,
                "epoch": self._epoch,
                "step": self._step,
                "examples": self._examples(self._step),
                "seconds": time.perf_counter() - self._began,
                "learning_rate": float(learning_rate),
                **self._staleness(),
                **{name: _number(value) for name, value in values.items()},
            }
        )


def _number(value):
    return value if value is None else float(value)
