"""A run that is killed at any moment goes on from its last checkpoint, as if nothing had happened.

    model.fit(train, epochs=3, callbacks=[kdist.callbacks.Checkpoint("runs/first/checkpoints")])

The same program, started again, goes on where the newest whole checkpoint was written: weights,
optimizers, loss scale, metrics of the epoch that was under way, the place in the data, random
numbers' generators, and what Keras's callbacks remember. With data of `kdist.data` its end is
bit-equal to that of a run that was never killed.
"""

import importlib.metadata
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import keras

from kdist import heartbeat
from kdist.checkpoint import snapshot, surroundings
from kdist.checkpoint.background import BackgroundWriter
from kdist.checkpoint.broadcast import of_chief
from kdist.checkpoint.files import CheckpointError, CheckpointFiles, opened
from kdist.locks import Lock
from kdist.run_directory import checkpoint_step
from kdist.strategies import is_chief
from kdist.training.resume import Position
from kdist.training.together import are_several_workers

_FORMAT = 1
# What a worker asks of all others: each of these fits into a sum over many workers.
_SAVE, _STOP = 1, 1 << 32


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints, and lets `fit` go on from the newest.

    One is written at the end of each epoch, before each validation, every so many steps or minutes,
    and on SIGTERM or SIGINT (Ctrl-C), after which training ends: by `SystemExit` with code 143, or
    by `KeyboardInterrupt`. A second signal acts as it would without this callback. Steps wait only
    until the weights are copied; the writing goes on beside them.

    Of callbacks, Keras's own are known that remember something (EarlyStopping, ReduceLROnPlateau,
    ModelCheckpoint, History); one of your own joins by `get_state()`, which gives what JSON can
    hold, and `set_state(state)`, called after `on_train_begin`.

    Once the loss has become NaN or infinite, no more are written.

    With several workers all need the callback, and all save at the same step; the chief alone
    writes, and alone has to see the directory. Going on with another number of replicas is possible
    where the global batch stays; sums over rows are then added up in another order, so that the
    last digits differ.

    Args:
        directory: where to; made if it is not there. Each is a directory `step-…` in it.
        every_steps: write after so many steps; at the end of a call with
            `steps_per_execution`. By default not by steps.
        every_minutes: write after so many minutes. By default not by time.
        keep: how many of the newest stay. Defaults to 3.
        monitor: of which the best stays as well: a name in the logs of epochs. Defaults to
            "val_loss", or "loss" where nothing is validated; higher is better for names that hold
            "acc" or "auc".
        resume: "auto", the default: go on from the newest checkpoint in `directory`, if there is
            one; "never"; or the path of the checkpoint to go on from.
        at_resume: called on the chief with the number of steps that training goes on from, before
            it does.

    Attributes:
        resumed_from: the step that training went on from; None if it began anew.

    Raises:
        ValueError: `keep`, `every_steps` or `every_minutes` is not positive.
        TypeError: from `fit`, with a model that kdist does not train.
        CheckpointError: from `fit`, while another process writes into `directory`; or what is there
            is no whole checkpoint, or of another model or other data.
    """

    # So that it knows what the others have decided, and gives them back what they knew.
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
    ):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and value <= 0:
                raise ValueError(f"Checkpoint({name}={value}): give a positive number, or None")
        self._files = CheckpointFiles(directory, keep)
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._monitor, self._best = monitor, None
        self._resume, self._at_resume = resume, at_resume
        self.resumed_from: int | None = None
        self._writer: BackgroundWriter | None = None
        self._lock: Lock | None = None
        self._state: Any = None
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}

    # Going on: called by `fit`, see kdist/training/resume.py.

    def load(self, model: keras.Model) -> Position | None:
        """Where the newest whole checkpoint was written; None if there is none.

        Raises:
            CheckpointError: `resume` names a directory that holds no whole checkpoint.
        """
        strategy = model.distribute_strategy
        self.set_model(model)
        self._is_chief = is_chief(strategy)
        # Another `fit` of this process goes on with the model as it is.
        resume, self._resume = self._resume, "never"
        found = of_chief(strategy, lambda: _read(self._files, resume))
        self._numbers_from = found["newest"] if found["state"] is None else 0
        self._state, self._arrays = found["state"], found["arrays"]
        if self._state is None:
            return None
        self.resumed_from = found["step"]
        if self._is_chief:
            print(f"kdist: going on after step {found['step']}, from {found['path']}", flush=True)
            if self._at_resume:
                self._at_resume(found["step"])
        return Position(**self._state["position"])

    def restore(self, facts: dict[str, Any]):
        """Gives the model what `load` has found.

        Raises:
            CheckpointError: it is of another model, of other data or of another global batch.
        """
        state, model = self._state, self.model
        _check(state, facts)
        snapshot.put(model, self._of("model"))
        model.local_steps_done = state["local_steps_done"]
        model.stop_training, model.logs_of_epoch = state["stop_training"], state["logs"]
        surroundings.to_generators(state["generators"])
        self._best = state["best"]
        replicas = model.distribute_strategy.num_replicas_in_sync
        if self._is_chief and replicas != state["replicas"]:
            print(
                f"kdist: on {replicas} replicas now, {state['replicas']} before: the global batch "
                "is the same, and sums over it are rounded differently",
                flush=True,
            )

    def release(self):
        """Writes what is left to write."""
        for number, handler in self._handlers.items():
            # None: it was installed by other than Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # Called by Keras.

    def on_train_begin(self, logs=None):
        if not hasattr(self.model, "position"):
            raise TypeError(
                "Checkpoint goes on within an epoch, which Keras's own fit cannot: make the model "
                "by kdist.Model.of(model), or call kdist.patch_keras() first"
            )
        if self._state is not None:
            surroundings.to_callbacks(
                self._others(), self._state["callbacks"], self._of("callbacks")
            )
            self._state = self._arrays = None
        self.model.shall_pause = False
        self._several = are_several_workers(self.model.distribute_strategy)
        self.model.asked.reset()
        self._saved = self.model.position.batch
        self._saved_at = time.monotonic()
        self._trains = True
        self._signal = None
        if self._is_chief:
            self._lock = _lock(self._files.directory)
            self._writer = BackgroundWriter(self._files)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def on_train_batch_end(self, batch, logs=None):
        asked = self._asked()
        if not (asked or self._is_due()):
            return
        # Under parameter servers steps are under way: a state that goes with a place in the data
        # there is when all of them are done.
        self.model.shall_pause = not self.model.is_paused
        if self.model.shall_pause:
            return
        # If this was the epoch's last step, they are its logs.
        self._save(self.model.epoch_results(logs))
        if asked >= _STOP:
            self._end()

    def on_test_begin(self, logs=None):
        if self._trains:
            self._save(self.model.logs_of_epoch)

    def on_test_batch_end(self, batch, logs=None):
        # What validation began with is saved. Several workers stop together, in a step.
        if self._trains and self._signal is not None and not self._several:
            self._end()

    def on_epoch_end(self, epoch, logs=None):
        self._save({}, at_epochs_end=True, is_best=self._is_best(logs or {}))
        if self._signal is not None and not self._several:
            self._end()

    def on_train_end(self, logs=None):
        self._trains = False

    # When.

    def _asked(self):
        """What the workers ask together."""
        own = _STOP if self._signal is not None else 0
        if self._is_chief and self._every_minutes is not None:
            own += _SAVE * (time.monotonic() - self._saved_at >= 60 * self._every_minutes)
        if not self._several:
            return own
        asked = self.model.asked.of_all()
        self.model.asked.ask(0 if 0 < asked < _STOP else own)  # what is done now is done
        return asked

    def _is_due(self):
        if self._every_steps is None:
            return False
        return self.model.position.batch // self._every_steps > self._saved // self._every_steps

    def _on_signal(self, number, frame):
        if self._signal is None:
            self._signal = number
            name = signal.Signals(number).name
            # Not by print: the signal may have come in the middle of one.
            os.write(2, f"kdist: {name}: saving, then ending\n".encode())
            return
        signal.signal(number, self._handlers.get(number) or signal.SIG_DFL)
        signal.raise_signal(number)

    def _end(self):
        """Ends training as the signal asks, once all is written."""
        if self._writer is not None:
            self._writer.wait()
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        print(
            f"kdist: saved after step {self._saved}; the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(128 + signal.SIGTERM)

    # What.

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

    def _save(self, logs, at_epochs_end=False, is_best=False):
        model = self.model
        if model.first_nonfinite_step() is not None:  # nobody wants to go on from there
            return
        position = model.position.next_epoch if at_epochs_end else model.position
        with heartbeat.meeting("taking a checkpoint"):
            arrays = snapshot.take(model)  # by all workers
        self._saved, self._saved_at = position.batch, time.monotonic()
        if not self._is_chief:
            return
        callbacks, more = surroundings.of_callbacks(self._others())
        state = {
            "format": _FORMAT,
            "version": importlib.metadata.version("kdist"),
            "position": position._asdict(),
            "examples": position.batch * (model.global_batch_size or 0),
            "facts": model.data_facts,
            "replicas": model.distribute_strategy.num_replicas_in_sync,
            "local_steps_done": model.local_steps_done,
            "stop_training": model.stop_training,
            "logs": {k: v for k, v in dict(logs).items() if isinstance(v, float)},
            "best": self._best,
            "callbacks": callbacks,
            "generators": surroundings.of_generators(),
        }
        arrays = {f"model/{name}": array for name, array in arrays.items()}
        arrays.update({f"callbacks/{name}": array for name, array in more.items()})
        self._writer.put(self._numbers_from + position.batch, arrays, state, is_best)

    def _others(self):
        return [callback for callback in self.model.callbacks_of_fit if callback is not self]

    def _of(self, kind):
        """The arrays of a kind, by their names within it."""
        prefix = f"{kind}/"
        return {
            name.removeprefix(prefix): array
            for name, array in self._arrays.items()
            if name.startswith(prefix)
        }


def _lock(directory):
    """Keeps others from writing into the directory, and from removing what is in it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return Lock(directory)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another run writes its checkpoints into {directory}; let it end, or take another "
            "directory"
        ) from error


