"""The web page about one or several runs, in one file that asks for nothing else."""

import html
import os
import pathlib
import string
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs

from kdist.report.plots import progress_plots
from kdist.report.runs import read_run


def _digits(number: int) -> Callable[[Any], str]:
    return lambda value: f"{value:,.{number}f}"


# Heading of a column -> where the summary, or else the configuration, has it, and how it is shown.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Model": ("model", str),
    "Data": ("dataset", str),
    "Strategy": ("strategy", str),
    "Devices": (
        "devices",
        lambda value: ", ".join(value) if isinstance(value, list) else str(value),
    ),
    "Local batch": ("local_batch_size", str),
    "Global batch": ("global_batch_size", str),
    "Precision": ("precision", str),
    "Epochs": ("epochs", str),
    "Test accuracy": ("test_accuracy", _digits(4)),
    "Test loss": ("test_loss", _digits(4)),
    "Seconds an epoch": ("seconds_per_epoch", _digits(1)),
    "Examples a second": ("examples_per_second", _digits(1)),
}


def write(
    run_directories: Sequence[str | os.PathLike], output: str | os.PathLike = "report.html"
) -> pathlib.Path:
    """Writes the page about these runs; gives its path.

    The first run is the one that the others' speed is compared with.

    Raises:
        ValueError: no run was given, or a file of a run is not what a run writes.
        FileNotFoundError: a directory is not there, or holds no run.
        OSError: the page cannot be written.
    """
    if not run_directories:
        raise ValueError("no run was given; name at least one run directory")
    runs = [read_run(directory) for directory in run_directories]
    template = string.Template(
        resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    page = template.substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        notes="".join(
            f"<p class=note>{html.escape(f'{run.name}: {note}')}</p>"
            for run in runs
            for note in run.notes
        ),
        runs=_run_table(runs),
        plots=_plots(runs),
        configuration=_configuration(runs),
        environment=_environment(runs),
        plotly=get_plotlyjs(),
    )
    path = pathlib.Path(output)
    path.write_text(page, encoding="utf-8")
    return path


def _run_table(runs):
    headings = ["Run", *COLUMNS]
    rows = [[run.name, *(_shown(run, *column) for column in COLUMNS.values())] for run in runs]
    if len(runs) > 1:
        headings.append("Speed-up")
        for row, run in zip(rows, runs, strict=True):
            row.append(_speed_up(run, runs[0]))
    return _table("Runs", headings, rows)


def _shown(run, key, show):
    value = run.summary.get(key, run.config.get(key))
    return "–" if value is None else show(value)


def _speed_up(run, first):
    rates = [r.summary.get("examples_per_second") for r in (run, first)]
    return f"{rates[0] / rates[1]:.2f}" if all(rates) else "–"


def _plots(runs):
    parts = []
    for title, figure in progress_plots(runs):
        plot = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            config={"responsive": True, "displaylogo": False},
        )
        parts.append(f"<figure><h2>{title}</h2>{plot}</figure>")
    return "\n".join(parts) or "<p>No measurements yet.</p>"


def _configuration(runs):
    names = sorted({name for run in runs for name in run.config})
    differ = [n for n in names if len({repr(run.config.get(n)) for run in runs}) > 1]
    shown = differ if len(runs) > 1 else names
    if not shown:
        return "<p>All runs have the same configuration.</p>"
    rows = [[name, *(str(run.config.get(name, "–")) for run in runs)] for name in shown]
    title = "What differs" if len(runs) > 1 else "Flags"
    return _table(title, ["Setting", *(run.name for run in runs)], rows)


def _environment(runs):
    names = sorted({name for run in runs for name in run.summary.get("versions") or {}})
    rows = [
        [name, *(str((run.summary.get("versions") or {}).get(name, "–")) for run in runs)]
        for name in names
    ]
    rows.append(["git commit", *(str(run.summary.get("git_commit") or "–") for run in runs)])
    return _table("Versions", ["", *(run.name for run in runs)], rows)


def _table(caption, headings, rows):
    head = "".join(f"<th scope=col>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>"
        + f"<th scope=row>{html.escape(row[0])}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class=scroll tabindex=0><table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
