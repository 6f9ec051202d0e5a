"""Web page about one or several runs, in a single file that needs no network."""

import hashlib
import html
import json
import os
import pathlib
import re
import string
from collections.abc import Mapping, Sequence
from importlib import resources

from kdist.report import tables
from kdist.report.plots import COMMON_LAYOUT, Style, figure_html, points_per_line
from kdist.report.progress_plots import axes_of, progress_plots
from kdist.report.runs import Prices, check_names, read_runs
from kdist.report.search import find_search, search_plot, search_text
from kdist.report.telemetry_plots import (
    breakdown_plot,
    device_plots,
    devices_in_words,
    share_plots,
    step_time_plots,
)
from kdist.run_directory import write_text

# Verdicts and names of more runs are collapsed, so that the page does not start with pages of them.
_MAX_RUNS_UNFOLDED = 5
# CSS approximations of the dashes in `plots.DASHES`, for the list of runs.
_SWATCHES = {"solid": "solid", "dot": "dotted", "longdash": "dashed"}


def write(
    run_directories: Sequence[str | os.PathLike],
    output: str | os.PathLike = "report.html",
    price_usd_per_hour: Prices = None,
) -> pathlib.Path:
    """Writes a web page about runs. It contains plotly.js (1.1 MB) and opens without a network.

    The first run is the baseline of the speed-up.

    Args:
        run_directories: at least one run directory, directory of runs such as those of a search, or
            URL of a mirror such as gs://bucket/runs/a; runs may be unfinished or killed.
        output: the file to write; an existing file is replaced. Defaults to `report.html` in the
            current directory.
        price_usd_per_hour: US dollars per hour for all machines of a run: one price for every run,
            or prices by the name of the run. Defaults to the cost in the summary of the run.

    Returns:
        The path of the page.

    Raises:
        ValueError: there is no run, a run appears twice, a file is damaged, or a price is for an
            unknown run.
        FileNotFoundError: a directory does not exist or holds no run.
        OSError: a run cannot be read, or the page cannot be written.

    Example:

        runs = ["runs/first", "runs/second"]
        kdist.report.write(runs, "report.html", price_usd_per_hour={"second": 2.1})
    """
    return save(page_text(run_directories, price_usd_per_hour), output)


def show(
    run_directories: Sequence[str | os.PathLike],
    height: int = 720,
    price_usd_per_hour: Prices = None,
) -> None:
    """Shows the page of `write` below the cell of a notebook, which grows by 1.2 MB or more.

    Args:
        run_directories: see `write`.
        height: height of the frame in pixels. Defaults to 720.
        price_usd_per_hour: see `write`.

    Raises:
        RuntimeError: the program is not a notebook.
        ValueError, FileNotFoundError, OSError: see `write`.

    Example:

        kdist.report.show(["runs/first", "runs/second"])
    """
    if not _in_notebook():
        raise RuntimeError(
            "kdist.report.show needs a notebook to show the page in; elsewhere, "
            'kdist.report.write(runs, "report.html") makes a file for a browser'
        )
    from IPython.display import HTML, display

    page = html.escape(page_text(run_directories, price_usd_per_hour))
    frame = (
        f'<iframe srcdoc="{page}" title="kdist report" width="100%" height="{height}" '
        'style="border: 0"></iframe>'
    )
    # Inside another element, as IPython warns about a bare frame.
    display(HTML(f"<div>{frame}</div>"))


def _in_notebook():
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")  # IPython in a terminal has none


def save(text: str, output: str | os.PathLike) -> pathlib.Path:
    """Returns the path of a page after writing it; raises OSError if that fails."""
    path = pathlib.Path(output)
    write_text(path, text)
    return path


def page_text(
    run_directories: Sequence[str | os.PathLike], price_usd_per_hour: Prices = None
) -> str:
    """Returns the page that `write` writes."""
    return fill(contents(run_directories, price_usd_per_hour))


