"""Phases of published trainings: the image size and batch of each epoch.

    recipe = known_recipes()["ResNet-50", "PyTorch 1.0", "Azure ND40s_v2 (8x V100)", 26]
    recipe.phases[0].pixels, recipe.phases[0].epochs   # 128, 13

DAWNBench's trainings start with small images and end with large ones. The table
`tables/training_recipes.csv` has the sizes, batches, and validation passes of each, from the entry
or its program. It has no times; `training_time` predicts the time of a recipe.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks.planner_validation import TABLES
from benchmarks.planner_validation.published import precision_name
from kdist.planner.tables.read import Reader, count, maybe, number, read_table, text

Key = tuple[str, str, str, float]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive epochs that are equal.

    Attributes:
        epochs: number of epochs.
        pixels: side length of the model's input.
        local_batch: examples per device.
        stored_pixels: shorter side of the stored images; None for ImageNet's own.
        validated: images that all devices validate after each epoch within the published time; 0
            if the time excludes validation.
    """

    epochs: int
    pixels: int
    local_batch: float
    stored_pixels: int | None = None
    validated: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a published training.

    Attributes:
        model: model of its program.
        framework: name as in `tables/scaling.csv`, which determines the library and XLA.
        like: framework in the tables of rates with the same speed of computation.
        precision: a result of `benchmarks.planner_validation.published.precision_name`.
        phases: phases in their order.
        whole_cores: whether the vCPUs of its machine are physical cores; None derives it from its
            name.
    """

    model: str
    framework: str
    like: str
    precision: str
    phases: tuple[Phase, ...]
    whole_cores: bool | None = None

    @property
    def epochs(self) -> int:
        """Number of epochs in all phases."""
        return sum(phase.epochs for phase in self.phases)

    def __str__(self):
        sizes = [(phase.pixels, phase.epochs) for phase in self.phases]
        groups = itertools.groupby(sizes, key=lambda size: size[0])
        return ", ".join(f"{sum(n for _, n in group)} of {side} px" for side, group in groups)


def from_zero(cell: str) -> int:
    """Returns an integer of at least 0."""
    if not (text(cell).isascii() and cell.isdigit()):
        raise ValueError(f"is {cell!r}, but must be an integer of at least 0")
    return int(cell)


def _yes(cell: str) -> bool:
    """Returns True for yes and False for no."""
    if cell not in ("yes", "no"):
        raise ValueError(f"is {cell!r}, but must be yes or no")
    return cell == "yes"


_KEY: Mapping[str, Reader] = {
    "model": text,
    "framework": text,
    "hardware": text,
    "epochs_to_93_top5": number,
}
_TRAINING_COLUMNS: Mapping[str, Reader] = {
    "built": text,
    "runs_as": text,
    "like": text,
    "precision": precision_name,
    "whole_cores": maybe(_yes),
}
_PHASE_COLUMNS: Mapping[str, Reader] = {
    "first_epoch": from_zero,
    "epochs": count,
    "pixels": count,
    "local_batch": number,
    "stored_pixels": maybe(count),
    "validated": from_zero,
}
COLUMNS = {**_KEY, **_TRAINING_COLUMNS, **_PHASE_COLUMNS, "source": text, "date": text}


@functools.cache
def known_recipes() -> dict[Key, Recipe]:
    """Returns the recipes of `tables/training_recipes.csv`.

    Their keys are the model, framework, hardware, and epochs in the table of trainings.
    """
    return recipes_of(read_table(TABLES / "training_recipes.csv", COLUMNS), "training_recipes.csv")


def recipes_of(rows, source) -> dict[Key, Recipe]:
    """Returns the recipes of lines that have one phase each."""
    trainings: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["model"], row["framework"], row["hardware"], row["epochs_to_93_top5"])
        trainings.setdefault(key, []).append(row)
    return {key: _recipe(key, lines, source) for key, lines in trainings.items()}


def _recipe(key, lines, source) -> Recipe:
    named = f"{source}: {', '.join(map(str, key))}"
    for before, line in itertools.pairwise(lines):
        if line["first_epoch"] != before["first_epoch"] + before["epochs"]:
            raise ValueError(
                f"{named}: a phase begins at epoch {line['first_epoch']}, where the one before "
                f"ends with {before['first_epoch'] + before['epochs']}"
            )
        for name in _TRAINING_COLUMNS:
            if line[name] != before[name]:
                raise ValueError(
                    f"{named}: {name} is {before[name]} in one line, {line[name]} in another"
                )
    one = lines[0]
    phases = tuple(
        Phase(**{name: line[name] for name in _PHASE_COLUMNS if name != "first_epoch"})
        for line in lines
    )
    return Recipe(
        one["built"], one["runs_as"], one["like"], one["precision"], phases, one["whole_cores"]
    )
