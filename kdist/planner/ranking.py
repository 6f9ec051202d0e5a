"""Whether what a prediction would choose is among the best.

A look-up is a question to a table: all rows that are alike but for one thing that a person can
choose. The row with the highest predicted rate is chosen, and is right if its published rate is
within 5 % of the best published one. What can be chosen:

    devices    how many, where more of them may be slower
    batch      of each device, with the same devices
    framework  and with it how variables are updated, with the same devices and batch
    precision  with the same devices and framework, each at its largest batch
    machine    with as many devices, and the same framework and precision

Rows on the fewest devices of a training are given, not predicted: a look-up among nothing else is
none. More devices and larger batches are mostly faster, so that many look-ups are easy:
`look_ups` of the number of examples of an update, instead of a rate, says how many.
"""

import dataclasses
from collections.abc import Sequence

from kdist.planner.published import PublishedRate
from kdist.planner.validation import Checked

TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class LookUp:
    """One question to a table.

    Attributes:
        free: what can be chosen: "devices", "batch", "framework", "precision" or "machine".
        chosen: published rate of the row with the highest predicted rate.
        best: the highest published rate.
    """

    free: str
    chosen: float
    best: float

    @property
    def right(self) -> bool:
        """Whether what is chosen is within 5 % of the best."""
        return self.chosen >= (1 - TOLERANCE) * self.best


_FIELDS = ("machine", "model", "framework", "gpu", "devices", "local_batch", "precision", "data")


def look_ups(checked: Sequence[Checked], given: Sequence[PublishedRate] = ()) -> list[LookUp]:
    """All look-ups of a table.

    Args:
        checked: rows with what is predicted for them.
        given: rows whose rate is known beforehand, and which can be chosen as well.
    """
    rows = [(row.rate, row.predicted) for row in checked if row.predicted is not None]
    known = [(rate, rate.rate) for rate in dict.fromkeys(given)]
    found = []
    for free, left_open in _LEFT_OPEN.items():
        groups: dict[tuple, list] = {}
        for rate, predicted in [*known, *rows]:
            key = tuple(getattr(rate, name) for name in _FIELDS if name not in left_open)
            groups.setdefault(key, []).append((rate, predicted))
        for group in groups.values():
            options = _options(group, free)
            if len(options) > 1 and any(option in rows for option in options):
                chosen, _ = max(options, key=lambda option: option[1])
                found.append(LookUp(free, chosen.rate, max(rate.rate for rate, _ in options)))
    return found


# What is not the same in all rows of a look-up.
_LEFT_OPEN = {
    "devices": ("devices",),
    "batch": ("local_batch",),
    "framework": ("framework",),
    "precision": ("precision", "local_batch"),
    "machine": ("machine", "gpu", "local_batch"),
}


def _options(group, free):
    """The rows to choose among: with each value of what is free, the one of the largest batch."""
    attribute = "local_batch" if free == "batch" else free
    options: dict = {}
    for option in sorted(group, key=lambda option: option[0].local_batch):
        options[getattr(option[0], attribute)] = option
    return list(options.values())


def share_right(found: Sequence[LookUp]) -> float:
    """Of look-ups that are right; NaN where there are none."""
    return sum(one.right for one in found) / len(found) if found else float("nan")
