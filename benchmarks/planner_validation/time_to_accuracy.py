"""Hours and dollars of published trainings, predicted from their epochs and their machines.

Several of DAWNBench's entries start with small images and end with large ones; their epochs are in
`tables/training_recipes.csv`. Other trainings are assumed to have images of 224 pixels unless the
table has their size, so that the prediction is too slow if some epochs use smaller images. The mean
error in dollars for kdist's own table is 13 %. No constant is fitted to these hours, but the causes
of slow trainings were studied with these entries, so expect larger errors for other trainings.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from benchmarks.planner_validation import TABLES
from benchmarks.planner_validation.published import PublishedRate, column_names, precision_name
from benchmarks.planner_validation.training_recipes import known_recipes
from benchmarks.planner_validation.training_time import IMAGENET_EXAMPLES, training_seconds
from benchmarks.planner_validation.validate import specified_rate
from kdist.planner.cost.constants import Constants, known_constants
from kdist.planner.tables.machines import Machine
from kdist.planner.tables.read import Reader, count, maybe, number, read_table, text

_COLUMNS: Mapping[str, Reader] = {
    "model": text,
    "framework": text,
    "hardware": text,
    "n_gpus": count,
    "epochs_to_93_top5": number,
    "hours": number,
    "usd_per_hour": maybe(number),
}
# Columns that published entries lack, and kdist's own table has.
_ADDED: Mapping[str, Reader] = {
    "machine": text,
    "local_batch": number,
    "precision": precision_name,
    "pixels": maybe(count),
}
_SAME = ("model", "framework", "hardware")


@dataclasses.dataclass(frozen=True)
class Trained:
    """One training, published and predicted.

    Attributes:
        name: model, framework, and hardware.
        hours: published hours.
        predicted_hours: hours predicted for its epochs.
        usd_per_hour: price of all machines; None where unknown.
        images: epochs by image size, "13 of 128 px, 12 of 224 px"; "" without a recipe.
    """

    name: str
    hours: float
    predicted_hours: float
    usd_per_hour: float | None
    images: str = ""

    @property
    def error(self) -> float:
        """Signed relative error of the hours, and so of the dollars."""
        return self.predicted_hours / self.hours - 1


def check_trainings(
    path: str | os.PathLike,
    machines: Mapping[str, Machine],
    constants: Constants | None = None,
) -> list[Trained]:
    """Predicts all rows of a table like kdist's own `tables/time_to_accuracy.csv`.

    Args:
        path: path of the table. If the columns machine, local_batch, precision, and pixels are
            absent, their values are those of the row of kdist's own table with the same model,
            framework, and hardware. A row without pixels that is in `known_recipes` uses the
            images, batches, and precision of its recipe.
        machines: name -> machine.
        constants: constants of exchange and input; kdist's own by default.

    Returns:
        The trainings, in the order of the rows.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing, a cell is invalid, a machine or model is unknown, or a row
            of a table with absent columns is not in kdist's own.

    Example:

        trained = check_trainings("time_to_accuracy.csv", known_machines())
        text = trainings_text(trained)
    """
    known = constants or known_constants()
    return [_trained(row, machines, known) for row in _rows(path)]


def dollars_error(trained: Sequence[Trained]) -> float:
    """Returns the mean absolute relative error of trainings with a price; NaN without any."""
    priced = [abs(one.error) for one in trained if one.usd_per_hour is not None]
    return sum(priced) / len(priced) if priced else float("nan")


def trainings_text(trained: Sequence[Trained]) -> str:
    """Returns a line for each training, and the mean error in dollars.

    Args:
        trained: trainings from `check_trainings`.

    Returns:
        The text that `kdist plan --trainings` prints.

    Example:

        >>> trainings_text([Trained("a", 2.0, 3.0, 10.0)]).splitlines()[-1]
        'dollars: 50.0 % off on average'
    """
    lines = [f"{'':60}{'published':>12}{'predicted':>12}{'error':>8}"]
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
    """Returns a row with its absent columns from kdist's own table."""
    for own in read_table(TABLES / "time_to_accuracy.csv", {**_COLUMNS, **_ADDED}):
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
        seconds = _seconds_of_equal_epochs(row, machines, constants)
    else:
        seconds = training_seconds(recipe, row["machine"], row["n_gpus"], machines, constants)
    name = ", ".join(row[name] for name in _SAME)
    images = "" if recipe is None else str(recipe)
    return Trained(name, row["hours"], seconds / 3600, row["usd_per_hour"], images)


def _seconds_of_equal_epochs(row, machines, constants):
    """Returns the duration of a training whose epochs are all equal."""
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