def contents(
    run_directories: Sequence[str | os.PathLike], price_usd_per_hour: Prices = None
) -> dict[str, str]:
    """Returns the parts of the page by their names in the template, and a hash as "version"."""
    runs = read_runs(run_directories)
    check_names(price_usd_per_hour, runs)
    points = points_per_line(
        records for run in runs for records in (*run.records.values(), *run.devices.values())
    )
    page = _Page(points)
    axes = axes_of(runs)
    search = page.search(runs)
    parts = {
        "title": html.escape(", ".join(run.name for run in runs[:_MAX_RUNS_UNFOLDED])),
        "heading": html.escape(f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name),
        "sentence": html.escape(tables.summarize(runs)),
        "notes": _notes(runs),
        "tiles": tables.tiles(runs[0], price_usd_per_hour) if len(runs) == 1 else "",
        "verdict": _verdicts(runs),
        "axes": json.dumps(axes, separators=(",", ":")).replace("<", "\\u003c"),
        "choices": _axis_choices(axes),
        "runs": tables.run_table(runs, price_usd_per_hour),
        "search": search,
        "search_link": '<a href="#search">Search</a> ' if search else "",
        "picker": _picker(runs),
        "plots": page.plots(progress_plots(runs, points)) or "<p>No measurements yet.</p>",
        "time": page.time(runs),
        "devices": page.devices(runs),
        "operations": _operations(runs),
        "configuration": tables.configuration(runs),
        "environment": tables.environment(runs),
    }
    parts["thinned"] = page.thinning_note()
    text = "".join(parts.values()).encode("utf-8", "replace")
    return {**parts, "version": hashlib.sha256(text).hexdigest()[:16]}


def fill(parts: Mapping[str, str], live: bool = False) -> str:
    """Returns the page with these parts; with `live`, it updates itself from its server."""
    return fill_template(
        _resource("page.html"),
        parts,
        attributes=f' data-version="{parts["version"]}"',
        # A served page may only connect to the program that serves it.
        connect="; connect-src 'self'" if live else "",
        live=f"<script>{_resource('live.js')}</script>\n" if live else "",
    )


def fill_template(
    template: str, parts: Mapping[str, str], attributes: str = "", connect: str = "", live: str = ""
) -> str:
    """Returns a page of plots: `parts` in a template of the body, within the frame of all pages."""
    return string.Template(_resource("frame.html")).substitute(
        title=parts["title"],
        body=string.Template(template).substitute(parts),
        attributes=attributes,
        connect=connect,
        style=_resource("page.css"),
        plotly=_resource("plotly/plotly-basic.min.js"),
        layout=json.dumps(COMMON_LAYOUT),
        script=_resource("page.js"),
        live=live,
    )


def _resource(name):
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


class _Page:
    """Writes plots with unique ids, and counts the thinned lines."""

    def __init__(self, points):
        self._points = points
        self._ids: set[str] = set()
        self._lines = self._thinned = 0

    def plots(self, plots, prefix="", heading="h3"):
        return "\n".join(self._plot(plot, prefix, heading) for plot in plots)

    def _plot(self, plot, prefix, heading):
        self._lines += len(plot.extents)
        self._thinned += plot.thinned
        identity = prefix + (re.sub("[^a-z0-9]+", "-", plot.title.lower()).strip("-") or "plot")
        while identity in self._ids:
            identity += "-"
        self._ids.add(identity)
        title = f"<{heading}>{html.escape(plot.title)}</{heading}>"
        return f"<div class=titled>{title}\n{figure_html(plot, identity)}</div>"

    def thinning_note(self):
        if not self._thinned:
            return ""
        return (
            f"<p>{self._thinned:,} of {self._lines:,} lines were thinned to {self._points:,} "
            "points. Each segment of a line keeps its lowest and its highest point. The tables "
            "below the plots include all points.</p>"
        )

    def search(self, runs):
        found = find_search(runs)
        if found is None:
            return ""
        plot = self.plots([search_plot(found)])
        return f"<section id=search><h2>Search</h2>\n{search_text(found)}\n{plot}</section>"

    def time(self, runs):
        whole = breakdown_plot(runs)
        plots = [*([whole] if whole else []), *step_time_plots(runs, self._points)]
        without = [run for run in runs if not run.metrics("timing").length]
        missing = _missing(
            "No step was timed, as in a run of few steps: metrics.jsonl has no records of kind "
            "“timing”",
            without,
        )
        return missing + self.plots(plots)

    def devices(self, runs):
        parts = [
            _missing(
                "No devices were measured: devices.jsonl does not exist or is empty",
                [run for run in runs if not run.devices],
            )
        ]
        for order, run in enumerate(runs):
            prefix = f"run-{order}-"
            plots = [*share_plots(run, self._points), *device_plots(run, self._points)]
            if plots:
                about = ": ".join(filter(None, [run.name, devices_in_words(run)]))
                is_open = "" if any("<details" in part for part in parts) else " open"
                parts.append(
                    f'<details class=run id="{prefix}devices"{is_open}>'
                    f"<summary>{html.escape(about)}</summary>"
                    f"<div class=tiles>{self.plots(plots, prefix, 'h4')}</div></details>"
                )
        return "\n".join(parts)


