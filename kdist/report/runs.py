"""Reads run directories, including unfinished and damaged ones, and computes the cost of runs."""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.mirror.store import fetched, is_url, local_directory
from kdist.report.records import (
    NO_RECORDS,
    Records,
    number,
    parse_object,
    read_records,
    read_text,
)
from kdist.run_directory import RunDirectory

# US dollars per hour for all machines of a run: one price for every run, or by the run's name.
Prices = float | Mapping[str, float] | None


# Files that a report is made of.
FILES = ("config.json", "metrics.jsonl", "devices.jsonl", "summary.json")
# Name in the summary -> name in the group `batch` of the configuration.
_BATCH_GROUP = {
    "global_batch_size": "global",
    "local_batch_size": "local",
    "num_replicas": "replicas",
    "accumulate": "accumulate",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of one run directory.

    Attributes:
        name: name of the directory, with as many parents as distinguish it from other runs.
        config: configuration of the run.
        summary: results; empty while the run is unfinished.
        records: kind -> records of `metrics.jsonl`.
        devices: (host, device) -> records of `devices.jsonl`; devices are named as in "gpu/0".
        notes: descriptions of missing and damaged parts, and of steps without some workers.

    Example:

        run = kdist.report.read_run("runs/first")
        run.summary.get("test_accuracy"), run.metrics("epoch").column("val_loss"), run.notes
    """

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    records: Mapping[str, Records]
    devices: Mapping[tuple[str, str], Records]
    notes: list[str]

    @property
    def finished(self) -> bool:
        """True if the run has written its summary."""
        return bool(self.summary)

    def get(self, key: str) -> Any:
        """Returns a value of the summary, or else of the configuration; None without either."""
        value = self.summary.get(key)
        if value is None:
            value = self.config.get(key)
        if value is None and key in _BATCH_GROUP and isinstance(self.config.get("batch"), dict):
            value = self.config["batch"].get(_BATCH_GROUP[key])
        return value

    def metrics(self, kind: str) -> Records:
        """Returns the records of `metrics.jsonl` of a kind ("train", "epoch", "timing")."""
        return self.records.get(kind, NO_RECORDS)

    def figure(self, key: str) -> int | float | None:
        """Returns a finite number of the summary, else None."""
        return number(self.summary.get(key))

    @property
    def num_devices(self) -> int | None:
        """Number of devices of the run on all hosts; None if unknown."""
        devices = self.summary.get("devices")
        listed = len(devices) if isinstance(devices, list) else 0
        # A task of several may list only its own devices, but it knows the number of replicas.
        return max(listed, int(self.figure("num_replicas") or 0)) or None

    @property
    def seconds(self) -> float | None:
        """Duration of the run, or the training time of an unfinished run; None if unknown."""
        total = self.figure("total_seconds")
        if total is not None:
            return total
        last = [r.points("seconds", "seconds")[0].max(initial=0) for r in self.records.values()]
        return float(max(last, default=0)) or None


def read_runs(directories: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads several run directories and gives the runs distinct names.

    Args:
        directories: at least one run directory, directory of runs, or URL of a mirror.

    Returns:
        The runs in the same order, those of one directory by name.

    Raises:
        ValueError: the list is empty, a directory appears twice, or a file is damaged.
        FileNotFoundError: a directory does not exist or holds no run.
        OSError: a file cannot be read.

    Example:

        runs = kdist.report.read_runs(["runs/first", "runs/second"])
        {run.name: run.summary.get("test_accuracy") for run in runs}
    """
    if isinstance(directories, str | os.PathLike):
        raise ValueError(f"pass a list of run directories: [{os.fspath(directories)!r}]")
    if not directories:
        raise ValueError("no run; name at least one run directory")
    directories = expand(directories)
    paths = [local_directory(directory).resolve() for directory in directories]
    for directory, path in zip(directories, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{directory} was given twice; name each run directory once")
    runs = [read_run(directory) for directory in directories]
    names = _distinct_endings(paths)
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def expand(directories: Sequence[str | os.PathLike]) -> list[str | os.PathLike]:
    """Returns the directories, with the runs in a directory that is no run itself in its place."""
    return [run for directory in directories for run in _runs_of(directory)]


def _runs_of(directory):
    if is_url(directory) or _holds_run(RunDirectory(directory)):
        return [directory]
    try:
        children = sorted(RunDirectory(directory).path.iterdir(), key=lambda p: _natural([p.name]))
    except OSError:  # explained where the run is read
        return [directory]
    return [path for path in children if _holds_run(RunDirectory(path))] or [directory]


def _holds_run(files):
    return any(path.is_file() for path in (files.config, files.metrics, files.summary))


def _distinct_endings(paths):
    endings = (["/".join(path.parts[-n:]) for path in paths] for n in itertools.count(1))
    return next(names for names in endings if len(set(names)) == len(names))


def read_run(directory: str | os.PathLike) -> Run:
    """Reads a run directory; missing and incomplete parts become notes.

    Args:
        directory: the run directory, or the URL of its mirror, such as gs://bucket/runs/a.

    Returns:
        The run.

    Raises:
        FileNotFoundError: the directory does not exist or holds no run.
        ValueError: a file is damaged.
        OSError: a file cannot be read.

    Example:

        run = kdist.report.read_run("runs/first")
        run.metrics("epoch").column("val_loss")
    """
    if is_url(directory):
        with fetched(os.fspath(directory), FILES) as path:
            return _read_run(RunDirectory(path), directory)
    return _read_run(RunDirectory(directory), directory)


def _read_run(files, given):
    """Returns the run; `given` is its path or URL as the user wrote it."""
    if not _holds_run(files):
        raise FileNotFoundError(_no_run_message(files.path, given))
    notes: list[str] = []
    config = _config(files.config, notes)
    summary = _summary(files.summary, notes)
    notes += _missing_workers(config)
    metrics = read_records(files.metrics, ("kind",), notes)
    notes += _nonfinite_losses(metrics)
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


def _missing_workers(config):
    """Returns sentences such as "3 of 4 workers from step 120 to 180"."""
    numbers, planned = config.get("workers_from_step"), config.get("planned_workers")
    if not isinstance(numbers, dict):
        return []
    ends = [*(f" to {step}" for step in list(numbers)[1:]), ""]
    return [
        f"{number} of {planned} workers from step {step}{end}"
        for (step, number), end in zip(numbers.items(), ends, strict=True)
        if number != planned
    ]


def _nonfinite_losses(metrics):
    """Returns a sentence for each loss that is NaN or infinite, which plots leave out."""
    steps: dict[str, list[float]] = {}
    for records in metrics.values():
        for name, position in records.nonfinite.items():
            steps.setdefault(name, []).append(records.column("step")[position])
    sentences = []
    for name, found in steps.items():
        known = [step for step in found if math.isfinite(step)]
        where = f", first recorded at step {min(known):.0f}" if known else ""
        words = "validation loss" if name == "val_loss" else "loss"
        sentences.append(f"the {words} is NaN or infinite{where}")
    return sentences


def _natural(texts):
    """Returns a sort key that puts gpu/10 after gpu/9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", "/".join(texts))]


def _no_run_message(path, given):
    if not path.exists():
        found = "it does not exist"
    elif not path.is_dir():
        found = "it is a file"
    else:
        found = "it has no config.json, metrics.jsonl, or summary.json, and holds no runs"
    return f"{given} is no run directory: {found}. Pass the --run_dir of a run of `kdist train`"


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
    # The run writes it atomically, but a copy of the directory may be incomplete.
    if not text.rstrip().endswith(("}", "]")):
        notes.append("summary.json is empty or incomplete and was skipped; copy it again")
        return {}
    return parse_object(text, str(path))


def parse_prices(texts: Sequence[str]) -> Prices:
    """Parses the values of `--price_usd_per_hour`: one number, or NAME=number for each run.

    Args:
        texts: values of the flag.

    Returns:
        US dollars per hour of all machines of a run: one price, prices by name, or None.

    Raises:
        ValueError: a text is neither a number nor NAME=number, or both forms are mixed.

    Example:

        >>> parse_prices(["first=2.1", "second=0.4"])
        {'first': 2.1, 'second': 0.4}
    """
    named = [text.rpartition("=") for text in texts]
    if not texts:
        return None
    if len(texts) == 1 and not named[0][1]:
        return _price(texts[0])
    for name, _, price in named:
        if not name:
            raise ValueError(
                f"--price_usd_per_hour: {price!r} has no name; give one number for all runs, or "
                "NAME=2.1,NAME2=0.4 with the names of the runs"
            )
    return {name: _price(price) for name, _, price in named}


def _price(text):
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ValueError(
            f"--price_usd_per_hour: {text!r} is no price; give US dollars per hour, such as 2.1, "
            "or NAME=2.1,NAME2=0.4"
        )
    return price


def check_names(prices: Prices, runs: Sequence[Run]):
    """Raises a ValueError if a price is for an unknown run."""
    names = [run.name for run in runs]
    for name in prices if isinstance(prices, Mapping) else ():
        if name not in names:
            raise ValueError(
                f"--price_usd_per_hour: there is no run {name!r}; the runs are {', '.join(names)}"
            )


def cost_usd(run: Run, prices: Prices) -> float | None:
    """Returns price times hours, or else the cost in the summary; None if unknown."""
    price = prices.get(run.name) if isinstance(prices, Mapping) else prices
    if price is None:
        return run.figure("cost_usd")
    return None if run.seconds is None else price * run.seconds / 3600
