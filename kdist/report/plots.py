"""A plot of lines or bars as plotly draws it, in colours that colour-blind readers tell apart.

plot = Plot("Loss", x_title="examples seen", num_names=1)
plot.add_line("first", examples, loss, Style.of_order(0), hover="%{y:.4g} after %{x:,} examples")
plot.figure.show()
"""

import base64
import dataclasses
import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kdist.report.thinning import MAX_POINTS, thin

# Okabe and Ito's colours, which colour-blind readers tell apart, but black, which is lost on a
# dark page, and yellow, which is lost on a white one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# (of a line, of its companion such as validation); where the colours begin anew, others follow.
DASHES = (
    ("solid", "dash"),
    ("dot", "dashdot"),
    ("longdash", "longdashdot"),
    ("12px,2px,2px,2px", "4px,8px"),
)
# Legible on white and on black: what a downloaded image has. The page has its own text colour.
_GREY = "#808080"
_LEGEND_PIXELS = 240
MAX_RUNS_IN_LEGEND = 12


@dataclasses.dataclass(frozen=True)
class Style:
    """How a line looks: its colour, its dash, and the dash of its companion."""

    colour: str
    dash: str = "solid"
    companion_dash: str = "dash"

    @classmethod
    def of_order(cls, order: int) -> "Style":
        """The style of the run or device of this number; 24 differ, then they begin anew."""
        dash, companion = DASHES[order // len(COLOURS) % len(DASHES)]
        return cls(COLOURS[order % len(COLOURS)], dash, companion)

    @property
    def companion(self) -> "Style":
        """The same colour in the other dash."""
        return Style(self.colour, self.companion_dash, self.dash)


@dataclasses.dataclass(frozen=True)
class Extent:
    """A line in figures, for who cannot see it: before thinning, so that nothing is lost."""

    name: str
    points: int
    first: float
    lowest: float
    highest: float
    last: float


class Plot:
    """What plotly draws, as plain objects: checking thousands of lines takes it half a minute.

    Args:
        title: what is plotted.
        x_title: what lies along the x-axis, with its unit.
        y_title: the unit of the y-axis. Defaults to none.
        num_names: how many names the legend has; it makes the plot taller.
        max_points: more points of a line are thinned. Defaults to 2,000.
        has_legend: False where the page itself lists the names. Defaults to True.
        from_zero: whether the y-axis begins at 0, as that of quantities does. Defaults to False.

    Attributes:
        title: what is plotted.
        x_title: what lies along the x-axis.
        data: plotly's traces.
        layout: plotly's layout, as far as it differs from `COMMON_LAYOUT`.
        extents: each line in figures.
        thinned: how many lines have fewer points than were measured.
    """

    def __init__(
        self,
        title: str,
        x_title: str,
        y_title: str = "",
        num_names: int = 1,
        max_points: int = MAX_POINTS,
        *,
        has_legend: bool = True,
        from_zero: bool = False,
    ):
        self.title = title
        self.x_title = x_title
        self.data: list[dict[str, Any]] = []
        self.layout = _layout(x_title, y_title, num_names if has_legend else 0)
        if from_zero:
            self.layout["yaxis"]["rangemode"] = "tozero"
        self.extents: list[Extent] = []
        self.thinned = 0
        self._max_points = max_points

    @property
    def figure(self) -> go.Figure:
        """The plot as plotly's own object, which checks it."""
        figure = go.Figure(data=self.data, layout=COMMON_LAYOUT)
        return figure.update_layout(self.layout)

    def add_line(
        self,
        name: str,
        x: np.ndarray,
        y: np.ndarray,
        style: Style,
        *,
        what: str = "",
        hover: str = "%{y:.4g}",
        run: str | None = None,
        in_legend: bool = True,
        symbol: str | None = None,
    ):
        """Adds a line; none without points.

        Args:
            name: in the legend; lines of one name are hidden and shown together.
            x: of shape (N,).
            y: of shape (N,).
            style: how it looks.
            what: tells lines of one name apart. Defaults to nothing.
            hover: what is said of a point, in plotly's words.
            run: the run that the line belongs to, where the page hides and shows runs.
            in_legend: False if another line stands there for it.
            symbol: marks every point. Defaults to circles on lines of few points.
        """
        if not len(y):
            return
        full_name = f"{name}: {what}" if what else name
        ends_and_extremes = (y[0], y.min(), y.max(), y[-1])
        self.extents.append(Extent(full_name, len(y), *map(float, ends_and_extremes)))
        self.thinned += len(y) > self._max_points
        x, y = thin(x, y, self._max_points)
        is_marked = symbol is not None or len(y) < 20
        trace: dict[str, Any] = {
            "type": "scatter",
            "x": _packed(x),
            "y": _packed(y),
            "name": _plain(name),
            "legendgroup": _plain(name),
            "showlegend": in_legend and bool(self.layout["showlegend"]),
            "mode": "lines+markers" if is_marked else "lines",
            "line": {"color": style.colour, "dash": style.dash},
            "hovertemplate": f"{hover}<extra>{_plain(full_name)}</extra>",
        }
        if is_marked:
            trace["marker"] = {"size": 8 if symbol else 6, "symbol": symbol or "circle"}
        if run is not None:
            trace["meta"] = {"run": run}
        self.data.append(trace)

    def add_points(
        self, name: str, x: np.ndarray, y: np.ndarray, texts: Sequence[str], style: Style
    ):
        """Adds points, each with a text that shows when it is pointed at; none without points."""
        self.add_line(name, x, y, style, hover="%{text}")
        if len(y):
            marked = {"size": 9, "color": style.colour}
            said = [_plain(text) for text in texts]
            self.data[-1] |= {"mode": "markers", "marker": marked, "text": said}

    def add_bars(
        self, name: str, names: Sequence[str], lengths: Sequence[float | None], colour: str, **texts
    ):
        """Adds a part to horizontal stacked bars: one length for each of `names`, or None."""
        trace = {
            "type": "bar",
            "orientation": "h",
            "y": [_plain(each) for each in names],
            "x": list(lengths),
            "name": name,
            "marker": {"color": colour},
            **texts,
        }
        self.data.append(trace)


def has_legend(runs: Sequence[Any]) -> bool:
    """Whether the plots of these runs have legends; many runs have a list beside the plots."""
    return len(runs) <= MAX_RUNS_IN_LEGEND


def _plain(name):
    return html.escape(name, quote=False)  # plotly reads tags in a name


def _packed(values):
    """An array as plotly.js reads it from base64, in a third of the room that digits take.

    Whole numbers are exact; others have seven digits, more than a plot shows.
    """
    values = np.asarray(values)
    largest = np.abs(values).max()
    if np.all(values == np.trunc(values)):
        kind = "i4" if largest < 2**31 else "f8"
    else:
        kind = "f4" if largest < 1e38 else "f8"
    data = base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()
    return {"dtype": kind, "bdata": data}


def _layout(x_title, y_title, num_names):
    """What this plot's layout has beside `COMMON_LAYOUT`, of which a page needs one copy."""
    return {
        "height": 340 + min(20 * num_names, _LEGEND_PIXELS),  # on a phone a name has a line
        "showlegend": num_names > 0,
        "legend": {},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title}},
    }


_AXIS = {"gridcolor": "rgba(128,128,128,0.3)", "zeroline": False, "automargin": True}
COMMON_LAYOUT: dict[str, Any] = {
    "margin": {"l": 50, "r": 10, "t": 30, "b": 45},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": _GREY, "size": 13},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _GREY, "activecolor": "#0072B2"},
    "legend": {
        "orientation": "h",
        "x": 0,
        "y": 0,
        "yref": "container",
        "yanchor": "bottom",
        "maxheight": _LEGEND_PIXELS,  # what is more scrolls
    },
    "hovermode": "closest",
    "hoverlabel": {"namelength": -1},
    "uirevision": "kept",  # zooming outlives a refresh
    "xaxis": _AXIS,
    "yaxis": _AXIS,
}
