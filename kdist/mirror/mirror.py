"""Copies a run directory to object storage in the background, and fetches it on a new disk.

gs://bucket/runs/a/
  lease.json                    which process writes here
  config.json, metrics.jsonl …  files of the run directory
  checkpoints/step-0000000150/  a checkpoint; without checksums.json it is not complete
  checkpoints/step-0000000150.1/  a later one after the same step

Buckets have no rename, so the last file of a checkpoint is written last, and nothing is replaced.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from kdist.json_text import parse_json
from kdist.mirror.lease import LEASE, Lease
from kdist.mirror.store import Store, file_state
from kdist.run_directory import (
    CHECKPOINT_PREFIX,
    CHECKSUMS,
    RunDirectory,
    checkpoint_name,
    checkpoint_step,
    replacing,
)

_logger = logging.getLogger(__name__)

# Local file with the identifier of the run, which the lease has, too.
_MARK = "mirror.json"
_CHECKPOINT = re.compile(r"checkpoints/step-(\d{1,18})(?:\.(\d{1,9}))?/([^/]+)")
_KEPT_CHECKPOINTS = 3
_SCRATCH_PREFIX = ".mirror-"
# Seconds between two copies of metrics and other files that have changed.
_INTERVAL_SECONDS = 60.0
# A slow store is written for at most one part in this many of the time, apart from checkpoints.
_MIN_PAUSE_RATIO = 10
# At the end, a copy that makes no progress for this time is given up.
_STALL_SECONDS = 180.0


@dataclasses.dataclass(frozen=True, order=True)
class MirroredCheckpoint:
    """A complete checkpoint in object storage; a later one compares as greater.

    Attributes:
        step: number of the last step before the checkpoint.
        version: number of the checkpoints that were written earlier after the same step.
        names: names of its files in the store.

    Example:

        newest = mirror.checkpoints()[0]
        newest.step, newest.names
    """

    step: int
    version: int
    names: tuple[str, ...] = dataclasses.field(compare=False)


class Mirror:
    """Copy of a run directory in object storage, written in the background.

    Copied are complete checkpoints, of which the newest three are kept, then `config.json`,
    `metrics.jsonl`, `devices.jsonl`, `best.keras`, `summary.json`, and `report.html` of the run
    directory, if they exist and have changed. Training never waits for the copies. A failure is
    logged once, and copying is tried again until it succeeds.

    On a new disk, `open` fetches the files that a resumed run needs first, and
    `kdist.callbacks.Checkpoint` the newest complete checkpoint. `best.keras` and `report.html`
    follow in the background. Only one process at a time can write to a URL.

    Args:
        url: the URL, such as gs://bucket/runs/a or s3://bucket/runs/a.
        run_directory: the local directory of the run.
        resume: whether the URL may hold the run already, which is then resumed. Defaults to True.

    Attributes:
        copy_seconds: seconds that copying the last checkpoint took; None before.

    Raises:
        ValueError: `url` is no URL of a prefix, or its protocol is unknown.
        ImportError: the package of its protocol is not installed.

    Example:

        with kdist.mirror.Mirror("gs://bucket/runs/a", "runs/a") as mirror:
            checkpoint = kdist.callbacks.Checkpoint("runs/a/checkpoints", mirror=mirror)
            model.fit(train, epochs=3, callbacks=[checkpoint])
    """

    def __init__(self, url: str, run_directory: str | os.PathLike, resume: bool = True):
        self._store = Store(url)
        self.url = self._store.url
        self._run = RunDirectory(run_directory)
        self._resumes = resume
        self._lease = Lease(self._store)
        self._thread: threading.Thread | None = None
        self._fetching: threading.Thread | None = None
        self._changed = threading.Event()
        self._is_closing = False
        self._progress_at = 0.0
        self._copied: dict[str, Any] = {}  # name -> size, time, and inode of what was copied
        self._fails = self._is_slow = False
        self.copy_seconds: float | None = None

    def __enter__(self) -> "Mirror":
        self.open()
        return self

    def __exit__(self, *_):
        self.close()

    def open(self):
        """Claims the URL, fetches the files of the run on a new disk, and starts to copy.

        Raises:
            FileExistsError: the URL holds another run, a finished one, other files, or another
                process writes to it.
            OSError: the store or the run directory cannot be read or written.
        """
        if self._thread is not None:
            return
        self._run.path.mkdir(parents=True, exist_ok=True)
        names, held = self._store.names(), self._lease.read()
        run = self._check_available(names, held)
        self._lease.acquire(run)
        try:
            with replacing(self._run.path / _MARK) as file:
                json.dump({"url": self.url, "run": run}, file)
            self._fetch_files(names)
            self._start_to_fetch_rest(names)
        except BaseException:
            self._lease.release()
            raise
        for scratch in self._run.path.glob(f"{_SCRATCH_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(scratch, ignore_errors=True)
        self._resumes, self._is_closing = True, False
        self._thread = threading.Thread(target=self._copy_until_closed, name="kdist-mirror")
        self._thread.daemon = True
        self._thread.start()

    def copy(self):
        """Starts to copy what has changed, such as a new checkpoint; returns immediately."""
        self._changed.set()

    def wait_for_files(self):
        """Waits until the files that are fetched in the background are here.

        A file that cannot be fetched is logged, and stays in object storage.
        """
        if self._fetching is not None:
            self._fetching.join()

    def close(self):
        """Waits until everything is copied, and releases the URL.

        Copies that fail, or that make no progress for three minutes, are given up and logged.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._is_closing, self._progress_at = True, time.monotonic()
        self._changed.set()
        while thread.is_alive():
            thread.join(0.2)
            if time.monotonic() - self._progress_at > _STALL_SECONDS:
                _logger.warning("copying to %s was given up: it makes no progress", self.url)
                self._lease.abandon()
                return
        self._lease.release()

    def checkpoints(self) -> list[MirroredCheckpoint]:
        """Returns the complete checkpoints, newest first.

        Raises:
            OSError: the store cannot be read.
        """
        return complete_checkpoints(self._store)

    def fetch(self, checkpoint: MirroredCheckpoint, directory: pathlib.Path):
        """Copies the files of a checkpoint to a local directory, which exists.

        Raises:
            OSError: a file cannot be read or written.
        """
        _get(self._store, checkpoint, directory)

    # Claiming and fetching.

    def _check_available(self, names, held):
        """Returns the identifier of the run that the URL holds, or of a new one."""
        local = self._read_mark()
        if names and LEASE not in names:
            raise FileExistsError(f"{self.url} is not empty, and holds no run; use another prefix")
        if not any(name == self._run.config.name or _CHECKPOINT.match(name) for name in names):
            return local.get("run") or uuid.uuid4().hex
        if self._run.summary.name in names:
            raise FileExistsError(f"{self.url} already holds a finished run; use another prefix")
        if not self._resumes:
            raise FileExistsError(f"{self.url} already holds a run; use another prefix")
        if self._is_used() and local.get("run") != held.get("run"):
            raise FileExistsError(
                f"{self.url} holds another run than {self._run.path}; use another prefix, or a new "
                "run directory to resume that run in"
            )
        return held.get("run") or uuid.uuid4().hex

    def _read_mark(self):
        try:
            mark = parse_json((self._run.path / _MARK).read_bytes())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}

    def _is_used(self):
        return self._run.config.exists() or self._newest_local() is not None

    def _fetch_files(self, names):
        """Fetches the files of the run, unless the local ones are of a later step."""
        newest = self._newest_local()
        newest_step = -1 if newest is None else checkpoint_step(newest)
        found = max((each.step for each in self.checkpoints()), default=-1)
        if self._run.config.exists() and found <= newest_step:
            return
        # The configuration marks a run, so it comes last.
        for path in reversed(self._files()):
            if path.name not in names:
                continue
            if path in self._fetched_later():
                path.unlink(missing_ok=True)  # of an earlier step
            else:
                os.replace(self._fetch(path), path)

    def _start_to_fetch_rest(self, names):
        """Fetches files that may be large, and that nobody waits for, in the background.

        The other tasks of the job wait for this one. If training writes such a file meanwhile, that
        file is kept.
        """
        missing = [p for p in self._fetched_later() if p.name in names and not p.exists()]
        if not missing:
            return

        def fetch():
            for path in missing:
                try:
                    _rename_to_new(self._fetch(path), path)
                except OSError as error:
                    _logger.warning("%s of %s is not fetched: %s", path.name, self.url, error)

        self._fetching = threading.Thread(target=fetch, name="kdist-fetch", daemon=True)
        self._fetching.start()

    def _fetch(self, path):
        """Returns the temporary path of the copy of a file."""
        unfinished = path.with_name(f".{path.name}-fetched")
        self._store.get(path.name, unfinished)
        return unfinished

    # Copying, in the thread.

    def _copy_until_closed(self):
        pause = _INTERVAL_SECONDS
        while True:
            self._changed.wait(pause)
            self._changed.clear()
            is_last = self._is_closing
            began = time.monotonic()
            self._try_to_copy()
            if is_last and (self._fails or not self._changed.is_set()):
                return
            pause = max(_INTERVAL_SECONDS, _MIN_PAUSE_RATIO * (time.monotonic() - began))

    def _try_to_copy(self):
        if self._lease.is_lost:
            return
        try:
            self._copy_files()
            if self._copy_newest_checkpoint():
                self._copy_files()
        except Exception as error:
            if not self._fails:
                _logger.warning(
                    "%s; training continues without new copies, and copying is tried again with "
                    "the next checkpoint",
                    error,
                )
            self._fails = True
        else:
            if self._fails:
                _logger.info("the run is copied to %s again", self.url)
            self._fails = False

    def _copy_files(self):
        with self._scratch() as scratch:
            for path in self._files():
                state = file_state(path)
                if state is None or state == self._copied.get(path.name):
                    continue
                # A copy, as metrics are appended while the store reads the file.
                shutil.copyfile(path, scratch / path.name)
                if path == self._run.best and file_state(path) != state:  # it is being replaced
                    continue
                self._put(scratch / path.name, path.name)
                self._copied[path.name] = state

    def _copy_newest_checkpoint(self):
        """Returns whether there was a checkpoint to copy."""
        path = self._newest_local()
        state = None if path is None else file_state(path / CHECKSUMS)
        if state is None or state == self._copied.get(CHECKSUMS):
            return False
        began = time.monotonic()
        with self._scratch() as scratch:
            with contextlib.suppress(FileNotFoundError):
                for file in path.iterdir():
                    _link(file, scratch / file.name)
            if file_state(path / CHECKSUMS) != state:  # training has replaced or removed it
                self._changed.set()
                return False
            self._put_checkpoint(scratch, checkpoint_step(path))
        self._copied[CHECKSUMS] = state
        self.copy_seconds = time.monotonic() - began
        newest = self._newest_local()
        if newest is not None and file_state(newest / CHECKSUMS) != state:
            self._changed.set()
            # Before and after a validation, checkpoints of the same step follow each other quickly.
            if not self._is_slow and newest.name != path.name:
                self._is_slow = True
                _logger.warning(
                    "copying a checkpoint to %s takes longer than the time between checkpoints, so "
                    "not all of them are copied",
                    self.url,
                )
        return True

    def _put_checkpoint(self, directory, step):
        complete = [each for each in self.checkpoints() if each.step == step]
        content = (directory / CHECKSUMS).read_bytes()
        if complete and self._store.read(complete[0].names[-1]) == content:
            return  # fetched from there, or copied before a restart
        name = f"checkpoints/{checkpoint_name(step)}"
        if complete:
            name += f".{complete[0].version + 1}"
        for file in sorted(directory.iterdir(), key=lambda file: file.name == CHECKSUMS):
            self._put(file, f"{name}/{file.name}")
        self._remove_old()

    def _remove_old(self):
        """Removes old checkpoints, and incomplete ones of processes that were killed."""
        newest_of_step = {each.step: each for each in reversed(self.checkpoints())}
        kept = sorted(newest_of_step.values())[-_KEPT_CHECKPOINTS:]
        for each in _checkpoints(self._store):
            if each not in kept or each.names != kept[kept.index(each)].names:
                self._store.remove(reversed(each.names))

    def _put(self, path, name):
        if self._lease.is_lost:
            raise OSError(f"{self.url} is no longer written by this run")
        self._store.put(path, name, self._note_progress)
        self._note_progress()

    def _note_progress(self):
        self._progress_at = time.monotonic()

    # Local files.

    def _files(self):
        run = self._run
        return [run.config, run.best, run.metrics, run.devices, run.summary, run.report]

    def _fetched_later(self):
        return [self._run.best, self._run.report]

    def _newest_local(self):
        found = (
            path
            for path in self._run.checkpoints.glob(f"{CHECKPOINT_PREFIX}*")
            if (path / CHECKSUMS).exists()
        )
        return max((p for p in found if checkpoint_step(p) is not None), default=None)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=self._run.path) as directory:
            yield pathlib.Path(directory)