def _read(files, resume):
    """What a checkpoint holds, for all workers; without a state if there is none to go on from."""
    paths = files.paths()
    newest = checkpoint_step(paths[-1]) if paths else 0
    saved = None
    if resume == "auto":
        saved = files.newest()
        if paths and saved is None:
            raise CheckpointError(
                f"no checkpoint in {files.directory} is whole; begin anew (--resume=never, or a "
                "new --run_dir)"
            )
    elif resume != "never":
        saved = opened(resume)
    if saved is None:
        return {"state": None, "arrays": None, "newest": newest}
    if saved.state.get("format") != _FORMAT:
        raise CheckpointError(
            f"{saved.path} was written by kdist {saved.state.get('version')}, in another format; "
            "go on with that version, or begin anew (--resume=never)"
        )
    path = os.fspath(saved.path)
    return {"state": saved.state, "arrays": saved.tensors(), "step": saved.step, "path": path}


def _check(state, facts):
    """Raises a CheckpointError if the data are not those that training began with."""
    for name, value in state["facts"].items():
        if facts.get(name) != value:
            raise CheckpointError(
                f"the checkpoint was written with {name}={value}, and this is {facts.get(name)}; "
                "set it as it was (the global batch is local batch × replicas × accumulation), or "
                "begin anew (--resume=never, a new --run_dir)"
            )
