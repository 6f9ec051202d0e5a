"""The directory of one run: what was asked for, what happened, what came out.

run = RunDirectory.create("runs/first", config={"model": "resnet18", "epochs": 1})
run.write_summary({"test_accuracy": 0.87})

runs/first/
  config.json       what the run was asked to do; its presence marks a run
  metrics.jsonl     one JSON object a line, as training goes on
  devices.jsonl     the same of the devices: how busy, how hot, how full
  checkpoints/      saved models
  summary.json      what came out; written once, at the end
"""

import datetime
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.locks import Lock

# An environment variable: the run directory that a launcher has chosen for all tasks of a job.
RUN_DIR = "KDIST_RUN_DIR"

# What names of checkpoints begin with; then the step.
CHECKPOINT_PREFIX = "step-"


def new_path(name: str) -> pathlib.Path:
    """A path under runs/ that says when, and `name`."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return pathlib.Path("runs") / f"{now}-{name}"


class RunDirectory:
    """Paths and files of a run; `create` makes a new one.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def holds_unfinished(self) -> bool:
        """Whether there is a run in it that has not come to its end."""
        return self.config.exists() and not self.summary.exists()

    def check_is_free(self):
        """Raises a FileExistsError if the directory holds a run, or is a file."""
        if self.config.exists() or (self.path.exists() and not self.path.is_dir()):
            raise self._taken()

    def check_goes_on(self, config: Mapping[str, Any], names: Sequence[str]):
        """Raises a ValueError unless the run in it was asked for the same.

        Args:
            config: what is asked for now.
            names: what of it has to be the same, if the run's program knew of it.
        """
        before = json.loads(self.config.read_text(encoding="utf-8"))
        for name in names:
            if name in before and before[name] != config.get(name):
                raise ValueError(
                    f"{self.path} holds a run with --{name}={before.get(name)}, and this is "
                    f"{config.get(name)}; give the same flags to go on with it, or another "
                    "--run_dir"
                )

    @classmethod
    def create(
        cls, path: str | os.PathLike, config: Mapping[str, Any], goes_on: bool = False
    ) -> "RunDirectory":
        """Makes the directory of a new run and writes `config` into it.

        While this process lives no other can take it.

        Args:
            path: the directory.
            config: what the run was asked to do.
            goes_on: with a run that is in it already.

        Raises:
            FileExistsError: the directory holds another run, is a file, or another process is at
                work in it.
            OSError: it cannot be written.
        """
        run = cls(path)
        if goes_on:
            run._lock()
            return run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            # Made exclusively: of two runs that start at the same moment, one is refused.
            with open(run.config, "x", encoding="utf-8") as file:
                json.dump(finite(config), file, indent=2)
        except FileExistsError as error:
            raise run._taken() from error
        except OSError as error:
            raise OSError(
                f"cannot write the run directory {run.path} ({error.strerror}); take a --run_dir "
                "that you may write to"
            ) from error
        run._lock()
        return run

    def _lock(self):
        """Holds the run's config until the process ends, in whatever way."""
        try:
            self._lock_held = Lock(self.config)
        except BlockingIOError as error:
            raise FileExistsError(
                f"another process is at work in {self.path}; let it end, or take another --run_dir"
            ) from error

    @property
    def config(self) -> pathlib.Path:
        """What the run was asked to do."""
        return self.path / "config.json"

    @property
    def metrics(self) -> pathlib.Path:
        """One JSON object a line, as training goes on."""
        return self.path / "metrics.jsonl"

    @property
    def devices(self) -> pathlib.Path:
        """One JSON object a line: what one device did at one moment."""
        return self.path / "devices.jsonl"

    @property
    def summary(self) -> pathlib.Path:
        """What came out."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> pathlib.Path:
        """The directory of saved models."""
        return self.path / "checkpoints"

    @property
    def report(self) -> pathlib.Path:
        """The web page about the run."""
        return self.path / "report.html"

    def forget_after(self, step: int):
        """Leaves out what was measured after a step, which a run that goes on from it makes again.

        And lines that are not whole: of a process that was killed. Others are as they were.
        """
        for path in (self.metrics, self.devices):
            if not path.exists():
                continue
            lines = path.read_bytes().splitlines(keepends=True)
            kept = b"".join(line for line in lines if _is_up_to(step, line))
            unfinished = path.with_name(f".{path.name}-unfinished")
            unfinished.write_bytes(kept)
            os.replace(unfinished, path)

    def write_summary(self, summary: Mapping[str, Any]):
        """Writes `summary.json` whole or not at all."""
        unfinished = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path, prefix=".summary-", delete=False, encoding="utf-8"
            ) as file:
                unfinished = file.name
                json.dump(finite(summary), file, indent=2)
            # Readable by whom the user's umask says, not by the owner alone as temporary files are.
            if self.config.exists():
                os.chmod(unfinished, self.config.stat().st_mode)
            os.replace(unfinished, self.summary)
        except BaseException:
            if unfinished is not None:
                pathlib.Path(unfinished).unlink(missing_ok=True)
            raise

    def _taken(self):
        return FileExistsError(
            f"{self.path} already holds {self._what_is_there()}; take another --run_dir, or move "
            "the old one away"
        )

    def _what_is_there(self):
        if not self.path.is_dir():
            return "a file"
        state = "a finished run" if self.summary.exists() else "another run"
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
            return f"{state} ({config['model']} on {config['dataset']})"
        except (OSError, ValueError, KeyError):
            return state


def checkpoint_step(path: pathlib.Path) -> int | None:
    """The step of a checkpoint, such as 150 of `step-0000000150`; None for other names."""
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
    """`value` with NaN and infinities as None, which JSON can hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
