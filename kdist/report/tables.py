"""Text and tables of the report page.

Tables escape all text of runs. The first run is the baseline of comparisons.
"""

import functools
import html
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.report.records import number
from kdist.report.runs import Prices, Run, cost_usd

NOTHING = "–"


def shown(value: Any, digits: int | None = None) -> str:
    """Returns a value as text: a dash for None, numbers with `digits` decimals."""
    if value is None:
        return NOTHING
    if digits is not None and number(value) is not None:
        return f"{value:,.{digits}f}"
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def percent(value: Any) -> str:
    """Returns a fraction as a percentage."""
    return NOTHING if number(value) is None else f"{shown(100 * value, 1)} %"


def _milliseconds(value):
    return shown(None if number(value) is None else 1e3 * value, 2)


def _megabytes(value):
    return shown(sum(value.values()) / 1e6 if isinstance(value, dict) else None, 2)


def _devices(value):
    """Returns devices in words, such as "4 × GPU"; a single one by its name."""
    if not isinstance(value, list) or len(value) < 2:
        return shown(value)
    kinds = [str(name).split(":")[0] for name in value]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def _strategy(value):
    return shown(value.removesuffix("Strategy") or value if isinstance(value, str) else value)


# Settings that other parts of the page show, or that are the name of the run.
NO_SETTINGS = {"run_dir", "git_commit", "devices"}
# Tables that compare more runs have a row per run.
_MAX_RUNS_SIDE_BY_SIDE = 8

# Depth of groups of settings that have lines of their own.
_MAX_GROUPS = 3
# Longer words are broken anywhere, such as the hash of a commit.
_LONG_WORD = 24

_four = functools.partial(shown, digits=4)
_one = functools.partial(shown, digits=1)

# Heading of a column -> the key in the summary or the configuration, and the format of values.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Model": ("model", shown),
    "Dataset": ("dataset", shown),
    "Strategy": ("strategy", _strategy),
    "Devices": ("devices", _devices),
    "Local batch": ("local_batch_size", shown),
    "Global batch": ("global_batch_size", shown),
    "Precision": ("precision", shown),
    "Epochs": ("epochs", shown),
    "Seconds per epoch": ("seconds_per_epoch", _one),
    "Examples per second": ("examples_per_second", _one),
}

# Columns that move to the caption if they are equal in all runs, so that the others fit.
_SHARED_COLUMNS = (
    *("Model", "Dataset", "Strategy", "Devices", "Local batch", "Global batch", "Precision"),
    "Epochs",
)

# Columns that are omitted if no run has a value.
RESULT_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Test accuracy": ("test_accuracy", _four),
    "Test loss": ("test_loss", _four),
    "Validation accuracy": ("val_accuracy", _four),
    "Validation loss": ("val_loss", _four),
}
OPTIONAL_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Median step (ms)": ("step_seconds_p50", _milliseconds),
    "Model FLOPs utilization": ("model_flops_utilization", percent),
    "Goodput": ("goodput", percent),
    "Bubble": ("bubble_share", percent),
    "Sent between devices per step (MB)": ("crossing_bytes_per_step", _megabytes),
}

_ALL_COLUMNS = (COLUMNS, RESULT_COLUMNS, OPTIONAL_COLUMNS)
# Values for which `run_table` has columns of its own, or other parts of the page a table.
_NO_COLUMNS = {*NO_SETTINGS, "total_seconds", "cost_usd", "versions"}
# Further settings and results of many runs that may be chosen as columns, of each kind.
_MAX_OTHER_COLUMNS = 50

OPERATION_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Operation": ("name", shown),
    "Type": ("type", shown),
    "Device": ("device", shown),
    "ms per step": ("seconds_per_step", _milliseconds),
    "Share": ("share", percent),
    "Calls": ("calls", shown),
}


def summarize(runs: Sequence[Run]) -> str:
    """Returns a sentence about one run, or the most accurate and the fastest of several."""
    return _summarize_one(runs[0]) if len(runs) == 1 else _summarize_several(runs)


def _summarize_one(run):
    dataset = run.get("dataset")
    what = [f"{shown(run.get('model'))}{f' on {shown(dataset)}' if dataset else ''}", _where(run)]
    results = _results(run) if run.finished else _progress(run)
    return ", ".join(filter(None, what)) + ": " + ", ".join(results) + "."


