"""What the page says in words and figures: its opening sentence and its tables, as HTML.

sentence(runs), run_table(runs), configuration(runs), environment(runs)

All text of a run is escaped here; the first run is the one that the others are compared with.
"""

import functools
import html
import json
from collections.abc import Callable, Sequence
from typing import Any

from kdist.report.runs import Run, number

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


_four = functools.partial(shown, digits=4)
_one = functools.partial(shown, digits=1)

# Heading of a column -> the key in the summary or the configuration, and how a value is shown.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Model": ("model", shown),
    "Dataset": ("dataset", shown),
    "Strategy": ("strategy", shown),
    "Devices": ("devices", shown),
    "Local batch": ("local_batch_size", shown),
    "Global batch": ("global_batch_size", shown),
    "Precision": ("precision", shown),
    "Epochs": ("epochs", shown),
    "Test accuracy": ("test_accuracy", _four),
    "Test loss": ("test_loss", _four),
    "Seconds an epoch": ("seconds_per_epoch", _one),
    "Examples a second": ("examples_per_second", _one),
}


def run_table(runs: Sequence[Run]) -> str:
    """A row a run; with several runs, how much faster each is than the first."""
    headings = ["Run", *COLUMNS]
    rows = [[_row_name(run), *(show(run.get(k)) for k, show in COLUMNS.values())] for run in runs]
    if len(runs) > 1:
        headings.append("Speed-up")
        for row, run in zip(rows, runs, strict=True):
            row.append(shown(speed_up(run, runs[0]), 2))
    return table("What was run, and what came out", headings, rows)


def _row_name(run):
    return run.name if run.finished else f"{run.name} (not finished)"


def speed_up(run: Run, first: Run) -> float | None:
    """Examples a second over those of `first`; None unless both are known."""
    rate, reference = (number(r.summary.get("examples_per_second")) for r in (run, first))
    return rate / reference if rate is not None and reference else None


def configuration(runs: Sequence[Run]) -> str:
    """The settings that differ between several runs, or all settings of one."""
    # Where a run lies differs always; its name already says it.
    names = sorted({name for run in runs for name in run.config} - {"run_dir"})
    if len(runs) == 1:
        settings = _compare(runs, names, lambda run: run.config, "What the run was asked to do")
        return f"<details><summary>All {len(names)} settings</summary>{settings}</details>"
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
    rows = [[name, *(shown(values_of(run).get(name)) for run in runs)] for name in names]
    return table(caption, ["Name", *(run.name for run in runs)], rows)


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
