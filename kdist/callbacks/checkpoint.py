"""Checkpoints within epochs, and exact resumption after a kill at any moment."""

import importlib.metadata
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import keras

from kdist.checkpoint import snapshot
from kdist.checkpoint.files import (
    FORMAT_VERSION,
    BackgroundWriter,
    CheckpointError,
    CheckpointFiles,
    open_checkpoint,
)
from kdist.cluster import heartbeat, notices
from kdist.exit_codes import SAVED
from kdist.log import discard_output_of_closed_terminal
from kdist.mirror.mirror import Mirror, fetched_checkpoint
from kdist.mirror.store import is_url
from kdist.run_directory import FileLock, checkpoint_step
from kdist.strategies import is_chief
from kdist.training.broadcast import read_on_chief
from kdist.training.scopes import is_multi_worker
from kdist.training.state import Position, training_state_of

_logger = logging.getLogger(__name__)

# Requests of a worker to all others. A sum over many workers keeps the two apart.
_SAVE, _STOP = 1, 1 << 32
# Values that the state of a checkpoint has, and the names in those that are objects.
_VALUES = ("replicas", "local_steps_done", "stop_training", "best")
_OBJECTS = {
    "position": [f for f in Position._fields if f not in Position._field_defaults],
    "generators": ("python", "numpy"),
    **dict.fromkeys(("facts", "logs", "callbacks"), ()),
}


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints, and resumes `fit` from the newest one.

    Run the same program again after it was killed: `fit` restores weights, optimizers, the loss
    scale, metrics of the running epoch, the position in the data, random number generators, and the
    state of Keras's callbacks. With data of `kdist.data` the result is bit-equal to that of an
    uninterrupted run.

    A checkpoint is written at the end of each epoch, before each validation, after `every_steps` or
    `every_minutes`, and on SIGTERM, SIGHUP (the terminal is closed), or SIGINT (Ctrl-C). A signal
    then ends training by `SystemExit` with code 143, or by `KeyboardInterrupt`; a second signal
    acts as without this callback. A preemption notice of GCE, AWS, or Azure is one SIGTERM.
    Training waits only until the weights are copied; a thread writes them. After a NaN or infinite
    loss no more checkpoints are written.

    The state of EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, SwapEMAWeights, and History is
    saved. A custom callback takes part by `get_state()`, which returns JSON-serializable state, and
    `set_state(state)`, called after `on_train_begin`.

    With several workers, each of them needs the callback, and all save at the same step. Only the
    chief accesses the directory. The number of replicas may change if the global batch is the same;
    results then differ by rounding.

    Args:
        directory: the directory of the checkpoints `step-…`; created if missing.
        every_steps: number of steps between checkpoints, rounded to calls with
            `steps_per_execution`. Defaults to None, no checkpoints by steps.
        every_minutes: minutes between checkpoints. Defaults to None, no checkpoints by time.
        keep: number of newest checkpoints to keep. Defaults to 3.
        monitor: name in the epoch logs whose best checkpoint is also kept; higher is better for
            names that contain "acc" or "auc". Defaults to "val_loss", or "loss" without
            validation.
        resume: "auto" to resume from the newest checkpoint in `directory`, if any; "never"; or the
            path or URL of a checkpoint, or the URL of a run, whose newest checkpoint is fetched.
            Defaults to "auto".
        at_resume: function that the chief calls with the step to resume from. Defaults to None.
        mirror: URL in object storage, such as gs://bucket/runs/a, of a copy of the run directory,
            which is the parent of `directory`; or a `kdist.mirror.Mirror`, which the caller opens
            and closes. On a new disk, training resumes from the copy. Defaults to None.

    Attributes:
        resumed_from: the step that training resumed from; None for a new training.
        place: the place in the data to resume from; None if they are no `kdist.data.BatchSource`.

    Raises:
        ValueError: `keep`, `every_steps`, or `every_minutes` is not positive; or with the URL of a
            mirror, `directory` is not named checkpoints.
        TypeError: from `fit`, if the model is not trained by kdist.
        CheckpointError: from `fit`, if another process writes to `directory`, or the checkpoint is
            damaged or of another model or dataset, or the mirror is not available.

    Example:

        checkpoint = kdist.callbacks.Checkpoint("runs/first/checkpoints", every_minutes=10)
        model.fit(train, epochs=3, callbacks=[checkpoint])
    """

    # Runs after all other callbacks, so that it saves and restores their final state.
    comes_last = True

    def __init__(
        self,
        directory: str | os.PathLike,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        monitor: str | None = None,
        resume: str | os.PathLike = "auto",
        at_resume: Callable[[int], Any] | None = None,
        mirror: str | Mirror | None = None,
    ):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and value <= 0:
                raise ValueError(f"Checkpoint({name}={value}): give a positive number, or None")
        self._files = CheckpointFiles(directory, keep)
        self._owns_mirror = isinstance(mirror, str)
        if isinstance(mirror, str):
            mirror = _own_mirror(mirror, self._files.directory, resume)
        self._mirror = mirror
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._monitor, self._best = monitor, None
        self._resume, self._at_resume = resume, at_resume
        self.resumed_from: int | None = None
        self.place: dict[str, Any] | None = None
        self._writer: BackgroundWriter | None = None
        self._lock: FileLock | None = None
        self._state: Any = None
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._notices: notices.Watch | None = None

    # Resuming: called by `fit`, see kdist/training/state.py.

    def load(self, model: keras.Model) -> Position | None:
        """Returns the position of the checkpoint to resume from, or None.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """
        strategy = model.distribute_strategy
        self.set_model(model)
        self._is_chief = is_chief(strategy)
        # A second `fit` of this process continues with the model as it is.
        resume, self._resume = self._resume, "never"
        found = read_on_chief(strategy, lambda: self._read(resume), CheckpointError)
        self._step_offset = found["newest"] if found["state"] is None else 0
        self._state, self._arrays = found["state"], found["arrays"]
        self.place = self._state and self._state.get("place")
        if self._state is None:
            return None
        self.resumed_from = found["step"]
        if self._is_chief:
            _logger.info("resumed after step %d from %s", found["step"], found["path"])
            if self._at_resume:
                self._at_resume(found["step"])
        return Position(**self._state["position"])

    def restore(self, facts: dict[str, Any]):
        """Restores the state that `load` has read.

        Raises:
            CheckpointError: the model, dataset, or global batch differs.
        """
        state, model = self._state, self.model
        _check(state, facts)
        snapshot.restore(model, self._arrays_of("model"))
        model.training_state.local_steps_done = state["local_steps_done"]
        model.stop_training = state["stop_training"]
        model.training_state.epoch_logs = state["logs"]
        snapshot.restore_rng(state["generators"])
        self._best = state["best"]
        replicas = model.distribute_strategy.num_replicas_in_sync
        if self._is_chief and replicas != state["replicas"]:
            _logger.info(
                "on %d replicas now, %d before: the global batch is the same, but sums over it are "
                "rounded differently",
                replicas,
                state["replicas"],
            )

    def _read(self, resume):
        """Returns the content of the checkpoint to resume from, on the chief."""
        try:
            if self._owns_mirror:
                self._mirror.open()
            return _read(self._files, resume, self._mirror)
        except OSError as error:
            raise CheckpointError(str(error)) from error

    def release(self):
        """Writes queued checkpoints, and releases signal handlers and the directory."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None
        for number, handler in self._handlers.items():
            # None: the handler was not installed by Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._owns_mirror:
            self._mirror.close()

    # Called by Keras.

    def on_train_begin(self, logs=None):
        if training_state_of(self.model) is None:
            raise TypeError(
                "Checkpoint resumes within an epoch, which Keras's own fit does not support; "
                "use kdist.Model.of(model), or call kdist.patch_keras() first"
            )
        if self._state is not None:
            snapshot.restore_callbacks(
                self._others(), self._state["callbacks"], self._arrays_of("callbacks")
            )
            self._state = self._arrays = None
        self.model.training_state.pause_requested = False
        self._several = is_multi_worker(self.model.distribute_strategy)
        self.model.training_state.votes.reset()
        self._saved = self.model.training_state.position.batch
        self._saved_at = time.monotonic()
        self._trains = True
        self._signal = None
        if self._is_chief:
            self._lock = _lock(self._files.directory)
            self._writer = BackgroundWriter(self._files, self._mirror and self._mirror.copy)
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._handlers[number] = signal.signal(number, self._on_signal)
            self._notices = notices.watch()

    def on_train_batch_end(self, batch, logs=None):
        requests = self._requests()
        if not (requests or self._is_due()):
            return
        # Under parameter servers, wait until no steps are in flight: only then does the state match
        # a position in the data.
        self.model.training_state.pause_requested = not self.model.training_state.is_paused
        if self.model.training_state.pause_requested:
            return
        # After the last step of an epoch, these are its logs.
        self._save(self.model.training_state.epoch_results(logs))
        if requests >= _STOP:
            self._end()

    def on_test_begin(self, logs=None):
        if self._trains:
            self._save(self.model.training_state.epoch_logs)

    def on_test_batch_end(self, batch, logs=None):
        # The state before validation is saved. Several workers stop together, after a step.
        if self._trains and self._signal is not None and not self._several:
            self._end()

    def on_epoch_end(self, epoch, logs=None):
        self._save({}, at_epoch_end=True, is_best=self._is_best(logs or {}))
        if self._signal is not None and not self._several:
            self._end()

    def on_train_end(self, logs=None):
        self._trains = False
        if self._owns_mirror and self._is_chief:  # the program may read them next
            with heartbeat.collective("fetching files of the run"):
                self._mirror.wait_for_files()

    # Time of a checkpoint.

    def _requests(self):
        """Returns the sum of the requests of all workers."""
        own = _STOP if self._signal is not None else 0
        if self._is_chief and self._every_minutes is not None:
            own += _SAVE * (time.monotonic() - self._saved_at >= 60 * self._every_minutes)
        if not self._several:
            return own
        asked = self.model.training_state.votes.total()
        self.model.training_state.votes.vote(
            0 if 0 < asked < _STOP else own
        )  # drops requests that are fulfilled now
        return asked

    def _is_due(self):
        if self._every_steps is None:
            return False
        batch = self.model.training_state.position.batch
        return batch // self._every_steps > self._saved // self._every_steps

    def _on_signal(self, number, frame):
        if number == signal.SIGHUP:
            discard_output_of_closed_terminal()
        if self._signal is None:
            self._signal = number
            name = signal.Signals(number).name
            # Not by logging: the signal may have interrupted a log call.
            os.write(2, f"kdist: {name}: saving a checkpoint, then ending\n".encode())
            return
        if number == signal.SIGHUP:  # the kernel and the shell both send it
            return
        # A preempted machine shuts down, which also sends SIGTERM to all processes.
        if number == signal.SIGTERM and self._notices is not None and self._notices.has_notice:
            return
        signal.signal(number, self._handlers.get(number) or signal.SIG_DFL)
        signal.raise_signal(number)

    def _end(self):
        """Ends training as the signal requires, after queued checkpoints are written."""
        if self._writer is not None:
            self._writer.wait()
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._writer is not None and self._writer.failed:
            _logger.warning("step %d was not saved; earlier checkpoints are unchanged", self._saved)
        else:
            _logger.info("saved after step %d; run the same command again to resume", self._saved)
        raise SystemExit(SAVED)

    # Content of a checkpoint.

    def _is_best(self, logs):
        name = self._monitor or ("val_loss" if "val_loss" in logs else "loss")
        value = logs.get(name)
        if value is None or math.isnan(value):
            return False
        value = float(value)
        sign = 1 if any(part in name.lower() for part in ("acc", "auc")) else -1
        if self._best is not None and sign * value <= sign * self._best:
            return False
        self._best = value
        return True

    def _save(self, logs, at_epoch_end=False, is_best=False):
        model = self.model
        if model.training_state.first_nonfinite_step() is not None:  # not worth resuming from
            return
        position = model.training_state.position
        if at_epoch_end:
            position = position.next_epoch
        with heartbeat.collective("taking a checkpoint"):
            arrays = snapshot.capture(model, is_kept=self._is_chief)  # collective
        self._saved, self._saved_at = position.batch, time.monotonic()
        if not self._is_chief:
            return
        callbacks, callback_arrays = snapshot.callback_state(self._others())
        reader = model.training_state.reader
        place = None if reader is None else reader.place_after(position.batch)
        steps_per_epoch = model.training_state.data_facts["steps_per_epoch"]
        has_ended = not steps_per_epoch or position.batch == position.data_start
        if place and at_epoch_end and has_ended:
            place = place.next_pass
        state = {
            "format": FORMAT_VERSION,
            "version": importlib.metadata.version("kdist"),
            "position": position._asdict(),
            "place": place and place._asdict(),
            "examples": position.batch * (model.training_state.global_batch_size or 0),
            "facts": model.training_state.data_facts,
            "replicas": model.distribute_strategy.num_replicas_in_sync,
            "local_steps_done": model.training_state.local_steps_done,
            "stop_training": model.stop_training,
            "logs": {k: v for k, v in dict(logs).items() if isinstance(v, float)},
            "best": self._best,
            "callbacks": callbacks,
            "generators": snapshot.rng_state(),
            "saving": self._saving(),
        }
        arrays = {f"model/{name}": array for name, array in arrays.items()}
        arrays.update({f"callbacks/{name}": array for name, array in callback_arrays.items()})
        self._writer.put(self._step_offset + position.batch, arrays, state, is_best)

    def _saving(self):
        """Returns bytes and seconds of the last checkpoint, for plans of spot VMs; None before."""
        copied = 0.0 if self._mirror is None else self._mirror.copy_seconds
        if self._writer.written is None or copied is None:
            return None
        size, seconds = self._writer.written
        return {"bytes": size, "seconds": seconds + copied}

    def _others(self):
        callbacks = self.model.training_state.callbacks
        return [callback for callback in callbacks if callback is not self]

    def _arrays_of(self, kind):
        """Returns {name without `kind`: array} of one kind of arrays."""
        prefix = f"{kind}/"
        return {
            name.removeprefix(prefix): array
            for name, array in self._arrays.items()
            if name.startswith(prefix)
        }


