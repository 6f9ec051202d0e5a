"""Run directory: configuration, metrics, checkpoints, and summary of one training run.

run = RunDirectory.create("runs/first", config={"model": "resnet18", "epochs": 1})
run.write_summary({"test_accuracy": 0.87})

runs/first/
  config.json       configuration; its presence marks a run
  metrics.jsonl     metrics of training, one JSON object per line
  devices.jsonl     utilization, temperature, and memory of devices, one JSON object per line
  checkpoints/      checkpoints and saved models
  best.keras        the best model in validation, if asked for
  summary.json      results, written once at the end
"""

import contextlib
import datetime
import errno
import json
import logging
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.json_text import parse_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger(__name__)

# Environment variable with the run directory that a launcher chose for all tasks of a job.
RUN_DIR = "KDIST_RUN_DIR"

# Directory of runs whose directory is not given.
RUNS = pathlib.Path("runs")

# The best model in validation.
BEST = "best.keras"

# On a disk with less, nothing useful can be written: a report alone has more.
_MIN_FREE_BYTES = 10**6

# A checkpoint's name is this prefix and its step. The last of its files makes it complete.
CHECKPOINT_PREFIX, CHECKSUMS = "step-", "checksums.json"


class FileLock:
    """Exclusive lock on an existing file or directory, until `release` or the end of the process.

    Raises:
        BlockingIOError: this or another process holds the lock.
    """

    def __init__(self, path: str | os.PathLike):
        self._descriptor: int | None = None
        if fcntl is None:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def holds(self, path: str | os.PathLike) -> bool:
        """Returns whether the path is still that of the locked file."""
        return self._descriptor is None or is_open_at(self._descriptor, path)

    def release(self):
        """Releases the lock."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also if a forked child has a copy
            os.close(self._descriptor)
            self._descriptor = None


def is_open_at(descriptor: int, path: str | os.PathLike) -> bool:
    """Returns whether an open file still has a path; not if it was deleted, moved, or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def new_run_path(name: str) -> pathlib.Path:
    """Returns a path below runs/ with the current time and `name`.

    Runs of a W&B sweep share a directory there, so that a report can compare them.
    """
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    sweep = os.environ.get("WANDB_SWEEP_ID")  # set by wandb's agent
    return (RUNS / f"sweep-{sweep}" if sweep else RUNS) / f"{now}-{name}"