def _where(run):
    strategy, devices = run.get("strategy"), run.summary.get("devices")
    where = f" on {shown(devices)}" if devices else ""
    return f"{shown(strategy)}{where}" if strategy else ""


def _results(run):
    """Returns the main numbers of the summary with their units."""
    figures = [
        ("test_accuracy", 4, "test accuracy {}"),
        ("test_loss", 4, "test loss {}"),
        ("val_accuracy", 4, "validation accuracy {}"),
        ("val_loss", 4, "validation loss {}"),
        ("seconds_per_epoch", 1, "{} seconds per epoch"),
        ("examples_per_second", 1, "{} examples per second"),
    ]
    known = [(number(_result(run, key)), digits, words) for key, digits, words in figures]
    results = [
        words.format(shown(value, digits)) for value, digits, words in known if value is not None
    ]
    return results or ["finished without results"]


def _result(run, key):
    """Returns a value of the summary; none of the validation if there are test results."""
    is_repeated = key.startswith("val_") and f"test_{key.removeprefix('val_')}" in run.summary
    return None if is_repeated else run.summary.get(key)


def _progress(run):
    seen = [run.metrics(kind).points("examples", "examples")[0] for kind in ("train", "epoch")]
    most = max(examples.max(initial=0) for examples in seen)
    return [f"not finished, {shown(float(most), 0)} examples seen"]


def _summarize_several(runs):
    unfinished = sum(not run.finished for run in runs)
    parts = [f"{len(runs)} runs" + (f", {unfinished} of them not finished" if unfinished else "")]
    best = _highest(runs, "test_accuracy")
    if best:
        accuracy = shown(best.summary["test_accuracy"], 4)
        parts.append(f"Most accurate: {best.name} (test accuracy {accuracy})")
    fastest = _highest(runs, "examples_per_second")
    if fastest:
        parts.append(f"Fastest: {fastest.name} ({_speed(fastest, runs[0])})")
    return ". ".join(parts) + "."


def _highest(runs, key):
    known = [run for run in runs if number(run.summary.get(key)) is not None]
    return max(known, key=lambda run: run.summary[key], default=None)


def _speed(run, first):
    rate = f"{shown(run.summary['examples_per_second'], 1)} examples per second"
    factor = speed_up(run, first)
    return rate if run is first or factor is None else f"{rate}, {factor:.2f} × {first.name}"


def tiles(run: Run, prices: Prices = None) -> str:
    """Returns the main numbers of one run as tiles: accuracy, speed, time, and cost."""
    speed = run.figure("examples_per_second")
    cost = cost_usd(run, prices)
    known = {
        "Test accuracy": percent(run.figure("test_accuracy")),
        "Validation accuracy": percent(run.figure("val_accuracy")),
        "Examples per second": NOTHING
        if speed is None
        else f"{speed:,.{0 if speed > 100 else 1}f}",
        "Training time": duration(run.seconds),
        "Cost": NOTHING if cost is None else f"${cost:,.2f}",
    }
    if known["Test accuracy"] != NOTHING:
        del known["Validation accuracy"]
    parts = [
        f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>"
        for name, text in known.items()
        if text != NOTHING
    ]
    return f"<dl class=cards>{''.join(parts)}</dl>" if parts else ""


