"""Axes of a run's curves, which continue when a run has several trainings."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

# Contains the last records of every kind.
_TAIL_BYTES = 1 << 16


@dataclasses.dataclass
class Axes:
    """Offsets from this training's counts to those of the run.

    Attributes:
        epochs: added to the number of an epoch.
        steps: added to the optimizer's count of steps.
        examples: added to the examples of these steps.
        seconds: added to the seconds since this training began.
    """

    epochs: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0

    @classmethod
    def after(
        cls, last: Mapping[str, Any], epoch: int, step: int, global_batch: int | None
    ) -> "Axes":
        """Returns the axes of a training that follows the record `last`.

        A model that continues where that record ends needs no offsets. For other models, the counts
        continue from there.

        Args:
            last: the largest values of earlier records; empty for none.
            epoch: first epoch of this training, from 0.
            step: the optimizer's steps before this training.
            global_batch: examples per step; None if unknown.
        """
        if not last:
            return cls()
        last_step = int(last.get("step") or 0)
        shown_step = max(step, last_step)
        examples = 0
        if global_batch and last.get("examples") is not None:
            since = (shown_step - last_step) * global_batch
            examples = int(last["examples"]) + since - step * global_batch
        return cls(
            epochs=max(0, int(last.get("epoch") or 0) - epoch),
            steps=shown_step - step,
            examples=examples,
            seconds=float(last.get("seconds") or 0.0),
        )


def last_values(path: pathlib.Path) -> dict[str, Any]:
    """Returns the largest values on the axes at the end of `metrics.jsonl`; empty without any."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    last: dict[str, Any] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the tail begins, or a killed run ended, within a line
            continue
        if isinstance(record, dict):
            note_largest(last, record)
    return last


def note_largest(last: dict[str, Any], record: Mapping[str, Any]):
    """Updates the largest values on the axes with those of a record."""
    for name in ("epoch", "step", "examples", "seconds"):
        value = record.get(name)
        if isinstance(value, int | float) and value >= last.get(name, value):
            last[name] = value
