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
from collections.abc import Mapping
from typing import Any

# An environment variable: the run directory that a launcher has chosen for all tasks of a job.
RUN_DIR = "KDIST_RUN_DIR"


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

    def check_is_free(self):
        """Raises a FileExistsError if the directory holds a run, or is a file."""
        if self.config.exists() or (self.path.exists() and not self.path.is_dir()):
            raise self._taken()

    @classmethod
    def create(cls, path: str | os.PathLike, config: Mapping[str, Any]) -> "RunDirectory":
        """Makes the directory of a new run and writes `config` into it.

        Raises:
            FileExistsError: the directory holds another run, or is a file.
            OSError: it cannot be written.
        """
        run = cls(path)
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
        return run

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


def finite(value):
    """`value` with NaN and infinities as None, which JSON can hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
