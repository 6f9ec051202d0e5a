"""The web page about one or several runs, in one file that asks for nothing else.

path = write(["runs/first", "runs/second"], "report.html")
"""

import html
import os
import pathlib
import string
from collections.abc import Sequence
from importlib import resources

from plotly.offline import get_plotlyjs

from kdist.report import tables
from kdist.report.plots import progress_plots
from kdist.report.runs import Run, read_runs
from kdist.report.sentence import sentence

_PLOT_OPTIONS = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}


def write(
    run_directories: Sequence[str | os.PathLike], output: str | os.PathLike = "report.html"
) -> pathlib.Path:
    """Writes the page about these runs; gives its path.

    The first run is the one that the others' speed is compared with. The page holds all it needs,
    plotly.js included (5 MB), and opens from disk, without a network.

    Args:
        run_directories: at least one directory of a run; it may go on still, or have been killed.
        output: the file to write; one that is there is replaced. Defaults to `report.html` in the
            current directory.

    Raises:
        ValueError: no run was given, one was given twice, or a file is not what a run writes.
        FileNotFoundError: a directory is not there, or holds no run.
        OSError: a run cannot be read, or the page cannot be written.
    """
    text = _page(read_runs(run_directories))
    path = pathlib.Path(output)
    try:
        # File names need not be Unicode; what is not is shown by its bytes.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OSError(
            f"cannot write the page {path} ({error.strerror}); give as --output a file in a "
            "directory that exists and that you may write to"
        ) from error
    return path


def _page(runs: Sequence[Run]) -> str:
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        heading=html.escape(f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name),
        sentence=html.escape(sentence(runs)),
        notes=_notes(runs),
        runs=tables.run_table(runs),
        plots=_plots(runs),
        configuration=tables.configuration(runs),
        environment=tables.environment(runs),
        plotly=get_plotlyjs(),
    )


def _notes(runs):
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return "\n".join(f"<p class=note>{html.escape(note)}</p>" for note in notes)


def _plots(runs):
    plots = progress_plots(runs)
    return "\n".join(_plot(title, figure) for title, figure in plots) or (
        "<p>No measurements yet.</p>"
    )


def _plot(title, figure):
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config=_PLOT_OPTIONS,
        div_id=title.lower().replace(" ", "-"),  # a random one would change the page every time
    )
    return f"<h3>{title}</h3>\n<figure>{plot}</figure>"