def duration(seconds: float | None) -> str:
    """Returns a time with two units, such as "2 h 5 min"; a dash if unknown."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def run_table(runs: Sequence[Run], prices: Prices = None) -> str:
    """Returns a table with one row per run.

    Several runs have speed-up and efficiency, and the reader chooses the columns: also other
    settings and results that differ between the runs, which are hidden at first.
    """
    columns = {heading: [show(r.get(k)) for r in runs] for heading, (k, show) in COLUMNS.items()}
    caption = "Settings and results"
    if len(runs) > 1:
        equal = [
            h for h in _SHARED_COLUMNS if len(set(columns[h])) == 1 and columns[h][0] != NOTHING
        ]
        shared = [f"{heading.lower()} {columns.pop(heading)[0]}" for heading in equal]
        caption += f"; all with {', '.join(shared)}" if shared else ""
    optional = {}
    for heading, (key, show) in RESULT_COLUMNS.items():
        optional[heading] = [show(_result(run, key)) for run in runs]
    if len(runs) > 1:
        optional["Speed-up"] = [shown(speed_up(run, runs[0]), 2) for run in runs]
        optional["Efficiency"] = [percent(scaling_efficiency(run, runs[0])) for run in runs]
    for heading, (key, show) in OPTIONAL_COLUMNS.items():
        optional[heading] = [show(run.get(key)) for run in runs]
    optional["Total time (s)"] = [shown(run.seconds, 1) for run in runs]
    optional["Cost (USD)"] = [shown(cost_usd(run, prices), 2) for run in runs]
    columns.update(optional)
    known = {h: cells for h, cells in columns.items() if set(cells) != {NOTHING}}
    names = [run.name if run.finished else f"{run.name} (not finished)" for run in runs]
    if len(runs) == 1:
        return table(
            caption, ["Run", *known], list(zip(names, *known.values(), strict=True)), "single"
        )
    settings, results = (_other_columns(runs, group) for group in ("config", "summary"))
    results = {name: cells for name, cells in results.items() if name not in settings}
    headings = ["Run", *known, *settings, *results]
    rows = list(zip(names, *known.values(), *settings.values(), *results.values(), strict=True))
    hidden = len(settings) + len(results)
    groups = {"Default columns": known, "Other settings": settings, "Other results": results}
    return _column_choice(groups) + table(caption, headings, rows, "sortable", hidden=hidden)


def _other_columns(runs, group):
    """Returns cells by the names of further settings ("config") or numbers ("summary") of runs.

    The names are those that differ between the runs, without those that have a column of their own.
    """
    own = {key for columns in _ALL_COLUMNS for key, _ in columns.values()} | _NO_COLUMNS
    values = [flat(getattr(run, group)) for run in runs]
    found = {}
    for name in sorted({name for each in values for name in each}):
        cells = [shown(each.get(name)) for each in values]
        is_kind = group == "config" or any(number(each.get(name)) is not None for each in values)
        if is_kind and name.split(".")[0] not in own and len(set(cells)) > 1:
            found[name] = cells
    return dict(itertools.islice(found.items(), _MAX_OTHER_COLUMNS))


def _column_choice(groups):
    """Returns check boxes of columns by their group; the script of the page shows them."""
    sets = []
    for order, (legend, headings) in enumerate(groups.items()):
        checked = "" if order else " checked"
        boxes = "".join(
            f'<label><input type=checkbox{checked} value="{html.escape(name)}"> '
            f"{_breakable(name)}</label>"
            for name in headings
        )
        if boxes:
            sets.append(
                f"<fieldset><legend>{legend}</legend><div class=boxes>{boxes}</div></fieldset>"
            )
    return (
        "<details id=columns hidden><summary>Columns</summary>"
        f"{''.join(sets)}<p><button type=button>Reset</button></p></details>\n"
    )


def speed_up(run: Run, first: Run) -> float | None:
    """Returns the ratio of examples per second to those of `first`; None if unknown."""
    rate, reference = (number(r.summary.get("examples_per_second")) for r in (run, first))
    return rate / reference if rate is not None and reference else None


def scaling_efficiency(run: Run, first: Run) -> float | None:
    """Returns the speed-up over `first` divided by the ratio of devices; None if unknown.

    1 means that each added device contributes as much as those of `first`. Runs of other models or
    other global batches do other work, and have no efficiency.
    """
    if any(run.get(key) != first.get(key) for key in ("model", "global_batch_size")):
        return None
    factor, devices, reference = speed_up(run, first), run.num_devices, first.num_devices
    return factor * reference / devices if factor and devices and reference else None


def operations(run: Run) -> str:
    """Returns a table of the slowest operations if the run was profiled, else an empty string."""
    top = run.summary.get("top_operations")
    top = [o for o in top if isinstance(o, dict)] if isinstance(top, list) else []
    rows = [[show(o.get(key)) for key, show in OPERATION_COLUMNS.values()] for o in top]
    headings = list(OPERATION_COLUMNS)
    return table(f"{run.name}: slowest operations", headings, rows) if rows else ""


def configuration(runs: Sequence[Run]) -> str:
    """Returns a table of the settings that differ between runs, or all settings of one run."""
    settings = settings_of(runs)
    # The run directory always differs, and is the name of the run.
    names = sorted({name for each in settings for name in each} - NO_SETTINGS)
    if len(runs) == 1:
        return _folded(f"All {len(names)} settings", runs, names, settings)
    differing = [n for n in names if len({shown(each.get(n)) for each in settings}) > 1]
    equal = [name for name in names if name not in differing]
    parts = ["<p>All runs have the same configuration.</p>"]
    if differing:
        parts = [_compare(runs, differing, settings, "Settings that differ", marks=True)]
    if equal:
        parts.append(_folded(f"{len(equal)} equal settings", runs[:1], equal, settings[:1]))
    return "\n".join(parts)


def _folded(summary, runs, names, settings):
    inside = _compare(runs, names, settings, "Configuration")
    return f"<details class=settings id=settings><summary>{summary}</summary>{inside}</details>"


def settings_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the settings of each run, without the versions of packages."""
    return [flat({k: v for k, v in run.config.items() if k != "versions"}) for run in runs]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns settings with those of a group as `group.name`, as W&B shows them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value and prefix.count(".") < _MAX_GROUPS:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def environment(runs: Sequence[Run]) -> str:
    """Returns a table of the devices, versions, and commit of each run."""
    versions = sorted({name for run in runs for name in _versions(run)})
    names = ["devices", *versions, "git_commit"]
    values = [
        {"devices": run.get("devices"), "git_commit": run.get("git_commit"), **_versions(run)}
        for run in runs
    ]
    return _compare(runs, names, values, "Devices and versions")


