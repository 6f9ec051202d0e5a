"""The web page about one or several runs, in one file that asks for nothing else.

path = write(["runs/first", "runs/second"], "report.html", price_usd_per_hour={"second": 2.1})
"""

import hashlib
import html
import json
import os
import pathlib
import re
import string
from collections.abc import Mapping, Sequence
from importlib import resources

from plotly.offline import get_plotlyjs

from kdist.report import tables
from kdist.report.costs import Prices, check_names
from kdist.report.device_plots import device_plots, devices_in_words
from kdist.report.figures import figure_html
from kdist.report.plots import COMMON_LAYOUT, Style
from kdist.report.progress_plots import progress_plots
from kdist.report.runs import read_runs
from kdist.report.sentence import sentence
from kdist.report.thinning import points_per_line
from kdist.report.timing_plots import breakdown_plot, share_plots, step_time_plots

# Verdicts and names of more runs are folded, so that the page does not begin with pages of them.
_MAX_RUNS_UNFOLDED = 5
# CSS has no more dashes; the list of runs shows those of `plots.DASHES` as well as it can.
_SWATCHES = {"solid": "solid", "dot": "dotted", "longdash": "dashed"}
# A served page may ask the program that serves it, and nobody else, for news.
_MAY_CONNECT = {False: "", True: "; connect-src 'self'"}


def write(
    run_directories: Sequence[str | os.PathLike],
    output: str | os.PathLike = "report.html",
    price_usd_per_hour: Prices = None,
) -> pathlib.Path:
    """Writes the page about these runs; gives its path.

    The first run is the one that the others' speed is compared with. The page holds all it needs,
    plotly.js included (5 MB), and opens from disk, without a network.

    Args:
        run_directories: at least one directory of a run; it may go on still, or have been killed.
        output: the file to write; one that is there is replaced. Defaults to `report.html` in the
            current directory.
        price_usd_per_hour: US dollars that all machines of a run cost an hour: one price of all
            runs, or a price by the run's name. Defaults to the cost that the run itself wrote down.

    Raises:
        ValueError: no run was given, one was given twice, a file is not what a run writes, or a
            price is of no run.
        FileNotFoundError: a directory is not there, or holds no run.
        OSError: a run cannot be read, or the page cannot be written.
    """
    return save(page_text(run_directories, price_usd_per_hour), output)


def save(text: str, output: str | os.PathLike) -> pathlib.Path:
    """Writes a page; gives its path.

    Raises:
        OSError: the page cannot be written.
    """
    path = pathlib.Path(output)
    try:
        # File names need not be Unicode; what is not is shown by its bytes.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OSError(
            f"cannot write the page {path} ({error.strerror}); give a file in a "
            "directory that exists and that you may write to"
        ) from error
    return path


def page_text(
    run_directories: Sequence[str | os.PathLike], price_usd_per_hour: Prices = None
) -> str:
    """The page that `write` writes."""
    return fill(contents(run_directories, price_usd_per_hour))


def contents(
    run_directories: Sequence[str | os.PathLike], price_usd_per_hour: Prices = None
) -> dict[str, str]:
    """The parts of the page, by their names in its template; "version" tells other parts apart."""
    runs = read_runs(run_directories)
    check_names(price_usd_per_hour, runs)
    points = points_per_line(
        records for run in runs for records in (*run.records.values(), *run.devices.values())
    )
    page = _Page(points)
    parts = {
        "title": html.escape(", ".join(run.name for run in runs[:_MAX_RUNS_UNFOLDED])),
        "heading": html.escape(f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name),
        "sentence": html.escape(sentence(runs)),
        "notes": _notes(runs),
        "verdict": _verdict(runs),
        "runs": tables.run_table(runs, price_usd_per_hour),
        "picker": _picker(runs),
        "plots": page.plots(progress_plots(runs, points)) or "<p>No measurements yet.</p>",
        "time": page.time(runs),
        "devices": page.devices(runs),
        "operations": _operations(runs),
        "configuration": tables.configuration(runs),
        "environment": tables.environment(runs),
    }
    parts["thinned"] = page.thinning_in_words()
    whole = "".join(parts.values()).encode("utf-8", "replace")
    return {**parts, "version": hashlib.sha256(whole).hexdigest()[:16]}


def fill(parts: Mapping[str, str], live: bool = False) -> str:
    """The page of these parts; with `live`, it renews itself from who serves it."""
    live_script = f"<script>{_resource('live.js')}</script>" if live else ""
    parts = {**parts, "live": live_script, "connect": _MAY_CONNECT[live]}
    return fill_template(_resource("page.html"), parts)


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """A page of plots: besides `parts`, its $style, $plotly, $layout and $script are filled in."""
    return string.Template(template).substitute(
        parts,
        style=_resource("page.css"),
        plotly=get_plotlyjs(),
        layout=json.dumps(COMMON_LAYOUT),
        script=_resource("page.js"),
    )


def _resource(name):
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


class _Page:
    """Writes plots, and remembers which ids are taken and what was thinned."""

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

    def thinning_in_words(self):
        if not self._thinned:
            return ""
        return (
            f"<p>{self._thinned:,} of {self._lines:,} lines were thinned to {self._points:,} "
            "points: "
            "of every stretch of a line, its lowest and its highest point are shown. The figures "
            "below a plot are of all points.</p>"
        )

    def time(self, runs):
        whole = breakdown_plot(runs)
        plots = [*([whole] if whole else []), *step_time_plots(runs, self._points)]
        without = [run for run in runs if not run.metrics("timing").length]
        missing = _missing("metrics.jsonl has no line of kind “timing”", without)
        return missing + self.plots(plots)

    def devices(self, runs):
        parts = [
            _missing(
                "Nothing was measured of the devices, as there is no devices.jsonl or it is empty",
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


def _verdict(runs):
    """What each run said of itself, most important first."""
    parts = []
    for run in runs:
        said = run.summary.get("verdict")
        sentences = (
            [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
        )
        if sentences:
            items = "".join(f"<li>{html.escape(each)}</li>" for each in sentences)
            name = f"<p><b>{html.escape(run.name)}</b></p>" if len(runs) > 1 else ""
            parts.append(f"{name}<ul>{items}</ul>")
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


def _picker(runs):
    """Check boxes that hide and show a run in all plots; a legend takes no keys."""
    if len(runs) == 1:
        return ""
    boxes = []
    for order, run in enumerate(runs):
        style, name = Style.of_order(order), html.escape(run.name)
        dash = _SWATCHES.get(style.dash, "double")
        boxes.append(
            f'<label><input type=checkbox checked value="{name}">'
            f'<span class=swatch style="border-top:3px {dash} {style.colour}"></span>{name}</label>'
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
