"""Relations between the examples, steps, time, and epochs of runs, for the x-axis of curves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kdist.report.runs import Run

# Between these points of a run, the page interpolates.
_MAX_POINTS = 200
AXES = ("examples", "step", "minutes", "epoch")


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
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MAX_POINTS)).astype(int))
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