def _lock(directory):
    """Locks the directory, so that no other run writes to it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(directory)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another run writes its checkpoints to {directory}; wait for it, or use another "
            "directory"
        ) from error


def _own_mirror(url, directory, resume):
    if directory.name != "checkpoints":
        raise ValueError(
            f"Checkpoint(directory={os.fspath(directory)!r}, mirror={url!r}): the parent of the "
            "directory is copied, so name it RUN_DIRECTORY/checkpoints, or pass a "
            "kdist.mirror.Mirror"
        )
    return Mirror(url, directory.parent, resume=resume != "never")


def _read(files, resume, mirror=None):
    """Returns the content of the checkpoint to resume from; its state is None without one."""
    if is_url(resume):
        with fetched_checkpoint(os.fspath(resume)) as path:
            return {**_read(files, path), "path": resume}
    paths = files.paths()
    newest = checkpoint_step(paths[-1]) if paths else 0
    saved = None
    if resume == "auto":
        saved = files.newest()
        if mirror is not None:
            saved = files.fetch(mirror, after=saved.step if saved else -1) or saved
        if paths and saved is None:
            raise CheckpointError(
                f"all checkpoints in {files.directory} are damaged; start a new run "
                "(--resume=never, or a new --run_dir)"
            )
    elif resume != "never":
        saved = open_checkpoint(resume)
    if saved is None:
        return {"state": None, "arrays": None, "newest": newest}
    if saved.state.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{saved.path} was written by kdist {saved.state.get('version')}, in another format; "
            "resume with that version, or start a new run (--resume=never)"
        )
    if missing := _missing(saved.state):
        raise CheckpointError(
            f"{saved.path} lacks {', '.join(missing)}, so kdist did not write it as it is; resume "
            "from another checkpoint, or start a new run (--resume=never)"
        )
    path = os.fspath(saved.path)
    return {"state": saved.state, "arrays": saved.tensors(), "step": saved.step, "path": path}


def _missing(state):
    """Returns the names of what the state of a checkpoint lacks, such as "position.epoch"."""
    missing = [name for name in _VALUES if name not in state]
    for name, parts in _OBJECTS.items():
        value = state.get(name)
        if isinstance(value, dict):
            missing += [f"{name}.{part}" for part in parts if part not in value]
        else:
            missing.append(name)
    return missing


def _check(state, facts):
    """Raises a CheckpointError if the data differ from those of the checkpoint."""
    for name, value in state["facts"].items():
        if facts.get(name) != value:
            raise CheckpointError(
                f"the checkpoint was written with {name}={value}, but now it is {facts.get(name)}; "
                "restore the value (the global batch is local batch × replicas × accumulation), or "
                "start a new run (--resume=never, a new --run_dir)"
            )
