"""Text of a validation: errors, and how often predictions select a good configuration.

A look-up is a question to a table: all rows that differ only in one property that a user can
choose. The prediction chooses the row with the highest predicted rate. It is right if the published
rate of this row is within 5 % of the best published one. The properties are:

    devices    number of devices, where more may be slower
    batch      batch per device, for the same devices
    framework  framework and update of variables, for the same devices and batch
    precision  for the same devices and framework, each with its largest batch
    machine    for the same number of devices, framework, and precision

Rows with the fewest devices of a training have a known rate. A look-up needs a row without one.
More devices and larger batches are mostly faster, so that many look-ups are easy. As a baseline,
`look_ups` with the examples per update instead of a rate shows how many.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from benchmarks.planner_validation.published import DDP_BATCH, DEFAULT_BATCH, PublishedRate
from benchmarks.planner_validation.validate import CLASSES, Prediction, Validation, mean_error

TOLERANCE = 0.05
# Fields of a look-up, and the fields that may differ for each property.
_FIELDS = ("machine", "model", "framework", "gpu", "devices", "local_batch", "precision", "data")
_OPEN_FIELDS = {
    "devices": ("devices",),
    "batch": ("local_batch",),
    "framework": ("framework",),
    "precision": ("precision", "local_batch"),
    "machine": ("machine", "gpu", "local_batch"),
}

_LINE = "  {:26}{:>6}{:>12}{:>10}{:>8}{:>12}{:>10}"
_HEAD = ("", "rows", "no machine", "no model", "rows", "no machine", "no model")


@dataclasses.dataclass(frozen=True)
class LookUp:
    """One question to a table.

    Attributes:
        free: the property to choose: "devices", "batch", "framework", "precision", or "machine".
        chosen: published rate of the row with the highest predicted rate.
        best: highest published rate.
    """

    free: str
    chosen: float
    best: float

    @property
    def right(self) -> bool:
        """True if the chosen rate is within 5 % of the best."""
        return self.chosen >= (1 - TOLERANCE) * self.best


def look_ups(
    predictions: Sequence[Prediction], given: Sequence[PublishedRate] = ()
) -> list[LookUp]:
    """Returns all look-ups of a table.

    Args:
        predictions: predicted rows.
        given: rows with a known rate, which can be chosen too.
    """
    rows = [(row.rate, row.predicted) for row in predictions if row.predicted is not None]
    known = [(rate, rate.rate) for rate in dict.fromkeys(given)]
    found = []
    for free, open_fields in _OPEN_FIELDS.items():
        groups: dict[tuple, list] = {}
        for rate, predicted in [*known, *rows]:
            key = tuple(getattr(rate, name) for name in _FIELDS if name not in open_fields)
            groups.setdefault(key, []).append((rate, predicted))
        for group in groups.values():
            options = _options(group, free)
            if len(options) > 1 and any(option in rows for option in options):
                chosen, _ = max(options, key=lambda option: option[1])
                found.append(LookUp(free, chosen.rate, max(rate.rate for rate, _ in options)))
    return found


def _options(group, free):
    """Returns the row with the largest batch for each value of the free property."""
    attribute = "local_batch" if free == "batch" else free
    options: dict = {}
    for option in sorted(group, key=lambda option: option[0].local_batch):
        options[getattr(option[0], attribute)] = option
    return list(options.values())


def share_right(found: Sequence[LookUp]) -> float:
    """Returns the share of look-ups that are right; NaN without any."""
    return sum(one.right for one in found) / len(found) if found else float("nan")


def validation_text(validation: Validation) -> str:
    """Returns the errors per machine, model, and class; the last line starts with `whole:`."""
    lines = [
        "mean absolute error of predicted examples/s, with constants fitted without the machine",
        "of a row, and without its model",
        _LINE.format("", "", "given", "a rate", "", "specified", "alone"),
        _LINE.format(*_HEAD),
    ]
    sections: list[tuple[str, Callable[[Prediction], str], Iterable[str]]] = [
        ("machine", lambda row: row.rate.machine, ()),
        ("model", lambda row: row.rate.family, ()),
        ("class", lambda row: row.kind, CLASSES),
    ]
    for title, key, order in sections:
        lines.append(title)
        keys = dict.fromkeys([*order, *(key(row) for row in validation.specification)])
        lines += [_line(name, validation, key) for name in keys if _rows(validation, key, name)]
    lines += _ranks(validation)
    lines += _remarks(validation)
    return "\n".join(line.rstrip() for line in [*lines, _whole(validation)])


def given_look_ups(validation: Validation) -> list[LookUp]:
    """Returns the look-ups among rows that are given or predicted from a given rate."""
    predictions = validation.without_machine
    predicted = {row.rate for row in predictions}
    groups = {rate.group for rate in predicted}
    rates = [row.rate for row in validation.specification]
    given = [rate for rate in rates if rate.group in groups and rate not in predicted]
    return look_ups(predictions, given)


def _rows(validation, key, name):
    return [row for row in validation.specification if key(row) == name]


def _line(name, validation, key):
    given, no_model, specified, neither = (
        [row for row in rows if key(row) == name and row.predicted is not None]
        for rows in (
            validation.without_machine,
            validation.without_model,
            validation.specification,
            validation.specification_without_model,
        )
    )
    cells = len(given), _percent(given), _percent(no_model)
    return _LINE.format(name[:26], *cells, len(specified), _percent(specified), _percent(neither))


def _percent(rows: Sequence[Prediction]):
    error = mean_error(rows)
    return "-" if error != error else f"{100 * error:.1f} %"


def _ranks(validation):
    given, specified = given_look_ups(validation), look_ups(validation.specification)
    lines = ["look-ups with a choice within 5 % of the best"]
    for free in dict.fromkeys(one.free for one in specified):
        given_of, specified_of = (
            _right([one for one in found if one.free == free]) for found in (given, specified)
        )
        lines.append(_LINE.format(f"which {free}", "", given_of, "", "", specified_of, ""))
    most = [
        dataclasses.replace(row, predicted=row.rate.devices * row.rate.local_batch)
        for row in validation.specification
        if row.predicted is not None
    ]
    lines.append(f"  always the most examples per update: {_right(look_ups(most))}")
    return lines


def _right(found):
    return f"{sum(one.right for one in found)} of {len(found)}"


def _remarks(validation):
    lines = [
        f"not predicted from the specification: {n} rows: {why}" for why, n in validation.reasons
    ]
    if validation.unknown_models:
        lines.append(
            "unknown models, assumed to have 25 million parameters and images of 224 pixels: "
            + ", ".join(validation.unknown_models)
        )
    assumed = sum(row.rate.batch_assumed for row in validation.specification)
    if assumed:
        lines.append(
            f"{assumed} rows have no batch: assumed to be {DDP_BATCH} for DDP and {DEFAULT_BATCH} "
            "otherwise"
        )
    lines += [
        f"{rate.machine}, {rate.model}, {rate.framework}, {rate.devices} devices: "
        f"{rate.rate:,.0f} examples/s is more than the model of exchange and input allows, "
        f"{allowed:,.0f}; predictions from it are too low"
        for rate, allowed in validation.too_fast
    ]
    lines.append(
        "with the priors instead of fitted constants: "
        f"{_percent(validation.priors_alone)} given a rate, "
        f"{_percent(validation.priors_specification)} from the specification alone"
    )
    return lines


def _whole(validation):
    rows = validation.specification
    predicted = sum(row.predicted is not None for row in rows)
    return (
        f"whole: {_percent(validation.without_machine)} given a rate (without its machine; "
        f"{_percent(validation.without_model)} without its model), "
        f"{_percent(rows)} from the specification alone ({predicted} of {len(rows)} rows, without "
        "its machine; "
        f"{_percent(validation.specification_without_model)} without its model); look-ups right: "
        f"{_share(given_look_ups(validation))} given a rate, "
        f"{_share(look_ups(validation.specification))} from the specification"
    )


def _share(found):
    return f"{100 * share_right(found):.0f} %" if found else "-"