def complete_checkpoints(store: Store) -> list[MirroredCheckpoint]:
    """Returns the complete checkpoints of a run in a store, newest first.

    Raises:
        OSError: the store cannot be read.
    """
    return [each for each in _checkpoints(store) if each.names[-1].endswith(f"/{CHECKSUMS}")]


def find_checkpoint(url: str) -> tuple[Store, MirroredCheckpoint]:
    """Returns a checkpoint at a URL, and the store of its run.

    Args:
        url: URL of a run, whose newest checkpoint is meant, or of one of its checkpoints, such as
            gs://bucket/runs/a/checkpoints/step-0000000150.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        OSError: the store cannot be read.
    """
    run, separator, name = url.rstrip("/").partition("/checkpoints/")
    store = Store(run)
    for found in complete_checkpoints(store):
        if not separator or found.names[0].startswith(f"checkpoints/{name}/"):
            return store, found
    raise FileNotFoundError(
        f"{url} has no complete checkpoint; give the URL of a run, or of a checkpoint below its "
        "checkpoints/"
    )


@contextlib.contextmanager
def fetched_checkpoint(url: str) -> Iterator[pathlib.Path]:
    """Copies a checkpoint of `find_checkpoint` to a temporary directory.

    Yields:
        The directory of the checkpoint.

    Raises:
        OSError: there is no complete checkpoint, or it cannot be copied.
    """
    store, found = find_checkpoint(url)
    with tempfile.TemporaryDirectory(prefix="kdist-") as parent:
        directory = pathlib.Path(parent) / checkpoint_name(found.step)
        directory.mkdir()
        _get(store, found, directory)
        yield directory


def _get(store, checkpoint, directory):
    for name in checkpoint.names:
        store.get(name, directory / name.rpartition("/")[2])


def _checkpoints(store):
    """Returns all checkpoints, newest first; the last file of complete ones is `CHECKSUMS`."""
    files: dict[tuple[int, int], list[str]] = {}
    for name in store.names("checkpoints"):
        if match := _CHECKPOINT.fullmatch(name):
            files.setdefault((int(match[1]), int(match[2] or 0)), []).append(name)
    found = [
        MirroredCheckpoint(*number, tuple(sorted(names, key=lambda name: name.endswith(CHECKSUMS))))
        for number, names in files.items()
    ]
    return sorted(found, reverse=True)


def _rename_to_new(source, target):
    """Renames a file, or removes it if the target exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not target.exists():
            os.replace(source, target)
    source.unlink(missing_ok=True)


def _link(source, target):
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
