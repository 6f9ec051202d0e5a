"""What published trainings did in which epochs.

    recipe = known_recipes()["ResNet-50", "PyTorch 1.0", "Azure ND40s_v2 (8x V100)", 26]
    recipe.phases[0].pixels, recipe.phases[0].epochs   # 128, 13

DAWNBench's trainings began on small images and ended on large ones. `tables/training_recipes.csv`
has the sizes, batches and validation passes of each, from the entry or its program; none of its
numbers is a time. How long a recipe takes is said in `training_time`.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping
from typing import Any

from kdist.planner.published import precision_name
from kdist.planner.tables import Reader, count, maybe, number, read_own_table, read_table, text

Key = tuple[str, str, str, float]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Epochs that are alike.

    Attributes:
        epochs: how many.
        pixels: a side of the images that the model gets.
        local_batch: examples of one device.
        stored_pixels: the shorter side of the stored images; None where they are ImageNet's own.
        validated: images that all devices together validate after each epoch, within the time that
            is published; 0 where that is not in it.
    """

    epochs: int
    pixels: int
    local_batch: float
    stored_pixels: int | None = None
    validated: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a published training was run.

    Attributes:
        model: that its program builds.
        framework: as `tables/scaling.csv` would name it: of it library and XLA count.
        like: the framework in the tables of rates whose speed its computation has.
        precision: of `kdist.planner.published.precision_name`.
        phases: in their order.
        whole_cores: whether its machine's vCPUs are whole cores; None as its name tells.
    """

    model: str
    framework: str
    like: str
    precision: str
    phases: tuple[Phase, ...]
    whole_cores: bool | None = None

    @property
    def epochs(self) -> int:
        """Of all phases."""
        return sum(phase.epochs for phase in self.phases)

    def __str__(self):
        sizes = [(phase.pixels, phase.epochs) for phase in self.phases]
        groups = itertools.groupby(sizes, key=lambda size: size[0])
        return ", ".join(f"{sum(n for _, n in group)} of {side} px" for side, group in groups)


def from_zero(cell: str) -> int:
    """A whole number from 0 on."""
    if not (text(cell).isascii() and cell.isdigit()):
        raise ValueError(f"is {cell!r}, where a whole number from 0 on is needed")
    return int(cell)


def _yes(cell: str) -> bool:
    """Whether a cell says yes rather than no."""
    if cell not in ("yes", "no"):
        raise ValueError(f"is {cell!r}, where yes or no is needed")
    return cell == "yes"


_KEY: Mapping[str, Reader] = {
    "model": text,
    "framework": text,
    "hardware": text,
    "epochs_to_93_top5": number,
}
_OF_TRAINING: Mapping[str, Reader] = {
    "built": text,
    "runs_as": text,
    "like": text,
    "precision": precision_name,
    "whole_cores": maybe(_yes),
}
_OF_PHASE: Mapping[str, Reader] = {
    "first_epoch": from_zero,
    "epochs": count,
    "pixels": count,
    "local_batch": number,
    "stored_pixels": maybe(count),
    "validated": from_zero,
}
_COLUMNS = {**_KEY, **_OF_TRAINING, **_OF_PHASE, "source": text, "date": text}


@functools.cache
def known_recipes() -> dict[Key, Recipe]:
    """Those of `tables/training_recipes.csv`.

    By model, framework, hardware and epochs, as the table of trainings has them.
    """
    return _recipes(read_own_table("training_recipes.csv", _COLUMNS), "training_recipes.csv")


def read_recipes(path: str | os.PathLike) -> dict[Key, Recipe]:
    """Those of a table with the columns of `tables/training_recipes.csv`, a line for each phase.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a cell is wrong, or the lines of a training do not follow
            each other or do not agree.
    """
    return _recipes(read_table(path, _COLUMNS), os.fspath(path))


def _recipes(rows, source) -> dict[Key, Recipe]:
    """Of lines of which each has a phase."""
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
        for name in _OF_TRAINING:
            if line[name] != before[name]:
                raise ValueError(
                    f"{named}: {name} is {before[name]} in one line, {line[name]} in another"
                )
    one = lines[0]
    phases = tuple(
        Phase(**{name: line[name] for name in _OF_PHASE if name != "first_epoch"}) for line in lines
    )
    return Recipe(
        one["built"], one["runs_as"], one["like"], one["precision"], phases, one["whole_cores"]
    )
