"""Hours and dollars of published trainings, predicted from their epochs and their machines.

Images are taken to have 224 pixels where the table does not say; an entry that trained on smaller
ones for a part of its epochs comes out too slow. Several of DAWNBench's entries did (progressive
resizing), with schedules that the table does not state: dollars are off by about 63 % on average,
far more than the 15 % that are the goal.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from kdist.planner.constants import Constants, known_constants
from kdist.planner.machines import Machine
from kdist.planner.published import PublishedRate, column_names, precision_name
from kdist.planner.tables import Reader, count, maybe, number, read_own_table, read_table, text
from kdist.planner.validation import specified_rate

IMAGENET_EXAMPLES = 1_281_167

_COLUMNS: Mapping[str, Reader] = {
    "model": text,
    "framework": text,
    "hardware": text,
    "n_gpus": count,
    "epochs_to_93_top5": number,
    "hours": number,
    "usd_per_hour": maybe(number),
}
# What published entries do not say, and kdist's own table does.
_ADDED: Mapping[str, Reader] = {
    "machine": text,
    "local_batch": number,
    "precision": precision_name,
    "pixels": maybe(count),
}
_SAME = ("model", "framework", "hardware")


@dataclasses.dataclass(frozen=True)
class Trained:
    """One training, as published and as predicted.

    Attributes:
        name: model, framework and hardware.
        hours: as published.
        predicted_hours: given its epochs.
        usd_per_hour: of all machines; None where there is no price.
    """

    name: str
    hours: float
    predicted_hours: float
    usd_per_hour: float | None

    @property
    def error(self) -> float:
        """Of hours, and so of dollars, relative to what is published."""
        return self.predicted_hours / self.hours - 1


def check_trainings(
    path: str | os.PathLike,
    machines: Mapping[str, Machine],
    constants: Constants | None = None,
) -> list[Trained]:
    """Predicts all rows of a table like kdist's own `tables/time_to_accuracy.csv`.

    Args:
        path: of the table. The columns machine, local_batch, precision and pixels may be absent:
            they are then taken from the row of kdist's own table with the same model, framework and
            hardware.
        machines: by name.
        constants: of exchange and input; those that come with kdist by default.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a cell is wrong, a machine or model is not known, or a row
            of a table with absent columns is not in kdist's own.
    """
    known = constants or known_constants()
    return [_trained(row, machines, known) for row in _rows(path)]


def dollars_error(trained: Sequence[Trained]) -> float:
    """Mean absolute relative error in dollars of those that have a price; NaN where none has."""
    priced = [abs(one.error) for one in trained if one.usd_per_hour is not None]
    return sum(priced) / len(priced) if priced else float("nan")


def trainings_text(trained: Sequence[Trained]) -> str:
    """A line for each training, and the mean error in dollars."""
    lines = [f"{'':60}{'published':>12}{'predicted':>12}{'off':>8}"]
    for one in trained:
        unit = one.usd_per_hour
        shown = [hours * (unit or 1) for hours in (one.hours, one.predicted_hours)]
        cells = [f"${value:,.2f}" if unit else f"{value:.3f} h" for value in shown]
        lines.append(f"{one.name[:58]:60}{cells[0]:>12}{cells[1]:>12}{100 * one.error:+7.0f} %")
    return "\n".join([*lines, f"dollars: {100 * dollars_error(trained):.1f} % off on average"])


def _rows(path):
    names = column_names(path)
    present = {name: read for name, read in _ADDED.items() if name in names}
    rows = read_table(path, {**_COLUMNS, **present})
    absent = [name for name in _ADDED if name not in names]
    return [_completed(row, absent, path) for row in rows] if absent else rows


def _completed(row, absent, path):
    """A row with what is absent taken from kdist's own table."""
    for own in read_own_table("time_to_accuracy.csv", {**_COLUMNS, **_ADDED}):
        if all(own[name] == row[name] for name in _SAME):
            return {**row, **{name: own[name] for name in absent}}
    raise ValueError(
        f"{os.fspath(path)} lacks the columns {', '.join(absent)}, and kdist's own table has no "
        f"row for {', '.join(row[name] for name in _SAME)}; add these columns"
    )


def _trained(row, machines, constants):
    model = row["model"]
    rate = PublishedRate(
        machine=row["machine"],
        model=f"{model} {row['pixels']}px" if row["pixels"] else model,
        framework=row["framework"],
        gpu="",
        devices=row["n_gpus"],
        local_batch=row["local_batch"],
        rate=row["epochs_to_93_top5"] * IMAGENET_EXAMPLES / row["hours"] / 3600,
        precision=row["precision"],
        data="real",
        note="",
    )
    predicted = specified_rate(rate, machines, constants)
    hours = row["epochs_to_93_top5"] * IMAGENET_EXAMPLES / predicted / 3600
    name = f"{model}, {row['framework']}, {row['hardware']}"
    return Trained(name, row["hours"], hours, row["usd_per_hour"])