def _missing(what, runs):
    return f"<p>{html.escape(f'{what}: {_names(runs)}.')}</p>\n" if runs else ""


def _names(runs):
    names = [run.name for run in runs]
    if len(names) > _MAX_RUNS_UNFOLDED + 1:
        names[_MAX_RUNS_UNFOLDED:] = [f"{len(names) - _MAX_RUNS_UNFOLDED} others"]
    return ", ".join(names)


def _notes(runs):
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    texts = [f"{_names([run for run in runs if note in run.notes])}: {note}" for note in notes]
    return "\n".join(f"<p class=note>{html.escape(text)}</p>" for text in texts)


def _verdicts(runs):
    """Returns the verdict of each run, most important findings first."""
    parts = []
    for run in runs:
        if findings := _findings(run):
            items = "".join(f"<li>{html.escape(each)}</li>" for each in findings)
            name = f"<p><b>{html.escape(run.name)}</b></p>" if len(runs) > 1 else ""
            parts.append(f"{name}<ul>{items}</ul>")
    if not parts and (remark := _remark_without_findings(runs)):
        parts.append(f"<p>{html.escape(remark)}</p>")
    if not parts:
        return ""
    shown, folded = parts[:_MAX_RUNS_UNFOLDED], parts[_MAX_RUNS_UNFOLDED:]
    text = "\n".join(shown)
    if folded:
        text += (
            f"<details id=verdicts><summary>{len(folded)} more runs</summary>\n"
            + "\n".join(folded)
            + "</details>"
        )
    return f"<section id=verdict class=verdict><h2>Verdict</h2>\n{text}\n</section>"


def _findings(run):
    verdict = run.summary.get("verdict")
    return [each for each in verdict if isinstance(each, str)] if isinstance(verdict, list) else []


def _remark_without_findings(runs):
    """Returns why one run has no findings; empty if that is unknown, and for several runs."""
    run = runs[0]
    if len(runs) > 1 or run.summary.get("verdict") != [] or "measured_enough" not in run.summary:
        return ""
    steps, seconds = (run.figure(f"measured_{what}") or 0 for what in ("steps", "seconds"))
    measured = f"{steps:,.0f} steps were measured, in {seconds:,.1f} seconds"
    if run.summary["measured_enough"]:
        return f"No bottleneck was found. {measured}."
    return f"No verdict. {measured}, which is too short to be sure."


def _axis_choices(axes):
    labels = {"examples": "examples", "step": "steps", "minutes": "time", "epoch": "epochs"}
    return "\n".join(
        f"<label><input type=radio name=axis value={axis}{' checked' * (not order)}>"
        f" {labels[axis]}</label>"
        for order, axis in enumerate(axes["choices"])
    )


def _picker(runs):
    """Returns check boxes that hide and show runs; unlike legends, they work with the keyboard."""
    if len(runs) == 1:
        return ""
    boxes = []
    for order, run in enumerate(runs):
        style, name = Style.of_order(order), html.escape(run.name)
        dash = _SWATCHES.get(style.dash, "double")
        boxes.append(
            f'<label><input type=checkbox checked value="{name}">'
            f'<span class=swatch style="border-top:3px {dash} {style.color}"></span>{name}</label>'
        )
    return (
        "<fieldset id=picker><legend>Runs shown</legend><p>"
        '<button type=button value="all">All</button> '
        '<button type=button value="none">None</button></p>'
        f"<div class=boxes>{''.join(boxes)}</div></fieldset>"
    )


def _operations(runs):
    found = [text for run in runs if (text := tables.operations(run))]
    if not found:
        return ""
    return "<section id=operations><h2>Operations</h2>\n" + "\n".join(found) + "</section>"
