"""Reads run directories, also those of runs that go on, were killed, or are damaged.

run = read_run("runs/first")
run.summary.get("test_accuracy"), run.series("epoch", "val_loss"), run.notes
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from kdist.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run directory holds.

    Attributes:
        name: the directory's name, with as many parents as tell it from other runs.
        config: what was asked for.
        summary: what came out; empty while the run goes on.
        records: the lines of `metrics.jsonl`.
        notes: what is missing or damaged, in words.
    """

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    notes: list[str]

    @property
    def finished(self) -> bool:
        """Whether the run wrote down what came out."""
        return bool(self.summary)

    def get(self, key: str) -> Any:
        """What the summary says of `key`, or else the configuration; None if neither does."""
        value = self.summary.get(key)
        return self.config.get(key) if value is None else value

    def series(self, kind: str, value: str) -> tuple[list, list]:
        """Examples seen, and `value` at them, from the records of `kind` that have both."""
        points = [
            (number(record.get("examples")), number(record.get(value)))
            for record in self.records
            if record.get("kind") == kind
        ]
        points = [point for point in points if None not in point]
        return [examples for examples, _ in points], [measured for _, measured in points]


def number(value: Any) -> int | float | None:
    """`value` if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


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
    config = _object(files.config, "config.json is missing", notes)
    summary = _object(files.summary, "not finished: there is no summary.json yet", notes)
    return Run(files.path.resolve().name, config, summary, _records(files.metrics, notes), notes)


def _what_is_no_run(path):
    if not path.exists():
        found = "there is nothing of this name"
    elif not path.is_dir():
        found = "it is a file"
    else:
        found = "it holds neither config.json nor metrics.jsonl nor summary.json"
    return f"{path} is no run directory: {found}. Give the --run_dir of a run of scripts/train.py"


def _object(path: pathlib.Path, missing: str, notes: list[str]):
    if not path.is_file():
        notes.append(missing)
        return {}
    return _parse(_read(path), path)


def _records(path, notes):
    if not path.is_file():
        notes.append("metrics.jsonl is missing")
        return []
    # Only "\n" ends a record: str.splitlines would also split at characters that JSON allows.
    lines = _read(path).rstrip("\n").split("\n")
    if not _is_json(lines[-1]) and lines.pop():
        notes.append("the last line of metrics.jsonl is cut short and was left out")
    return [_parse(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line]


def _read(path):
    try:
        # A line cut within a character is as torn as any other; it must not stop the reading.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OSError(
            f"cannot read {path} ({error.strerror}); make it readable, or leave this run out"
        ) from error


def _is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parse(text, place):
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}); leave this run out, or mend it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place} holds no JSON object; leave this run out, or mend it")
    return value
