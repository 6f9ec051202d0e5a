"""What the page says in words and figures: its tables, as HTML.

run_table(runs), operations(run), configuration(runs), environment(runs)

All text of a run is escaped here; the first run is the one that the others are compared with.
"""

import functools
import html
import json
from collections.abc import Callable, Sequence
from typing import Any

from kdist.report.costs import Prices, cost_usd
from kdist.report.records import number
from kdist.report.runs import Run

NOTHING = "–"


def shown(value: Any, digits: int | None = None) -> str:
    """A value in words: None is a dash, a number has so many digits after its point."""
    if value is None:
        return NOTHING
    if digits is not None and number(value) is not None:
        return f"{value:,.{digits}f}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def percent(value: Any) -> str:
    """A share between 0 and 1 in percent."""
    return shown(None if number(value) is None else 100 * value, 1) + (
        "" if number(value) is None else " %"
    )


def _milliseconds(value):
    return shown(None if number(value) is None else 1e3 * value, 2)


def _megabytes(value):
    return shown(sum(value.values()) / 1e6 if isinstance(value, dict) else None, 2)


def _devices(value):
    is_long = isinstance(value, list) and len(value) > 4
    return f"{len(value)}: {value[0]} … {value[-1]}" if is_long else shown(value)


# More runs are rows of the tables that compare them, as there are fewer settings than runs.
_MAX_RUNS_SIDE_BY_SIDE = 8

_four = functools.partial(shown, digits=4)
_one = functools.partial(shown, digits=1)

# Heading of a column -> the key in the summary or the configuration, and how a value is shown.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Model": ("model", shown),
    "Dataset": ("dataset", shown),
    "Strategy": ("strategy", shown),
    "Devices": ("devices", _devices),
    "Local batch": ("local_batch_size", shown),
    "Global batch": ("global_batch_size", shown),
    "Precision": ("precision", shown),
    "Epochs": ("epochs", shown),
    "Test accuracy": ("test_accuracy", _four),
    "Test loss": ("test_loss", _four),
    "Seconds an epoch": ("seconds_per_epoch", _one),
    "Examples a second": ("examples_per_second", _one),
}

_SAID_ONCE = ("Model", "Dataset", "Epochs")

# The same, for what not every run has; a column that all lack is left out.
OPTIONAL_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Median step (ms)": ("step_seconds_p50", _milliseconds),
    "Peak compute used": ("model_flops_utilization", percent),
    "Goodput": ("goodput", percent),
    "Devices wait": ("bubble_share", percent),
    "Sent between devices a step (MB)": ("crossing_bytes_per_step", _megabytes),
}


def run_table(runs: Sequence[Run], prices: Prices = None) -> str:
    """A row a run; with several, how much faster each is than the first, and how efficiently."""
    columns = {heading: [show(r.get(k)) for r in runs] for heading, (k, show) in COLUMNS.items()}
    caption = "What was run, and what came out"
    if len(runs) > 1:
        # Said once, so that the figures fit the window.
        same = [h for h in _SAID_ONCE if len(set(columns[h])) == 1 and columns[h][0] != NOTHING]
        said = [f"{heading.lower()} {columns.pop(heading)[0]}" for heading in same]
        caption += f"; all with {', '.join(said)}" if said else ""
    optional = {}
    if len(runs) > 1:
        columns["Speed-up"] = [shown(speed_up(run, runs[0]), 2) for run in runs]
        optional["Efficiency"] = [percent(scaling_efficiency(run, runs[0])) for run in runs]
    for heading, (key, show) in OPTIONAL_COLUMNS.items():
        optional[heading] = [show(run.get(key)) for run in runs]
    optional["Time in all (s)"] = [shown(run.seconds, 1) for run in runs]
    optional["Cost (USD)"] = [shown(cost_usd(run, prices), 2) for run in runs]
    columns.update({h: cells for h, cells in optional.items() if set(cells) != {NOTHING}})
    rows = [[_row_name(run), *cells] for run, *cells in zip(runs, *columns.values(), strict=True)]
    return table(caption, ["Run", *columns], rows)


def _row_name(run):
    return run.name if run.finished else f"{run.name} (not finished)"


def speed_up(run: Run, first: Run) -> float | None:
    """Examples a second over those of `first`; None unless both are known."""
    rate, reference = (number(r.summary.get("examples_per_second")) for r in (run, first))
    return rate / reference if rate is not None and reference else None


def scaling_efficiency(run: Run, first: Run) -> float | None:
    """The speed-up over `first` as a share of how many times its devices the run has.

    1 means that every added device brings as much as those before it; None unless both runs' speeds
    and devices are known.
    """
    factor, devices, reference = speed_up(run, first), run.num_devices, first.num_devices
    return factor * reference / devices if factor and devices and reference else None


def operations(run: Run) -> str:
    """The operations that took the most time, if the run was profiled; else nothing."""
    top = run.summary.get("top_operations")
    top = [o for o in top if isinstance(o, dict)] if isinstance(top, list) else []
    rows = [
        [
            shown(operation.get("name")),
            shown(operation.get("type")),
            shown(operation.get("device")),
            _milliseconds(operation.get("seconds_per_step")),
            percent(operation.get("share")),
            shown(operation.get("calls")),
        ]
        for operation in top
    ]
    headings = ["Operation", "Type", "Device", "ms a step", "Share", "Calls"]
    return table(f"{run.name}: operations that took most time", headings, rows) if rows else ""


def configuration(runs: Sequence[Run]) -> str:
    """The settings that differ between several runs, or all settings of one."""
    # Where a run lies differs always; its name already says it.
    names = sorted({name for run in runs for name in run.config} - {"run_dir"})
    if len(runs) == 1:
        settings = _compare(runs, names, lambda run: run.config, "What the run was asked to do")
        return (
            f"<details class=settings id=settings><summary>All {len(names)} settings</summary>"
            f"{settings}</details>"
        )
    differing = [n for n in names if len({shown(run.config.get(n)) for run in runs}) > 1]
    if not differing:
        return "<p>All runs have the same configuration.</p>"
    return _compare(runs, differing, lambda run: run.config, "Settings that differ")


def environment(runs: Sequence[Run]) -> str:
    """Devices, versions and commit of each run."""
    versions = sorted({name for run in runs for name in _versions(run)})
    names = ["devices", *versions, "git_commit"]
    return _compare(
        runs, names, lambda run: {**run.summary, **_versions(run)}, "What the figures depend on"
    )


def _versions(run):
    versions = run.summary.get("versions")
    return versions if isinstance(versions, dict) else {}


def _compare(runs, names, values_of, caption):
    values = [values_of(run) for run in runs]
    if len(runs) <= _MAX_RUNS_SIDE_BY_SIDE:
        rows = [[name, *(shown(each.get(name)) for each in values)] for name in names]
        return table(caption, ["Name", *(run.name for run in runs)], rows)
    rows = [
        [run.name, *(shown(each.get(name)) for name in names)]
        for run, each in zip(runs, values, strict=True)
    ]
    return table(caption, ["Run", *names], rows)


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table in a container that scrolls; the first cell of a row is its heading."""
    head = "".join(f"<th scope=col>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for name, *cells in rows
    )
    # What scrolls has to be reachable from the keyboard, and have a name.
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(caption)}">'
        f"<table><caption>{html.escape(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )
