"""A validation as a person reads it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from kdist.planner.published import DDP_BATCH, DEFAULT_BATCH
from kdist.planner.ranking import LookUp, look_ups, share_right
from kdist.planner.validation import CLASSES, Checked, Validation, mean_error

_LINE = "  {:26}{:>6}{:>12}{:>10}{:>8}{:>12}{:>10}"
_HEAD = ("", "rows", "no machine", "no model", "rows", "no machine", "no model")


def validation_text(validation: Validation) -> str:
    """Errors per machine, per model and per class, and as the last line the whole."""
    lines = [
        "mean absolute error of predicted examples/s, with constants that know nothing of the",
        "machine, and nothing of the model",
        _LINE.format("", "", "given", "a rate", "", "specified", "alone"),
        _LINE.format(*_HEAD),
    ]
    sections: list[tuple[str, Callable[[Checked], str], Iterable[str]]] = [
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
    """Those among rows that are given or predicted from such."""
    checked = validation.without_machine
    predicted = {row.rate for row in checked}
    groups = {rate.group for rate in predicted}
    rates = [row.rate for row in validation.specification]
    given = [rate for rate in rates if rate.group in groups and rate not in predicted]
    return look_ups(checked, given)


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


def _percent(rows: Sequence[Checked]):
    error = mean_error(rows)
    return "-" if error != error else f"{100 * error:.1f} %"


def _ranks(validation):
    given, specified = given_look_ups(validation), look_ups(validation.specification)
    lines = ["look-ups whose choice is within 5 % of the best"]
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
    lines.append(f"  always the most examples an update: {_right(look_ups(most))}")
    return lines


def _right(found):
    return f"{sum(one.right for one in found)} of {len(found)}"


def _remarks(validation):
    lines = [
        f"not predicted from the specification: {n} rows: {why}" for why, n in validation.reasons
    ]
    if validation.unknown_models:
        lines.append(
            "unknown models, taken for 25 million parameters and images of 224 pixels: "
            + ", ".join(validation.unknown_models)
        )
    assumed = sum(row.rate.batch_assumed for row in validation.specification)
    if assumed:
        lines.append(
            f"{assumed} rows do not say their batch: taken for {DDP_BATCH} of DDP and "
            f"{DEFAULT_BATCH} else"
        )
    lines += [
        f"{rate.machine}, {rate.model}, {rate.framework}, {rate.devices} devices: "
        f"{rate.rate:,.0f} examples/s is more than exchange and input are taken to allow, "
        f"{allowed:,.0f}; what is predicted from it is too low"
        for rate, allowed in validation.too_fast
    ]
    lines.append(
        "with the priors alone, nothing fitted: "
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
