"""Line and bar plots for plotly, in colors that color-blind readers can distinguish, as HTML.

plot = Plot("Loss", x_title="examples seen", num_names=1)
plot.add_line("first", examples, loss, Style.of_order(0), hover="%{y:.4g} after %{x:,} examples")
plot.figure.show()
"""

import base64
import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import plotly.graph_objects as go

from kdist.report.records import Records
from kdist.report.tables import table

# Points of one line; more cannot be distinguished, and fewer do not show its course.
MAX_POINTS, MIN_POINTS = 2000, 50
# Points of all lines of a page: 11 bytes per point are less than 11 MB, plus 1.1 MB of plotly.js.
PAGE_POINTS = 1_000_000

# Okabe and Ito's colors for color-blind readers, without black, which is invisible on a dark page,
# and yellow, which is invisible on a white one.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# (a line, its companion such as validation), for each repetition of the colors.
DASHES = (
    ("solid", "dash"),
    ("dot", "dashdot"),
    ("longdash", "longdashdot"),
    ("12px,2px,2px,2px", "4px,8px"),
)
# Legible on white and on black, for downloaded images. The page has its own text color.
_GREY = "#808080"
_LEGEND_PIXELS = 240
MAX_RUNS_IN_LEGEND = 12


@dataclasses.dataclass(frozen=True)
class Style:
    """Style of a line: its color, its dash, and the dash of its companion."""

    color: str
    dash: str = "solid"
    companion_dash: str = "dash"

    @classmethod
    def of_order(cls, order: int) -> "Style":
        """Returns the style of the n-th run or device; 24 styles differ, then they repeat."""
        dash, companion = DASHES[order // len(COLORS) % len(DASHES)]
        return cls(COLORS[order % len(COLORS)], dash, companion)

    @property
    def companion(self) -> "Style":
        """The same color with the other dash."""
        return Style(self.color, self.companion_dash, self.dash)


@dataclasses.dataclass(frozen=True)
class Extent:
    """Values of a line before thinning, for readers who cannot see the plot."""

    name: str
    points: int
    first: float
    lowest: float
    highest: float
    last: float


class Plot:
    """Traces and layout of a plot, as plain objects.

    plotly's own objects would check thousands of lines, which takes half a minute. `data` holds
    plotly's traces, `layout` what differs from `COMMON_LAYOUT`, `extents` the values of each line,
    and `thinned` the number of thinned lines. `table`, if set, has the headings and the rows of the
    table below the plot.

    Args:
        title: title of the plot.
        x_title: title of the x-axis, with its unit.
        y_title: unit of the y-axis.
        num_names: number of names in the legend, which makes the plot taller.
        max_points: lines with more points are thinned.
        has_legend: False if the page itself lists the names.
        from_zero: whether the y-axis starts at 0.
        axis: quantity of the x-axis ("examples", "step", or "minutes"), if all lines belong to
            runs. The reader can then choose another one. Defaults to None.
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
        axis: str | None = None,
    ):
        self.title = title
        self.axis = axis
        self.x_title = x_title
        self.data: list[dict[str, Any]] = []
        self.layout = _layout(x_title, y_title, num_names if has_legend else 0)
        if from_zero:
            self.layout["yaxis"]["rangemode"] = "tozero"
        self.extents: list[Extent] = []
        self.thinned = 0
        self.table: tuple[list[str], list[list[str]]] | None = None
        self._max_points = max_points

    @property
    def figure(self) -> "go.Figure":
        """The plot as plotly's own object, which validates it. Needs the package plotly."""
        import plotly.graph_objects as go

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
        """Adds a line of `x` and `y`, both of shape (N,), unless it has no points.

        Args:
            name: name in the legend; lines with the same name are hidden and shown together.
            x, y: the points.
            style: color and dash.
            what: distinguishes lines with the same name.
            hover: plotly's template for the text at a point.
            run: name of the run, if the page can hide it.
            in_legend: False if the legend has another line with this name.
            symbol: marker of each point. Defaults to circles on lines with few points.
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
            "line": {"color": style.color, "dash": style.dash},
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
        """Adds points, each with a text that appears when the pointer is over it."""
        self.add_line(name, x, y, style, hover="%{text}")
        if len(y):
            marked = {"size": 9, "color": style.color}
            escaped = [_plain(text) for text in texts]
            self.data[-1] |= {"mode": "markers", "marker": marked, "text": escaped}

    def add_bars(
        self, name: str, names: Sequence[str], lengths: Sequence[float | None], color: str, **texts
    ):
        """Adds a segment to each of the horizontal stacked bars `names`; None adds none."""
        trace = {
            "type": "bar",
            "orientation": "h",
            "y": [_plain(each) for each in names],
            "x": list(lengths),
            "name": name,
            "marker": {"color": color},
            **texts,
        }
        self.data.append(trace)


def points_per_line(records: Iterable[Records]) -> int:
    """Returns the number of points per line that keeps a page within `PAGE_POINTS`."""
    lines = sum(len(table.columns) for table in records)
    return min(MAX_POINTS, max(MIN_POINTS, PAGE_POINTS // max(lines, 1)))


def thin(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `points` (4 or more) of a line's N points, in order, including its extremes.

    The line is divided into segments of equally many points. The lowest and the highest point of
    each segment stay, and so do the ends, so that the thinned line covers the same area. All values
    of `y` are finite.
    """
    if len(y) <= points:
        return x, y
    width = -(-len(y) // ((points - 2) // 2))  # of a segment
    missing = -len(y) % width
    segments = np.append(y, np.full(missing, y[-1])).reshape(-1, width)
    begins = np.arange(len(segments)) * width
    extremes = [begins + segments.argmin(1), begins + segments.argmax(1), [0, len(y) - 1]]
    kept = np.unique(np.minimum(np.concatenate(extremes), len(y) - 1))
    return x[kept], y[kept]


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Returns a logarithmic axis whose labels are whole values; Plotly's are single digits."""
    ratio = max(values) / min(values)
    digits = next(digits for below, digits in _DIGITS if ratio < below)
    ticks = [digit * 10.0**power for power in range(-6, 9) for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.4g}" for tick in ticks]}


def has_legend(runs: Sequence[Any]) -> bool:
    """Returns whether plots of these runs have legends; the page lists many runs instead."""
    return len(runs) <= MAX_RUNS_IN_LEGEND


def _plain(name):
    return html.escape(name, quote=False)  # plotly interprets tags in names


def _packed(values):
    """Returns an array in plotly.js's base64 format, a third of the size of its digits.

    Integers are exact; other numbers have seven digits, more than a plot shows.
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
    """Returns this plot's changes of `COMMON_LAYOUT`, of which a page has one copy."""
    return {
        "height": 340 + min(20 * num_names, _LEGEND_PIXELS),  # on a phone each name takes a line
        "showlegend": num_names > 0,
        "legend": {},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title}},
    }


