"""Progress plots: runs overlaid, against the examples seen.

for title, figure in progress_plots(runs):
    figure.show()
"""

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from kdist.report.runs import Run

# Okabe and Ito's colours, which colour-blind readers tell apart, but black, which is lost on a
# dark page, and yellow, which is lost on a white one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# (training, validation); where the colours begin anew, so do other dashes.
_DASHES = (("solid", "dash"), ("dot", "dashdot"))
# Legible on white and on black: what a downloaded image has. The page has its own text colour.
_GREY = "#808080"
# More points cannot be seen, and make a long run's page heavy.
MAX_POINTS = 2000


def progress_plots(runs: Sequence[Run]) -> list[tuple[str, go.Figure]]:
    """(title, figure) for the loss, the accuracy and the learning rate, where there are any.

    Training is a line, validation diamonds on a dashed line in the run's colour; the run's name in
    the legend hides and shows both. A line longer than `MAX_POINTS` is thinned evenly.
    """
    plots = [
        ("Loss", _figure(runs, "loss", "val_loss")),
        ("Accuracy", _figure(runs, "accuracy", "val_accuracy")),
        ("Learning rate", _figure(runs, "learning_rate", None)),
    ]
    return [(title, figure) for title, figure in plots if figure.data]


def _figure(runs, training, validation):
    figure = go.Figure(layout=_layout(len(runs)))
    for order, run in enumerate(runs):
        colour = COLOURS[order % len(COLOURS)]
        dashes = _DASHES[order // len(COLOURS) % len(_DASHES)]
        line, diamonds = (
            _points(run, ("train", "epoch"), training),
            _points(run, ("epoch",), validation),
        )
        if line:
            _add(figure, run, "training", line, {"color": colour, "dash": dashes[0]})
        if diamonds:
            _add(
                figure, run, "validation", diamonds, {"color": colour, "dash": dashes[1]}, not line
            )
    return figure


def _points(run, kinds, value):
    points = sorted({p for kind in kinds for p in zip(*run.series(kind, value), strict=True)})
    stride = -(-len(points) // MAX_POINTS)
    return points if stride < 2 else [*points[:-1:stride], points[-1]]


def _add(figure, run, what, points, line, in_legend=True):
    examples, measured = zip(*points, strict=True)
    name = html.escape(run.name, quote=False)  # plotly reads tags in a name
    is_validation = what == "validation"
    figure.add_scatter(
        x=examples,
        y=measured,
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        mode="lines+markers" if is_validation or len(points) < 20 else "lines",
        line=line,
        marker={"size": 8, "symbol": "diamond" if is_validation else "circle"},
        hovertemplate=f"%{{y:.4g}} after %{{x:,}} examples<extra>{name}: {what}</extra>",
    )


def _layout(num_runs):
    axis = {"gridcolor": "rgba(128,128,128,0.3)", "zeroline": False, "automargin": True}
    return {
        "template": go.layout.Template(),
        "height": 340 + 20 * num_runs,  # on a phone each run has a line of the legend
        "margin": {"l": 50, "r": 10, "t": 30, "b": 45},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _GREY, "size": 13},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _GREY, "activecolor": "#0072B2"},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "hovermode": "closest",
        "hoverlabel": {"namelength": -1},
        "xaxis": {"title": "examples seen", **axis},
        "yaxis": axis,
    }
