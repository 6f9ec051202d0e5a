"""Checkpoint format: one directory per checkpoint, written atomically, with checksums.

checkpoints/step-0000000150/
  state.json                    numbers and names
  tensors.index, tensors.data…  arrays in TensorFlow's format (see tf.train.load_checkpoint)
  checksums.json                SHA-256 of the files above

Reading a checkpoint never unpickles anything.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.json_text import parse_json
from kdist.mirror.mirror import Mirror
from kdist.program import without_graph_node
from kdist.run_directory import (
    CHECKPOINT_PREFIX,
    CHECKSUMS,
    checkpoint_name,
    checkpoint_step,
)

_logger = logging.getLogger(__name__)

# Stored in state.json as "format". Increase it when older code cannot resume from a checkpoint.
FORMAT_VERSION = 1

_UNFINISHED = "unfinished-"
_REPLACED = f"{_UNFINISHED}replaced-"
_STATE, _TENSORS = "state.json", "tensors"
_BLOCK_BYTES = 1 << 20
# Far above what callbacks save, so that a damaged file does not fill the memory.
_MAX_JSON_BYTES = 1 << 28


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model or dataset.

    Example:

        try:
            saved = kdist.checkpoint.open_checkpoint("runs/a/checkpoints/step-0000000150")
        except kdist.checkpoint.CheckpointError as error:
            print(error)
    """


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk with verified checksums; see `open_checkpoint`.

    Attributes:
        path: directory of the checkpoint.
        state: the `state` passed to `CheckpointFiles.write`.

    Example:

        saved = kdist.checkpoint.CheckpointFiles("runs/a/checkpoints").newest()
        print(saved.step, list(saved.tensors()))
    """

    path: pathlib.Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of the last step before the checkpoint."""
        step = _step(self.path)
        if step is None:
            raise CheckpointError(f"{self.path} has no name such as step-0000000150")
        return step

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns {name: array} of all arrays.

        Raises:
            CheckpointError: the files of the arrays are missing, or in no format of TensorFlow.
        """
        prefix = os.fspath(self.path / _TENSORS)
        try:
            types = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
            with tf.device("CPU:0"):
                values = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=list(types),
                    shape_and_slices=[""] * len(types),
                    dtypes=list(types.values()),
                )
        except (tf.errors.OpError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"the arrays of {self.path} cannot be read ({reason})") from error
        return {name: value.numpy() for name, value in zip(types, values, strict=True)}


class CheckpointFiles:
    """Checkpoint directory of a run.

    Args:
        directory: the directory, created by the first write.
        keep: number of newest checkpoints to keep, in addition to the best one. Defaults to 3.

    Raises:
        ValueError: `keep` is less than 1.

    Example:

        files = kdist.checkpoint.CheckpointFiles("runs/a/checkpoints", keep=3)
        files.write(150, {"weights/0": array}, {"epoch": 2})
        saved = files.newest()
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.directory = pathlib.Path(directory)
        self._keep = keep

    def write(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        state: Mapping[str, Any],
        is_best: bool = False,
    ) -> pathlib.Path:
        """Writes a checkpoint and removes old ones.

        Args:
            step: number of the checkpoint; an existing one is replaced.
            tensors: {name: array}, at least one.
            state: JSON-serializable values.
            is_best: whether to keep the checkpoint until the next best one.

        Returns:
            The directory of the checkpoint.

        Raises:
            OSError: the checkpoint cannot be written; existing ones are unchanged.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        target = self.directory / checkpoint_name(step)
        unfinished = self.directory / f"{_UNFINISHED}{target.name}"
        try:
            self._repair()
            unfinished.mkdir()
            _write_tensors(unfinished, tensors)
            _write_json(unfinished / _STATE, {**state, "is_best": is_best})
            _write_json(unfinished / CHECKSUMS, _checksums(unfinished))
            for file in [*unfinished.iterdir(), unfinished]:
                _sync(file)
            self._put_in_place(unfinished, target)
        except BaseException:
            _remove(unfinished)
            raise
        self._remove_old(target if is_best else None)
        return target

    def newest(self) -> SavedCheckpoint | None:
        """Returns the newest valid checkpoint, or None; logs each damaged one."""
        for path in sorted([*self.paths(), *self._replaced()], key=_step, reverse=True):
            try:
                return open_checkpoint(path)
            except CheckpointError as error:
                _logger.warning("%s; trying the checkpoint before it", error)
        return None

    def fetch(self, mirror: Mirror, after: int = -1) -> SavedCheckpoint | None:
        """Fetches the newest valid checkpoint of a mirror; logs each damaged one.

        Args:
            mirror: the mirror.
            after: only checkpoints of later steps are fetched. Defaults to -1, all of them.

        Returns:
            The checkpoint, which is now in this directory; None without one.

        Raises:
            OSError: the mirror cannot be read, or the checkpoint cannot be written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for found in mirror.checkpoints():
            target = self.directory / checkpoint_name(found.step)
            unfinished = self.directory / f"{_UNFINISHED}{target.name}"
            if found.step <= after:
                return None
            _remove(unfinished)
            unfinished.mkdir()
            try:
                mirror.fetch(found, unfinished)
                saved = open_checkpoint(unfinished)
                self._put_in_place(unfinished, target)
                return dataclasses.replace(saved, path=target)
            except CheckpointError as error:
                _logger.warning("%s: %s; trying the checkpoint before it", mirror.url, error)
            finally:
                _remove(unfinished)
        return None

    def best(self) -> pathlib.Path | None:
        """Returns the directory of the best checkpoint that is kept, or None."""
        return next((path for path in reversed(self.paths()) if _is_best(path)), None)

    def paths(self) -> list[pathlib.Path]:
        """Returns the directories of all checkpoints, oldest first."""
        found = self.directory.glob(f"{CHECKPOINT_PREFIX}*")
        return sorted(p for p in found if p.is_dir() and checkpoint_step(p) is not None)

    def _put_in_place(self, unfinished, target):
        if os.path.lexists(target):
            replaced = target.with_name(f"{_REPLACED}{target.name}")
            os.rename(target, replaced)
            os.rename(unfinished, target)
            _remove(replaced)
        else:
            os.rename(unfinished, target)
        _sync(self.directory)

    def _replaced(self):
        """Returns checkpoints without a successor, since the process was killed while replacing."""
        return [p for p in self.directory.glob(f"{_REPLACED}*") if not _original(p).exists()]

    def _repair(self):
        """Repairs the directory after a process was killed while writing to it."""
        for path in self._replaced():
            os.rename(path, _original(path))
        for path in self.directory.glob(f"{_REPLACED}*"):
            _remove(path)
        # Unfinished writes; one process alone writes here.
        for path in self.directory.glob(f"{_UNFINISHED}{CHECKPOINT_PREFIX}*"):
            _remove(path)

    def _remove_old(self, best):
        paths, best = self.paths(), best or self.best()
        for path in paths[:-1]:
            if path not in paths[-self._keep :] and path != best:
                # Renamed first, so that a reader never finds an incomplete checkpoint.
                gone = path.with_name(f"{_UNFINISHED}{path.name}")
                with contextlib.suppress(OSError):
                    os.rename(path, gone)
                _remove(gone)


