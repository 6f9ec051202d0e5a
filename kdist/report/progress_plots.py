"""Plots of metrics against the examples seen, with all runs in one plot, and the other x-axes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kdist.report.plots import MAX_POINTS, Plot, Style, has_legend
from kdist.report.runs import Run

# The first plots; other metrics follow by name.
_FIRST = ("loss", "accuracy", "learning_rate", "examples_per_second")
# Fields that are no metrics.
_NO_METRICS = {"kind", "epoch", "step", "examples", "seconds", "epoch_seconds", "window_steps"}
_UNITS = {"examples_per_second": "examples/s"}

# Between these points of a run, the page interpolates.
_MAX_MOMENTS = 200
AXES = ("examples", "step", "minutes", "epoch")


def progress_plots(runs: Sequence[Run], max_points: int = MAX_POINTS) -> list[Plot]:
    """Returns plots of the loss, the accuracy, the learning rate, the speed, and other metrics.

    Training is a line; validation is diamonds on a dashed line in the same color. The name of a run
    in the legend hides and shows both. If a run does not know its number of examples, all runs are
    plotted against steps.
    """
    x = "examples" if all(_knows_examples(run) for run in runs) else "step"
    plots = [_plot(runs, metric, x, max_points) for metric in _metrics(runs)]
    return [plot for plot in plots if plot.data]


def _knows_examples(run):
    records = [run.metrics(kind) for kind in ("train", "epoch")]
    return any(r.has("examples") for r in records) or not any(r.has("step") for r in records)


def _metrics(runs):
    names = {n for run in runs for kind in ("train", "epoch") for n in run.metrics(kind).columns}
    others = {name.removeprefix("val_") for name in names} - _NO_METRICS - {*_FIRST}
    return [*_FIRST, *sorted(others)]


def _plot(runs, metric, x, max_points):
    title = metric.replace("_", " ").capitalize()
    seen = "examples seen" if x == "examples" else "steps"
    plot = Plot(
        title,
        seen,
        _UNITS.get(metric, ""),
        len(runs),
        max_points,
        has_legend=has_legend(runs),
        from_zero=metric in _UNITS,
        axis=x,
    )
    hover = f"%{{y:.4g}} after %{{x:,}} {x if x == 'examples' else 'steps'}"
    for order, run in enumerate(runs):
        style = Style.of_order(order)
        validation = run.metrics("epoch").points(x, f"val_{metric}")
        for line, look, options in [
            (_training(run, metric, x), style, {"what": "training"}),
            (validation, style.companion, {"what": "validation", "symbol": "diamond"}),
        ]:
            named = any(trace.get("meta") == {"run": run.name} for trace in plot.data[-1:])
            options |= {"hover": hover, "run": run.name, "in_legend": not named}
            plot.add_line(run.name, *line, look, **options)
    return plot


def _training(run, metric, x):
    kinds = _kinds(run, metric)
    lines = [run.metrics(kind).points(x, metric) for kind in kinds]
    examples, measured = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    order = np.argsort(examples, kind="stable")
    examples, measured = examples[order], measured[order]
    # The record of an epoch often repeats the last one within the epoch.
    is_new = np.append(True, (np.diff(examples) != 0) | (np.diff(measured) != 0))[: len(examples)]
    return examples[is_new], measured[is_new]


def _kinds(run, metric):
    """Returns the kinds of records with the points of a metric's line."""
    # The speed is measured in windows; the mean of an epoch would be another quantity.
    if metric == "examples_per_second" and run.metrics("timing").has(metric):
        return ("timing",)
    train, epochs = run.metrics("train"), run.metrics("epoch")
    # Runs of older versions have Keras's running means, which end with the mean of the epoch.
    if not train.has("window_steps"):
        return ("train", "epoch")
    # With few windows, as in a short training, the epochs show the course better.
    windows, means = (records.points("step", metric)[0] for records in (train, epochs))
    return ("train",) if len(windows) >= len(means) else ("epoch",)


def axes_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the possible x-axes of several runs, and how to convert between them.

    Returns:
        `choices`, the axes that all runs know, and `runs`: name of a run -> axis -> values of the
        same moments, in increasing order.
    """
    tables = {run.name: _moments(run) for run in runs}
    known = [axis for axis in AXES if all(axis in table for table in tables.values())]
    choices = [axis for axis in known if axis != "step" or "examples" not in known]
    return {"choices": choices, "runs": tables}


def _moments(run):
    """Returns axis -> values at moments of a run, beginning with 0."""
    records = [run.metrics(kind) for kind in ("train", "epoch", "timing")]
    count = "examples" if any(each.has("examples") for each in records) else "step"
    counts, seconds = _increasing([each.points(count, "seconds") for each in records])
    steps = _increasing([each.points(count, "step") for each in records])
    if not len(counts):
        return {}
    table = {
        count: counts,
        "minutes": seconds / 60,
        "step": np.interp(counts, *steps) if len(steps[0]) else None,
        "epoch": _epochs(run.metrics("epoch").points(count, "epoch"), counts),
    }
    return {
        axis: [0.0, *(float(f"{value:.7g}") for value in values)]
        for axis, values in table.items()
        if values is not None
    }


def _increasing(lines):
    """Returns the points of several lines in order, without those that go back, thinned."""
    x, y = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    order = np.lexsort((y, x))
    x, y = x[order], np.maximum.accumulate(y[order]) if len(y) else y
    is_last = np.append(x[1:] != x[:-1], True)[: len(x)]
    x, y = x[is_last], y[is_last]
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MAX_MOMENTS)).astype(int))
    return (x[kept], y[kept]) if len(x) else (x, y)


def _epochs(ends, counts):
    """Returns the fraction of epochs at each count; None before the first epoch has ended."""
    counts_at_end, epochs = ends
    if not len(epochs):
        return None
    order = np.argsort(counts_at_end, kind="stable")
    x, y = np.append(0, counts_at_end[order]), np.append(0, epochs[order])
    per_epoch = max((x[-1] - x[-2]) / max(y[-1] - y[-2], 1), 1)
    beyond = np.maximum(counts - x[-1], 0) / per_epoch  # an epoch that has not ended
    return np.interp(counts, x, y) + beyond
