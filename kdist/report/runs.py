"""Reads run directories, also those of runs that go on, were killed, or are damaged.

run = read_run("runs/first")
run.summary.get("test_accuracy"), run.metrics("epoch").column("val_loss"), run.notes
"""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.report.records import (
    NO_RECORDS,
    Records,
    number,
    parse_object,
    read_records,
    read_text,
)
from kdist.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run directory holds.

    Attributes:
        name: the directory's name, with as many parents as tell it from other runs.
        config: what was asked for.
        summary: what came out; empty while the run goes on.
        records: kind -> the lines of `metrics.jsonl` of this kind.
        devices: (host, device) -> its lines of `devices.jsonl`; a device's name is as "gpu/0".
        notes: what is missing or damaged, in words.
    """

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    records: Mapping[str, Records]
    devices: Mapping[tuple[str, str], Records]
    notes: list[str]

    @property
    def finished(self) -> bool:
        """Whether the run wrote down what came out."""
        return bool(self.summary)

    def get(self, key: str) -> Any:
        """What the summary says of `key`, or else the configuration; None if neither does."""
        value = self.summary.get(key)
        return self.config.get(key) if value is None else value

    def metrics(self, kind: str) -> Records:
        """The lines of `metrics.jsonl` of this kind ("train", "epoch", "timing"); maybe none."""
        return self.records.get(kind, NO_RECORDS)

    def figure(self, key: str) -> int | float | None:
        """A finite number of the summary, else None."""
        return number(self.summary.get(key))

    @property
    def num_devices(self) -> int | None:
        """How many devices the run trained on, on all hosts; None if it does not say."""
        devices = self.summary.get("devices")
        listed = len(devices) if isinstance(devices, list) else 0
        # A task of several may name its own devices only; it knows of all replicas.
        return max(listed, int(self.figure("num_replicas") or 0)) or None

    @property
    def seconds(self) -> float | None:
        """How long the run took, or, while it goes on, how long it has trained; None if unknown."""
        total = self.figure("total_seconds")
        if total is not None:
            return total
        last = [r.points("seconds", "seconds")[0].max(initial=0) for r in self.records.values()]
        return float(max(last, default=0)) or None


def read_runs(directories: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads several run directories; their names tell them apart.

    Raises:
        ValueError: none was given, one was given twice, or a file in one is not what a run writes.
        FileNotFoundError: there is no such directory, or it holds no run.
        OSError: a file cannot be read.
    """
    if isinstance(directories, str | os.PathLike):
        raise ValueError(f"give a list of run directories: [{os.fspath(directories)!r}]")
    if not directories:
        raise ValueError("no run was given; name at least one run directory")
    paths = [pathlib.Path(directory).resolve() for directory in directories]
    for directory, path in zip(directories, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{directory} was given twice; name each run directory once")
    runs = [read_run(directory) for directory in directories]
    names = _distinct_endings(paths)
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _distinct_endings(paths):
    endings = (["/".join(path.parts[-n:]) for path in paths] for n in itertools.count(1))
    return next(names for names in endings if len(set(names)) == len(names))


def read_run(directory: str | os.PathLike) -> Run:
    """Reads a run directory; a missing or torn part is noted, not an error.

    Raises:
        FileNotFoundError: there is no such directory, or it holds no run.
        ValueError: a file in it is not what a run writes.
        OSError: a file in it cannot be read.
    """
    files = RunDirectory(directory)
    if not any(path.is_file() for path in (files.config, files.metrics, files.summary)):
        raise FileNotFoundError(_what_is_no_run(files.path))
    notes: list[str] = []
    config = _config(files.config, notes)
    summary = _summary(files.summary, notes)
    metrics = read_records(files.metrics, ("kind",), notes)
    devices = read_records(files.devices, ("host", "device"), notes)
    in_order = sorted(devices, key=_natural)
    return Run(
        name=files.path.resolve().name,
        config=config,
        summary=summary,
        records={kind: records for (kind,), records in metrics.items()},
        devices={(host, device): devices[host, device] for host, device in in_order},
        notes=[note for note in notes if note != f"{files.devices.name} is missing"],
    )


def _natural(texts):
    """Sorts gpu/10 after gpu/9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", "/".join(texts))]


def _what_is_no_run(path):
    if not path.exists():
        found = "there is nothing of this name"
    elif not path.is_dir():
        found = "it is a file"
    else:
        found = "it holds neither config.json nor metrics.jsonl nor summary.json"
    return f"{path} is no run directory: {found}. Give the --run_dir of a run of scripts/train.py"


def _config(path, notes):
    if not path.is_file():
        notes.append("config.json is missing")
        return {}
    return parse_object(read_text(path), str(path))


def _summary(path, notes):
    if not path.is_file():
        notes.append("not finished: there is no summary.json yet")
        return {}
    text = read_text(path)
    # Written at once by the run itself; but a copy of the directory may have been cut short.
    if not text.rstrip().endswith(("}", "]")):
        notes.append("summary.json is empty or cut short and was left out; copy it again")
        return {}
    return parse_object(text, str(path))
