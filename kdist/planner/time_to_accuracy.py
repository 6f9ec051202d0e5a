"""Hours and dollars of published trainings, predicted from their epochs and their machines.

Several of DAWNBench's entries began on small images and ended on large ones. What is known of their
epochs stands in `tables/training_recipes.csv`; of other trainings, images are taken to have 224
pixels where the table does not say, and one that trained on smaller ones for a part of its epochs
comes out too slow. Dollars of kdist's own table are off by 13 % on average. Nothing is fitted to
their hours, but what makes trainings slow was looked for with these entries in view: expect more of
others.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from kdist.planner.constants import Constants, known_constants
from kdist.planner.machines import Machine
from kdist.planner.published import PublishedRate, column_names, precision_name
from kdist.planner.tables import Reader, count, maybe, number, read_own_table, read_table, text
from kdist.planner.training_recipes import known_recipes
from kdist.planner.training_time import IMAGENET_EXAMPLES, training_seconds
from kdist.planner.validation import specified_rate

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
        images: epochs by the size of their images, "13 of 128 px, 12 of 224 px"; "" where no more
            is known than the table says.
    """

    name: str
    hours: float
    predicted_hours: float
    usd_per_hour: float | None
    images: str = ""

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
            hardware. A row without pixels whose training is one of `known_recipes` is predicted by
            its recipe, with the batches and the precision that this has.
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
        line = f"{one.name[:58]:60}{cells[0]:>12}{cells[1]:>12}{100 * one.error:+7.0f} %"
        lines.append(f"{line}  {one.images}".rstrip())
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
    key = row["model"], row["framework"], row["hardware"], row["epochs_to_93_top5"]
    recipe = None if row["pixels"] else known_recipes().get(key)
    if recipe is None:
        seconds = _seconds_of_like_epochs(row, machines, constants)
    else:
        seconds = training_seconds(recipe, row["machine"], row["n_gpus"], machines, constants)
    name = ", ".join(row[name] for name in _SAME)
    images = "" if recipe is None else str(recipe)
    return Trained(name, row["hours"], seconds / 3600, row["usd_per_hour"], images)


def _seconds_of_like_epochs(row, machines, constants):
    """A training of which no more is known than its row: all epochs are alike."""
    model, examples = row["model"], row["epochs_to_93_top5"] * IMAGENET_EXAMPLES
    rate = PublishedRate(
        machine=row["machine"],
        model=f"{model} {row['pixels']}px" if row["pixels"] else model,
        framework=row["framework"],
        gpu="",
        devices=row["n_gpus"],
        local_batch=row["local_batch"],
        rate=examples / row["hours"] / 3600,
        precision=row["precision"],
        data="real",
        note="",
    )
    return examples / specified_rate(rate, machines, constants)