# Ratio of the largest and the smallest value on an axis, below which it has labels at these digits.
_DIGITS: list[tuple[float, tuple[float, ...]]] = [
    (2, (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, *(half / 2 for half in range(4, 20)))),
    (20, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
    (float("inf"), (1, 2, 5)),
]

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
        "maxheight": _LEGEND_PIXELS,  # longer legends scroll
    },
    "hovermode": "closest",
    "hoverlabel": {"namelength": -1},
    "uirevision": "kept",  # keeps the zoom when the page updates
    "xaxis": _AXIS,
    "yaxis": _AXIS,
}


def figure_html(plot: Plot, identity: str) -> str:
    """Returns a `<figure>` that the script of the page draws; `identity` is unique in the page."""
    _keep_in_range(plot)
    data = json.dumps({"data": plot.data, "layout": plot.layout}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # text of a run must not end the script
    label = html.escape(f"{plot.title}, against {plot.x_title}. {_in_words(plot)}")
    axis = f' data-axis="{plot.axis}"' if plot.axis else ""
    return (
        f'<figure role=group aria-label="{html.escape(plot.title)}">'
        f'<div class=plot id="{identity}"{axis} role=img aria-label="{label}" '
        f'style="height:{plot.layout["height"]}px"></div>\n'
        f"<script type=application/json>{data}</script>\n{_in_figures(plot, identity)}</figure>"
    )


def _keep_in_range(plot):
    """Sets the range of a plot of one constant; plotly's own is the constant plus and minus 1."""
    values = {value for extent in plot.extents for value in (extent.lowest, extent.highest)}
    if len(values) == 1 and (value := values.pop()) > 0:
        plot.layout["yaxis"] |= {"range": [0, 2 * value]}
        plot.layout["yaxis"].pop("rangemode", None)  # has no effect with a range


def _in_words(plot):
    """Returns the text for screen readers; the table below the plot has the details."""
    if plot.table:
        return f"{len(plot.data)} lines, whose values are in the table below"
    if not plot.extents:
        return f"{len(plot.data)} segments, in the table below"
    if len(plot.extents) > 3:
        lowest = min(plot.extents, key=lambda e: e.lowest)
        highest = max(plot.extents, key=lambda e: e.highest)
        return (
            f"{len(plot.extents)} lines; the lowest value is {lowest.lowest:.4g} ({lowest.name}), "
            f"the highest {highest.highest:.4g} ({highest.name}). All are in the table below"
        )
    return "; ".join(
        f"{e.name}: from {e.first:.4g} to {e.last:.4g}, between {e.lowest:.4g} and {e.highest:.4g}"
        for e in plot.extents
    )


def _in_figures(plot, identity):
    if plot.table:
        headings, rows = plot.table
    elif plot.extents:
        headings = ["Line", "Points", "First", "Lowest", "Highest", "Last"]
        rows = [
            [e.name, f"{e.points:,}", *(f"{v:.4g}" for v in (e.first, e.lowest, e.highest, e.last))]
            for e in plot.extents
        ]
    else:
        headings = ["Run", *(part["name"] for part in plot.data)]
        columns = [
            [_bar(*bar) for bar in zip(p["x"], p["customdata"], strict=True)] for p in plot.data
        ]
        rows = [
            [html.unescape(run), *cells]
            for run, *cells in zip(plot.data[0]["y"], *columns, strict=True)
        ]
    caption = f"{plot.title} ({plot.layout['yaxis']['title']['text'] or plot.x_title})"
    return (
        f'<details class=figures id="{identity}-figures">'
        f"<summary>{html.escape(plot.title)} as a table</summary>"
        f"{table(caption, headings, rows)}</details>"
    )


def _bar(length, share):
    return "–" if length is None else f"{length:.4g} ({share:.1%})"
