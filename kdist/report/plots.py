"""Progress plots: runs overlaid, against the examples seen."""

from collections.abc import Sequence

import plotly.graph_objects as go

from kdist.report.runs import Run

# Okabe and Ito's colours, which colour-blind readers tell apart; black is left out for dark pages.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
_LEGIBLE_ON_BOTH = "#808080"


def progress_plots(runs: Sequence[Run]) -> list[tuple[str, go.Figure]]:
    """(title, figure) for the loss, the accuracy and the learning rate, where there are any.

    Training is a line, evaluation markers on a dashed line in the run's colour.
    """
    plots = [
        ("Loss", _figure(runs, "loss", "val_loss")),
        ("Accuracy", _figure(runs, "accuracy", "val_accuracy")),
        ("Learning rate", _figure(runs, "learning_rate", None)),
    ]
    return [(title, figure) for title, figure in plots if figure.data]


def _figure(runs, training, evaluation):
    figure = go.Figure()
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        _add(figure, run, ("train", "epoch"), training, f"{run.name}: training", colour, None)
        if evaluation:
            _add(figure, run, ("epoch",), evaluation, f"{run.name}: test", colour, "dash")
    figure.update_layout(
        height=380,
        margin={"l": 50, "r": 10, "t": 10, "b": 45},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font_color=_LEGIBLE_ON_BOTH,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
    )
    grid = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    figure.update_xaxes(title="examples seen", **grid)
    figure.update_yaxes(**grid)
    return figure


def _add(figure, run, kinds, value, name, colour, dash):
    points = sorted(
        {point for kind in kinds for point in zip(*run.series(kind, value), strict=True)}
    )
    if points:
        examples, numbers = zip(*points, strict=True)
        figure.add_scatter(
            x=examples,
            y=numbers,
            name=name,
            mode="lines+markers" if dash or len(points) < 20 else "lines",
            line={"color": colour, "dash": dash},
            marker={"size": 8, "symbol": "diamond" if dash else "circle"},
        )