def _versions(run):
    versions = run.get("versions")
    return versions if isinstance(versions, dict) else {}


def _compare(runs, names, values, caption, marks=False):
    """Returns a table of values by run; `marks` those that differ from the first run's."""
    texts = [[shown(each.get(name)) for name in names] for each in values]
    is_other = [[marks and a != b for a, b in zip(each, texts[0], strict=True)] for each in texts]
    if len(runs) <= _MAX_RUNS_SIDE_BY_SIDE:
        rows = [[name, *cells] for name, *cells in zip(names, *texts, strict=True)]
        differs = list(zip(*is_other, strict=True))
        return table(caption, ["Name", *(run.name for run in runs)], rows, differs=differs)
    rows = [[run.name, *cells] for run, cells in zip(runs, texts, strict=True)]
    return table(caption, ["Run", *names], rows, "sortable", differs=is_other)


def table(
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    kind: str = "",
    differs: Sequence[Sequence[bool]] | None = None,
    hidden: int = 0,
) -> str:
    """Returns an HTML table in a scrolling container; the first cell of a row is its heading.

    Args:
        caption: text above the table.
        headings: headings of the columns.
        rows: the cells.
        kind: "single" shows one row as a list, "sortable" lets the reader sort. Defaults to "".
        differs: for each row, whether each cell after the first is set off. Defaults to no cell.
        hidden: number of last columns that are hidden. Defaults to 0.
    """
    first = len(headings) - hidden
    head = "".join(
        f"<th scope=col{' hidden' * (order >= first)}>{_breakable(heading)}</th>"
        for order, heading in enumerate(headings)
    )
    # On narrow screens each cell has its heading before it.
    labels = [html.escape(heading) for heading in headings[1:]]
    marks = differs or [[False] * len(labels)] * len(rows)
    body = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th>{_cells(labels, cells, marked, first)}</tr>\n"
        for (name, *cells), marked in zip(rows, marks, strict=True)
    )
    # Scrolling containers need a name and must be reachable from the keyboard.
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(caption)}">'
        f"<table{f' class={kind}' if kind else ''}><caption>{html.escape(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _cells(labels, cells, marked, first_hidden):
    columns = zip(labels, cells, marked, strict=True)
    return "".join(
        f'<td data-label="{label}"{_classes(cell, mark)}{" hidden" * (order >= first_hidden)}>'
        f"{_breakable(cell)}</td>"
        for order, (label, cell, mark) in enumerate(columns, 1)
    )


def _classes(cell, is_other):
    longest = max(map(len, cell.split()), default=0)
    names = ["long"] * (longest > _LONG_WORD) + ["differs"] * is_other
    return f' class="{" ".join(names)}"' if names else ""


def _breakable(text):
    """Returns text as HTML in which names such as mixed_bfloat16 may continue in the next line."""
    return html.escape(text).replace("_", "_<wbr>")