@contextlib.contextmanager
def replacing(path: str | os.PathLike, is_new: bool = False) -> Iterator[Any]:
    """Opens a text file that gets its name when it is complete, and never if writing fails.

    Args:
        path: the file to write or to replace.
        is_new: whether to fail if the file exists. Defaults to False.

    Yields:
        The file, open for writing.

    Raises:
        FileExistsError: `is_new`, and the file exists; also if another process creates it now.
        OSError: the file cannot be written; the error names it.

    Example:

        with replacing("runs/first/notes.json") as file:
            json.dump(notes, file)
    """
    path = pathlib.Path(path)
    # File names may be invalid Unicode, which the report shows as bytes.
    options: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
    if path.exists() and not path.is_file():  # such as /dev/stdout, which must not be replaced
        with open(path, "w", **options) as file:
            yield file
        return
    unfinished = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(unfinished, "x", **options) as file:
            yield file
        if is_new:
            _create(path, unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        # A full disk is reported without a name, and the others name the temporary file.
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _create(path, unfinished):
    """Claims a name; unlike a rename, this fails if the file exists."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: for a moment the file is empty
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def check_local(path: str | os.PathLike):
    """Raises a ValueError if a path is a URL such as gs://bucket/run.

    Python would write to a local directory named "gs:".
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise ValueError(
            f"{os.fspath(path)} is a URL; give a path of the file system. URLs are supported by "
            "--dataset, --data_dir, --run_dir, --mirror, --resume, and --export of kdist train, by "
            "kdist export, kdist serve, kdist report, and kdist.callbacks.Checkpoint(mirror=…)"
        )


def write_text(path: str | os.PathLike, text: str):
    """Writes a text file, which is complete, or keeps what it had before; see `replacing`."""
    with replacing(path) as file:
        file.write(text)


def check_writable(path: str | os.PathLike):
    """Raises an OSError if a file or directory cannot be created at a path, as far as is known.

    Directories that are missing on the way to it are ignored. Nothing is created.
    """
    parent = os.path.abspath(path)
    while not os.path.lexists(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    if os.path.isdir(parent) and not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write in {parent}; give another path")
    free = _free_bytes(parent)
    if free is not None and free < _MIN_FREE_BYTES:
        raise OSError(
            f"no space left in {parent} ({free / 1e6:.1f} MB free); free disk space, or give "
            "another path"
        )
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:  # a file in place of a directory, a name that is too long, …
        raise type(error)(
            f"{os.fspath(path)} cannot be written ({error.strerror}); give another path"
        ) from error


def _free_bytes(path):
    """Returns the bytes that this user may still write on the disk of a path; None if unknown."""
    disk = shutil.disk_usage(path)
    if not disk.total:  # a pipe, or some file systems of networks
        return None
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # may also use what is reserved
    return disk.total - disk.used if is_root else disk.free


class RunDirectory:
    """Paths and files of a run in the directory `path`; `create` starts a new one.

    Raises:
        ValueError: the path is a URL.
    """

    def __init__(self, path: str | os.PathLike):
        check_local(path)
        self.path = pathlib.Path(path)
        self._config_lock: FileLock | None = None  # in the process that writes the run

    def is_interrupted(self) -> bool:
        """Returns whether the directory holds a run that has not finished."""
        return self.config.exists() and not self.summary.exists()

    def check_available(self):
        """Raises a FileExistsError if the directory holds a run, or is a file."""
        if self.config.exists() or (self.path.exists() and not self.path.is_dir()):
            raise self._already_exists()

    def check_same_config(self, config: Mapping[str, Any], names: Sequence[str]):
        """Raises a ValueError unless the existing run has the same configuration.

        Values of `names` must be equal, where the existing run has them. A damaged configuration is
        logged: `create` writes it again, and checkpoints of the run are used.
        """
        try:
            existing = self.read_config()
        except ValueError as error:
            _logger.warning(
                "%s is damaged (%s), as after a full disk or a power failure. It is written again "
                "with the flags of now; the run continues from its newest checkpoint, if any",
                self.config,
                error,
            )
            return
        for name in names:
            if name in existing and existing[name] != config.get(name):
                raise ValueError(
                    f"{self.path} holds a run with --{name}={existing[name]}, but now it is "
                    f"{config.get(name)}; pass the same flags to resume it, or another --run_dir"
                )

    @classmethod
    def create(
        cls, path: str | os.PathLike, config: Mapping[str, Any], resume: bool = False
    ) -> "RunDirectory":
        """Creates the directory of a new run and writes `config` into it.

        No other process can use it until this process ends.

        Args:
            path: the directory.
            config: configuration of the run.
            resume: whether the directory holds a run to resume. Defaults to False.

        Returns:
            The `RunDirectory`.

        Raises:
            FileExistsError: the directory holds another run, is a file, or is in use by another
                process.
            OSError: the directory cannot be written.
        """
        run = cls(path)
        if resume:
            run._lock()
            run._mend_config(config)
            return run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            # One of two runs that start at the same moment fails.
            with replacing(run.config, is_new=True) as file:
                json.dump(finite(config), file, indent=2)
        except FileExistsError as error:
            raise run._already_exists() from error
        except OSError as error:
            raise OSError(
                f"cannot write the run directory {run.path} ({error.strerror}); use another "
                "--run_dir, with free space and the permission to write"
            ) from error
        run._lock()
        return run

    def read_config(self) -> dict[str, Any]:
        """Returns the configuration.

        Raises:
            ValueError: it is no JSON object.
        """
        config = parse_json(self.config.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it is JSON, but {type(config).__name__} instead of an object")
        return config

    def _mend_config(self, config):
        """Writes a damaged configuration again, while the run is locked."""
        try:
            self.read_config()
        except ValueError:
            self._replace_config(config)

    def _replace_config(self, config):
        """Writes the configuration; a lock of this process passes to the new file."""
        lock = self._config_lock
        with replacing(self.config) as file:
            json.dump(finite(config), file, indent=2)
        if lock is not None:
            self._lock()
            lock.release()

    def _lock(self):
        """Locks the run's configuration until the process ends, even if it is killed."""
        try:
            self._config_lock = FileLock(self.config)
        except BlockingIOError as error:
            raise FileExistsError(
                f"another process is using {self.path}; wait for it, or use another --run_dir"
            ) from error

    def check_intact(self):
        """Raises a FileNotFoundError if the directory of `create` was lost in the meantime."""
        if self._config_lock is not None and not self._config_lock.holds(self.config):
            raise FileNotFoundError(
                errno.ENOENT,
                "the run's file was deleted, moved, or replaced while the run continued. What the "
                "run wrote before is not in its directory; train again, in another --run_dir",
                os.fspath(self.config),
            )

    @property
    def config(self) -> pathlib.Path:
        """Path of the configuration, a JSON file."""
        return self.path / "config.json"

    @property
    def metrics(self) -> pathlib.Path:
        """Path of the metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def devices(self) -> pathlib.Path:
        """Path of the device samples, one JSON object per line."""
        return self.path / "devices.jsonl"

    @property
    def summary(self) -> pathlib.Path:
        """Path of the results, a JSON file."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Directory of checkpoints and saved models."""
        return self.path / "checkpoints"

    @property
    def best(self) -> pathlib.Path:
        """Path of the best model in validation, a `.keras` file."""
        return self.path / BEST

    @property
    def report(self) -> pathlib.Path:
        """Path of the report, a web page."""
        return self.path / "report.html"

    def discard_after(self, step: int):
        """Removes measurements after a step, which a resumed run repeats, and incomplete lines."""
        for path in (self.metrics, self.devices):
            if not path.exists():
                continue
            lines = path.read_bytes().splitlines(keepends=True)
            kept = b"".join(line for line in lines if _is_up_to(step, line))
            write_text(path, kept.decode())

    def update_config(self, config: Mapping[str, Any]):
        """Writes `config.json`, or adds values to it, unless a program holds the run's lock.

        Raises:
            OSError: the file cannot be written.
        """
        if self._config_lock is not None:
            return
        existing: dict[str, Any] = {}
        if self.config.exists():
            try:
                FileLock(self.config).release()
                existing = self.read_config()
            except BlockingIOError:
                return
            except ValueError:
                pass  # damaged; it is written again
        if {**existing, **(config := finite(config))} != existing or not self.config.exists():
            self._replace_config({**existing, **config})

    def record_workers(self, step: int, workers: int, planned_workers: int) -> dict[str, Any]:
        """Records in `config.json` how many of the planned workers train from a step on.

        Entries from this step on are replaced, since a resumed run repeats these steps.

        Args:
            step: the step after which they train; 0 at the beginning.
            workers: number of workers.
            planned_workers: number of workers when none is missing.

        Returns:
            The values in the configuration: `planned_workers`, and `workers_from_step`, the number
            of workers by the step from which on it holds, such as `{"0": 4, "120": 3}`.

        Raises:
            OSError: the file cannot be written.
            ValueError: the file is damaged.
        """
        config = self.read_config()
        before = config.get("workers_from_step", {}).items()
        numbers = {first: number for first, number in before if int(first) < step}
        if not numbers or list(numbers.values())[-1] != workers:
            numbers[str(step)] = workers
        recorded = {"planned_workers": planned_workers, "workers_from_step": numbers}
        if {**config, **recorded} != config:
            self._replace_config({**config, **recorded})
        return recorded

    def write_summary(self, summary: Mapping[str, Any]):
        """Writes `summary.json`; the file is complete, or missing.

        Raises:
            OSError: the file cannot be written, or the directory was deleted, moved, or replaced.
        """
        self.check_intact()
        with replacing(self.summary) as file:
            json.dump(finite(summary), file, indent=2)

    def record_trial(self, facts: Mapping[str, Any], results: Mapping[str, Any] | None = None):
        """Records a trial of a search, which `kdist report` compares with the others.

        The directory is created if missing. One that cannot be written is logged, and the search
        continues.

        Args:
            facts: `name` of the search, `trial`, its `state`, and `parameters`; where known
                `objective`, its `direction`, `value`, and `failure`.
            results: the results, unless the run has written some. Defaults to None.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)  # a trial may fail before it writes
            self.update_config({"search": facts})
            if results is not None and not self.summary.exists():
                self.write_summary(results)
        except OSError as error:
            _logger.warning(
                "the result of trial %s is not in %s: %s", facts["trial"], self.path, error
            )

    def _already_exists(self):
        return FileExistsError(
            f"{self.path} already holds {self._describe_content()}; use another --run_dir, or move "
            "the old one away"
        )

    def _describe_content(self):
        if not self.path.is_dir():
            return "a file"
        state = "a finished run" if self.summary.exists() else "another run"
        try:
            config = self.read_config()
            return f"{state} ({config['model']} on {config['dataset']})"
        except (OSError, ValueError, KeyError):
            return state


def checkpoint_name(step: int) -> str:
    """Returns the name of the checkpoint after a step, such as `step-0000000150`."""
    return f"{CHECKPOINT_PREFIX}{step:010d}"


def checkpoint_step(path: pathlib.Path) -> int | None:
    """Returns the step of a checkpoint, such as 150 of `step-0000000150`; None for other names."""
    number = path.name.removeprefix(CHECKPOINT_PREFIX)
    is_one = path.name.startswith(CHECKPOINT_PREFIX) and number.isdecimal()
    return int(number) if is_one else None


def newest_step(checkpoints: pathlib.Path) -> int | None:
    """Returns the step of the newest checkpoint in a directory; None if there is none."""
    steps = map(checkpoint_step, checkpoints.glob("*"))
    return max((step for step in steps if step is not None), default=None)


def _is_up_to(step, line):
    try:
        record = json.loads(line)
        return line.endswith(b"\n") and (record.get("step") or 0) <= step
    except (ValueError, AttributeError):
        return False


def finite(value):
    """Returns `value` with NaN and infinities replaced by None, which JSON can represent."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def measured_saving(checkpoints: pathlib.Path) -> tuple[float, float] | None:
    """Returns bytes and seconds that saving took, as the newest checkpoint of a directory records.

    None if there is no checkpoint, or an earlier version has written it.
    """
    step = newest_step(checkpoints)
    if step is None:
        return None
    try:
        state = parse_json((checkpoints / checkpoint_name(step) / "state.json").read_bytes())
        saving = state["saving"]
        return float(saving["bytes"]), float(saving["seconds"])
    except (OSError, ValueError, TypeError, LookupError):
        return None
