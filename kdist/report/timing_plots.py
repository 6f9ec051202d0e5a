"""Plots of where the time goes: waiting for input, callbacks, computing, reducing.

breakdown_plot(runs)           # a bar a run
step_time_plots(runs)          # percentiles of a step's time, runs overlaid
share_plots(run)               # of one run: the parts over time, and how busy each replica was
"""

from collections.abc import Sequence

import numpy as np

from kdist.report.plots import Plot, Style, has_legend
from kdist.report.records import Records, number
from kdist.report.runs import Run
from kdist.report.thinning import MAX_POINTS

# Part of a step -> its colour and how it is called.
PARTS = {
    "input": ("#E69F00", "waiting for input"),
    "callbacks": ("#CC79A7", "callbacks"),
    "compute": ("#0072B2", "compute"),
    "reduce": ("#009E73", "reduce"),
    "step": ("#56B4E9", "step (compute and reduce)"),
}
_SHARE_FIELDS = {
    "input": "input_share",
    "callbacks": "callback_share",
    "compute": "compute_share",
    "reduce": "reduce_share",
    "step": "step_share",
}
_MINUTES = "minutes since training began"
_PERCENTILES = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
# The lines of more runs, three each, could not be told apart in one plot.
_MAX_RUNS_WITH_ALL_PERCENTILES = 4


def breakdown(run: Run) -> dict[str, float]:
    """Share of each part of a step's time, between 0 and 1; empty if it was not measured.

    The summary's, or, while the run goes on, the mean of its windows by their length.
    """
    said = run.summary.get("breakdown")
    said = said if isinstance(said, dict) else {}
    known = {part: share for part in PARTS if (share := number(said.get(part))) is not None}
    if known:
        return known
    timing = run.metrics("timing")
    shares = {part: _mean(timing, field) for part, field in _SHARE_FIELDS.items()}
    if shares["compute"] is not None and shares["reduce"] is not None and shares["step"]:
        # Measured in a few windows only; all windows say how much they are together.
        whole = shares.pop("step") / (shares["compute"] + shares["reduce"] or 1)
        shares |= {part: shares[part] * whole for part in ("compute", "reduce")}
    else:
        shares["compute"] = shares["reduce"] = None
    return {part: share for part, share in shares.items() if share is not None}


def mean_step_seconds(run: Run) -> float | None:
    """The mean time of a step over all windows; None if it was not measured."""
    seconds, steps = run.metrics("timing").points("window_seconds", "window_steps")
    return float(seconds.sum() / steps.sum()) if steps.sum() else None


def _mean(timing: Records, field):
    weights, shares = timing.points("window_seconds", field)
    return float(np.average(shares, weights=weights)) if weights.sum() else None


def breakdown_plot(runs: Sequence[Run]) -> Plot | None:
    """A stacked bar a run, in milliseconds a step where all know them; None without any."""
    known = {run.name: (run, parts) for run in runs if (parts := breakdown(run))}
    if not known:
        return None
    steps = {name: mean_step_seconds(run) for name, (run, _) in known.items()}
    in_milliseconds = all(steps.values())
    unit = "milliseconds a step" if in_milliseconds else "% of the time"
    plot = Plot("Where the time of a step goes", unit, num_names=2)
    for part, (colour, label) in PARTS.items():
        shares = [parts.get(part) for _, parts in known.values()]
        if any(share is not None for share in shares):
            scales = [1e3 * (steps[name] or 0) if in_milliseconds else 100 for name in known]
            plot.add_bars(
                label,
                list(known),
                [s if s is None else s * c for s, c in zip(shares, scales, strict=True)],
                colour,
                customdata=[0 if share is None else share for share in shares],
                # A thin bar has no room for it; the table below the plot says all.
                texttemplate=[
                    "%{customdata:.0%}" if (share or 0) >= 0.08 else "" for share in shares
                ],
                hovertemplate=f"{label}: %{{customdata:.1%}}, %{{x:.4g}} {unit}"
                "<extra>%{y}</extra>",
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                constraintext="none",
            )
    plot.layout.update(
        barmode="stack",
        bargap=0.3,
        height=170 + max(16, 44 - 2 * len(known)) * len(known),
    )
    plot.layout["legend"]["traceorder"] = "normal"
    plot.layout["yaxis"]["autorange"] = "reversed"  # the first run on top
    plot.layout["yaxis"]["type"] = "category"  # a run may be called 12
    return plot


def step_time_plots(runs: Sequence[Run], max_points: int = MAX_POINTS) -> list[Plot]:
    """Percentiles of the time of a step in each window; several plots if there are many runs."""
    if len(runs) <= _MAX_RUNS_WITH_ALL_PERCENTILES:
        groups = [("Time of a step", list(_PERCENTILES))]
    else:
        groups = [(f"Time of a step, {_PERCENTILES[p]}", [p]) for p in _PERCENTILES]
    plots = [_step_times(runs, title, kinds, max_points) for title, kinds in groups]
    return [plot for plot in plots if plot.data]


def _step_times(runs, title, percentiles, max_points):
    plot = Plot(
        title, _MINUTES, "ms", len(runs), max_points, has_legend=has_legend(runs), from_zero=True
    )
    for order, run in enumerate(runs):
        for place, percentile in enumerate(percentiles):
            style = Style.of_order(order)
            if len(percentiles) > 1:
                style = Style(style.colour, ("solid", "dash", "dot")[place])
            seconds, times = run.metrics("timing").points("seconds", f"step_seconds_{percentile}")
            plot.add_line(
                run.name,
                seconds / 60,
                times * 1e3,
                style,
                what=_PERCENTILES[percentile],
                hover="%{y:.4g} ms at minute %{x:.2f}",
                run=run.name,
                in_legend=not place,
            )
    return plot


def share_plots(run: Run, max_points: int = MAX_POINTS) -> list[Plot]:
    """Of one run over time: the share of each part, and how busy each replica or device was."""
    timing = run.metrics("timing")
    shares = Plot("Share of the time", _MINUTES, "%", len(PARTS), max_points, from_zero=True)
    for part, (colour, label) in PARTS.items():
        seconds, share = timing.points("seconds", _SHARE_FIELDS[part])
        # The parts of a step are dashed: they are in `step` as well.
        dash = "dash" if part in ("compute", "reduce") else "solid"
        hover = "%{y:.1f} % at minute %{x:.2f}"
        shares.add_line(label, seconds / 60, 100 * share, Style(colour, dash), hover=hover)
    busy = _column_plot(
        timing,
        "replica_busy_seconds",
        "Busy time of each replica",
        "ms a step",
        1e3,
        "%{y:.4g} ms a step at minute %{x:.2f}",
        max_points,
    )
    works = _column_plot(
        timing,
        "device_busy_share",
        "Share of the time in which each device works",
        "%",
        100,
        "%{y:.0f} % at minute %{x:.2f}",
        max_points,
    )
    return [plot for plot in (shares, busy, works) if plot.data]


def _column_plot(timing, field, title, unit, factor, hover, max_points):
    """A line for each number of a field that is a list: of each replica, or device."""
    columns = [name for name in timing.columns if name.startswith(f"{field}/")]
    plot = Plot(title, _MINUTES, unit, len(columns), max_points, from_zero=True)
    for order, name in enumerate(columns):
        seconds, values = timing.points("seconds", name)
        label = f"{field.partition('_')[0]} {name.rpartition('/')[2]}"
        plot.add_line(label, seconds / 60, factor * values, Style.of_order(order), hover=hover)
    return plot