def _remove(path):
    """Removes a checkpoint, or a link or file of its name; never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _original(path):
    """Returns the path of a checkpoint without the prefix of replaced ones."""
    return path.with_name(path.name.removeprefix(_REPLACED))


def _step(path):
    return checkpoint_step(_original(path))


def open_checkpoint(path: str | os.PathLike) -> SavedCheckpoint:
    """Opens a checkpoint and verifies its checksums.

    Args:
        path: directory of the checkpoint, such as `runs/a/checkpoints/step-0000000150`.

    Returns:
        A `SavedCheckpoint`.

    Raises:
        CheckpointError: the directory holds no checkpoint, or a file is damaged.

    Example:

        saved = kdist.checkpoint.open_checkpoint("runs/a/checkpoints/step-0000000150")
        saved.state["position"]
    """
    path = pathlib.Path(path)
    try:
        expected = _read_json(path / CHECKSUMS)
        state = _read_json(path / _STATE)
        found = _checksums(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({error})") from error
    damaged = [name for name in expected if expected[name] != found.get(name)]
    # A list that lacks a file of tensors is itself damaged.
    listed = {name for name in found if name == _STATE or name.startswith(_TENSORS)}
    if damaged or _STATE not in expected or not listed <= expected.keys():
        names = ", ".join(damaged or [CHECKSUMS])
        raise CheckpointError(f"{path} is damaged: the checksum of {names} does not match")
    return SavedCheckpoint(path, state)


def _write_tensors(directory, tensors):
    try:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=os.fspath(directory / _TENSORS),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=[tf.constant(value) for value in tensors.values()],
            )
    except tf.errors.OpError as error:
        raise OSError(without_graph_node(error.message)) from error


def _write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def _read_json(path):
    """Returns a JSON object; raises a ValueError for other files, which may be damaged."""
    if _regular(path).stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_JSON_BYTES:,} bytes")
    value = parse_json(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return value


def _regular(path):
    """Returns the path; raises a ValueError for a pipe or a device, on which reading may wait."""
    if not path.is_file() and path.exists():
        raise ValueError(f"{path.name} is not a regular file")
    return path


def _checksums(directory):
    names = sorted(path.name for path in directory.iterdir() if path.name != CHECKSUMS)
    return {name: _checksum(directory / name) for name in names}


def _checksum(path):
    digest = hashlib.sha256()
    with open(_regular(path), "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sync(path):
    """Flushes a file or directory to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_best(path):
    try:
        return _read_json(path / _STATE).get("is_best", False)
    except (OSError, ValueError):
        return False


