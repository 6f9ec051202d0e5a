"""Checkpoints as directories: each is whole or not there, and says so itself.

files = CheckpointFiles("runs/first/checkpoints", keep=3)
files.write(150, {"weights/0": array}, {"epoch": 2})
saved = files.newest()                       # the newest whole one; None without any
saved.step, saved.state, saved.tensors()

checkpoints/step-0000000150/
  state.json                    numbers and names
  tensors.index, tensors.data…  TensorFlow's own format (tf.train.load_checkpoint reads it)
  checksums.json                SHA-256 of the files above

Nothing in it is ever unpickled.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.run_directory import CHECKPOINT_PREFIX, checkpoint_step

_UNFINISHED = "unfinished-"
_REPLACED = f"{_UNFINISHED}replaced-"
_STATE, _CHECKSUMS, _TENSORS = "state.json", "checksums.json", "tensors"
_BLOCK_BYTES = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from: torn, of something else, or none at all."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose checksums are right.

    Attributes:
        path: its directory.
        state: what `CheckpointFiles.write` was given.
    """

    path: pathlib.Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The step that it was written after."""
        step = _step(self.path)
        if step is None:
            raise CheckpointError(f"{self.path} is not named after its step, as step-0000000150")
        return step

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays by their names."""
        prefix = os.fspath(self.path / _TENSORS)
        types = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
        with tf.device("CPU:0"):
            values = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=list(types),
                shape_and_slices=[""] * len(types),
                dtypes=list(types.values()),
            )
        return {name: value.numpy() for name, value in zip(types, values, strict=True)}


class CheckpointFiles:
    """The checkpoints of a run.

    Args:
        directory: where they are; made when the first is written.
        keep: how many of the newest stay, besides the best. Defaults to 3.

    Raises:
        ValueError: `keep` is smaller than 1.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least 1 checkpoint")
        self.directory = pathlib.Path(directory)
        self._keep = keep

    def write(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        state: Mapping[str, Any],
        is_best: bool = False,
    ) -> pathlib.Path:
        """Writes a checkpoint, and then removes those that need not stay.

        Args:
            step: its number; one of the same number is replaced.
            tensors: arrays by their names, at least one.
            state: what JSON can hold.
            is_best: it stays until a better one comes.

        Raises:
            OSError: it cannot be written; what was there before is as it was.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        target = self.directory / f"{CHECKPOINT_PREFIX}{step:010d}"
        unfinished = self.directory / f"{_UNFINISHED}{target.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            self._clear_up()
            unfinished.mkdir()
            _write_tensors(unfinished, tensors)
            _write_json(unfinished / _STATE, {**state, "is_best": is_best})
            _write_json(unfinished / _CHECKSUMS, _checksums(unfinished))
            for file in [*unfinished.iterdir(), unfinished]:
                _to_disk(file)
            self._put_in_place(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._remove_old(target if is_best else None)
        return target

    def newest(self) -> Saved | None:
        """The newest one that is whole; of those that are not, a line on stderr each."""
        for path in sorted([*self.paths(), *self._put_away()], key=_step, reverse=True):
            try:
                return opened(path)
            except CheckpointError as error:
                print(f"kdist: {error}; looking for the one before", file=sys.stderr)
        return None

    def paths(self) -> list[pathlib.Path]:
        """Those that are there, the oldest first."""
        found = self.directory.glob(f"{CHECKPOINT_PREFIX}*")
        return sorted(p for p in found if p.is_dir() and checkpoint_step(p) is not None)

    def _put_in_place(self, unfinished, target):
        if target.exists():
            replaced = target.with_name(f"{_REPLACED}{target.name}")
            os.rename(target, replaced)
            os.rename(unfinished, target)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(unfinished, target)
        _to_disk(self.directory)

    def _put_away(self):
        """Those that were to be replaced when the process was killed, and that none replaces."""
        return [p for p in self.directory.glob(f"{_REPLACED}*") if not _named(p).exists()]

    def _clear_up(self):
        """What processes have left that were killed while they replaced a checkpoint."""
        for path in self._put_away():
            os.rename(path, _named(path))
        for path in self.directory.glob(f"{_REPLACED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self, best):
        *old, _ = paths = self.paths()
        bests = [best] if best else [path for path in paths if _is_best(path)][-1:]
        for path in old:
            if path not in paths[-self._keep :] and path not in bests:
                # Out of sight first: a reader finds it whole or not at all.
                gone = path.with_name(f"{_UNFINISHED}{path.name}")
                with contextlib.suppress(OSError):
                    os.rename(path, gone)
                shutil.rmtree(gone, ignore_errors=True)


def _named(path):
    """The path that a checkpoint has when it has not been put away."""
    return path.with_name(path.name.removeprefix(_REPLACED))


def _step(path):
    return checkpoint_step(_named(path))


def opened(path: str | os.PathLike) -> Saved:
    """The checkpoint in a directory.

    Raises:
        CheckpointError: there is none, or it is torn.
    """
    path = pathlib.Path(path)
    try:
        expected = json.loads((path / _CHECKSUMS).read_bytes())
        state = json.loads((path / _STATE).read_bytes())
        found = _checksums(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint ({error})") from error
    torn = [name for name in expected if expected[name] != found.get(name)]
    if torn or _STATE not in expected:
        names = ", ".join(torn or [_CHECKSUMS])
        raise CheckpointError(f"{path} is torn: {names} is not what was written")
    return Saved(path, state)


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
        raise OSError(error.message) from error


def _write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def _checksums(directory):
    names = sorted(path.name for path in directory.iterdir() if path.name != _CHECKSUMS)
    return {name: _checksum(directory / name) for name in names}


def _checksum(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _to_disk(path):
    """Has what was written survive a machine that goes off."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_best(path):
    try:
        return json.loads((path / _STATE).read_bytes()).get("is_best", False)
    except (OSError, ValueError):
        return False
