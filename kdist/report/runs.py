"""Reads run directories, also those of runs that go on, were killed, or are damaged.

run = read_run("runs/first")
run.summary.get("test_accuracy"), run.series("epoch", "val_loss"), run.notes
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from kdist.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run directory holds.

    Attributes:
        name: the directory's name.
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

    def series(self, kind: str, value: str) -> tuple[list, list]:
        """Examples seen, and `value` at them, from the records of `kind` that have both."""
        found = [
            (record["examples"], record[value])
            for record in self.records
            if record.get("kind") == kind
            and record.get("examples") is not None
            and record.get(value) is not None
        ]
        return [examples for examples, _ in found], [number for _, number in found]


def read_run(directory: str | os.PathLike) -> Run:
    """Reads a run directory; a missing or torn part is noted, not an error.

    Raises:
        FileNotFoundError: there is no such directory, or it holds no run.
        ValueError: a file in it is not what a run writes.
    """
    files = RunDirectory(directory)
    if not any(path.is_file() for path in (files.config, files.metrics, files.summary)):
        raise FileNotFoundError(
            f"{files.path} is no run directory: it holds neither config.json nor metrics.jsonl nor "
            "summary.json. Give a --run_dir of scripts/train.py"
        )
    notes: list[str] = []
    config = _object(files.config, "config.json is missing", notes)
    summary = _object(files.summary, "not finished: there is no summary.json yet", notes)
    return Run(files.path.resolve().name, config, summary, _records(files.metrics, notes), notes)


def _object(path: pathlib.Path, missing: str, notes: list[str]):
    if not path.is_file():
        notes.append(missing)
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); leave this run out, or mend it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; leave this run out, or mend it")
    return value


def _records(path, notes):
    if not path.is_file():
        notes.append("metrics.jsonl is missing")
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}, is no JSON ({error})") from error
            notes.append("the last line of metrics.jsonl is cut short and was left out")
    return [record for record in records if isinstance(record, dict)]