class BackgroundWriter:
    """Writes checkpoints in one thread; a newer checkpoint replaces a queued one.

    A failure, such as a full disk, is logged and training continues. Earlier checkpoints remain
    intact, and the next checkpoint is tried again.

    Args:
        files: destination of the checkpoints.
        after_write: function that the thread calls after each checkpoint. Defaults to None.

    Attributes:
        failed: number of failed writes since the last successful one.
        written: bytes and seconds of the last successful write; None before.
    """

    def __init__(self, files: CheckpointFiles, after_write: Callable[[], Any] | None = None):
        self._files, self._after_write = files, after_write
        self._changed = threading.Condition()
        self._queued: tuple[Any, ...] | None = None
        self._is_writing = self._is_closing = False
        self.failed = 0
        self.written: tuple[int, float] | None = None
        self._thread = threading.Thread(target=self._run, name="kdist-checkpoint", daemon=True)
        self._thread.start()

    def put(self, *checkpoint):
        """Queues a checkpoint; the arguments are those of `CheckpointFiles.write`.

        A queued best checkpoint is not replaced, but written first.
        """
        with self._changed:
            while self._queued is not None and self._queued[3:] == (True,):
                self._changed.wait()
            self._queued = checkpoint
            self._changed.notify_all()

    def wait(self):
        """Waits until all checkpoints are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued is None and not self._is_writing)

    def close(self):
        """Waits until all checkpoints are written, and ends the thread."""
        self.wait()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued is not None or self._is_closing)
                if self._queued is None:
                    return
                checkpoint, self._queued, self._is_writing = self._queued, None, True
                self._changed.notify_all()
            try:
                self._write(checkpoint)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write(self, checkpoint):
        try:
            began = time.monotonic()
            path = self._files.write(*checkpoint)
            size = sum(file.stat().st_size for file in path.iterdir())
            self.failed, self.written = 0, (size, time.monotonic() - began)
            if self._after_write is not None:
                self._after_write()
        except OSError as error:
            self.failed += 1
            _logger.warning(
                "cannot write checkpoint %d to %s (%s); training continues and will retry with the "
                "next one. Free disk space, or use another --run_dir",
                checkpoint[0],
                self._files.directory,
                error,
            )
        except Exception:  # else `close` would wait for a thread that has ended
            self.failed += 1
            _logger.exception("cannot write checkpoint %d; training continues", checkpoint[0])
