"""Run directory: configuration, metrics, checkpoints, and summary of one training run.

run = RunDirectory.create("runs/first", config={"model": "resnet18", "epochs": 1})
run.write_summary({"test_accuracy": 0.87})

runs/first/
  config.json       configuration; its presence marks a run
  metrics.jsonl     metrics of training, one JSON object per line
  devices.jsonl     utilization, temperature, and memory of devices, one JSON object per line
  checkpoints/      checkpoints and saved models
  summary.json      results, written once at the end
"""

import datetime
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Environment variable with the run directory that a launcher chose for all tasks of a job.
RUN_DIR = "KDIST_RUN_DIR"

# A checkpoint's name is this prefix and its step.
CHECKPOINT_PREFIX = "step-"


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

    def release(self):
        """Releases the lock."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also if a forked child has a copy
            os.close(self._descriptor)
            self._descriptor = None


def new_run_path(name: str) -> pathlib.Path:
    """Returns a path below runs/ with the current time and `name`."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return pathlib.Path("runs") / f"{now}-{name}"


class RunDirectory:
    """Paths and files of a run in the directory `path`; `create` starts a new one."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def is_interrupted(self) -> bool:
        """Returns whether the directory holds a run that has not finished."""
        return self.config.exists() and not self.summary.exists()

    def check_available(self):
        """Raises a FileExistsError if the directory holds a run, or is a file."""
        if self.config.exists() or (self.path.exists() and not self.path.is_dir()):
            raise self._already_exists()

    def check_same_config(self, config: Mapping[str, Any], names: Sequence[str]):
        """Raises a ValueError unless the existing run has the same configuration.

        Values of `names` must be equal, where the existing run has them.
        """
        existing = json.loads(self.config.read_text(encoding="utf-8"))
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
            return run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            # The mode "x" fails for one of two runs that start at the same moment.
            with open(run.config, "x", encoding="utf-8") as file:
                json.dump(finite(config), file, indent=2)
        except FileExistsError as error:
            raise run._already_exists() from error
        except OSError as error:
            raise OSError(
                f"cannot write the run directory {run.path} ({error.strerror}); use a --run_dir "
                "that you have permission to write"
            ) from error
        run._lock()
        return run

    def _lock(self):
        """Locks the run's configuration until the process ends, even if it is killed."""
        try:
            self._config_lock = FileLock(self.config)
        except BlockingIOError as error:
            raise FileExistsError(
                f"another process is using {self.path}; wait for it, or use another --run_dir"
            ) from error

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
            unfinished = path.with_name(f".{path.name}-unfinished")
            unfinished.write_bytes(kept)
            os.replace(unfinished, path)

    def write_summary(self, summary: Mapping[str, Any]):
        """Writes `summary.json` atomically."""
        unfinished = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path, prefix=".summary-", delete=False, encoding="utf-8"
            ) as file:
                unfinished = file.name
                json.dump(finite(summary), file, indent=2)
            # Temporary files are private; give the file the permissions of the user's umask.
            if self.config.exists():
                os.chmod(unfinished, self.config.stat().st_mode)
            os.replace(unfinished, self.summary)
        except BaseException:
            if unfinished is not None:
                pathlib.Path(unfinished).unlink(missing_ok=True)
            raise

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
            config = json.loads(self.config.read_text(encoding="utf-8"))
            return f"{state} ({config['model']} on {config['dataset']})"
        except (OSError, ValueError, KeyError):
            return state


def checkpoint_step(path: pathlib.Path) -> int | None:
    """Returns the step of a checkpoint, such as 150 of `step-0000000150`; None for other names."""
    number = path.name.removeprefix(CHECKPOINT_PREFIX)
    is_one = path.name.startswith(CHECKPOINT_PREFIX) and number.isdecimal()
    return int(number) if is_one else None


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
