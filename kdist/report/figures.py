"""A plot as HTML: plotly draws it when it comes into view, and a table says it in figures.

figure_html(plot, "loss")      # <figure> with the plot's data, a text for screen readers, a table
"""

import html
import json

from kdist.report.plots import Plot
from kdist.report.tables import table


def figure_html(plot: Plot, identity: str) -> str:
    """A `<figure>` that needs the script of the page to draw it.

    Args:
        plot: what to draw.
        identity: the id of the plot's element; its only one in the page.
    """
    data = json.dumps({"data": plot.data, "layout": plot.layout}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no text of a run ends the script
    label = html.escape(f"{plot.title}, against {plot.x_title}. {_in_words(plot)}")
    return (
        f'<figure role=group aria-label="{html.escape(plot.title)}">'
        f'<div class=plot id="{identity}" role=img aria-label="{label}" '
        f'style="height:{plot.layout["height"]}px"></div>\n'
        f"<script type=application/json>{data}</script>\n{_in_figures(plot, identity)}</figure>"
    )


def _in_words(plot):
    """What a screen reader says in the place of the plot; the table after it has the rest."""
    if not plot.extents:
        return f"{len(plot.data)} parts, in the table below"
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
    if plot.extents:
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
        f"<summary>{html.escape(plot.title)} in figures</summary>"
        f"{table(caption, headings, rows)}</details>"
    )


def _bar(length, share):
    return "–" if length is None else f"{length:.4g} ({share:.1%})"
