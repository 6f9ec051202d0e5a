"""Fewer points for a long line, without hiding what stands out of it.

x, y = thin(x, y, 400)    # a spike of one point in a million is still there
"""

from collections.abc import Iterable

import numpy as np

from kdist.report.records import Records

# More points of one line cannot be seen.
MAX_POINTS = 2000
# Fewer show no course any more.
MIN_POINTS = 50
# Of all lines of a page: at 11 bytes a point they stay below 11 MB, beside 5 MB of plotly.js.
PAGE_POINTS = 1_000_000


def points_per_line(records: Iterable[Records]) -> int:
    """How many points each line may have, so that all lines of a page stay within `PAGE_POINTS`."""
    lines = sum(len(table.columns) for table in records)
    return min(MAX_POINTS, max(MIN_POINTS, PAGE_POINTS // max(lines, 1)))


def thin(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` of the N points of a line, its extremes among them.

    The line is divided into stretches of equally many points; of each the lowest and the highest
    point stay, so that the line fills the band that it filled before. Its ends stay as well.

    Args:
        x: of shape (N,), in the order in which the line goes.
        y: of shape (N,), finite.
        points: at least 4.
    """
    if len(y) <= points:
        return x, y
    width = -(-len(y) // ((points - 2) // 2))  # of a stretch
    missing = -len(y) % width
    stretches = np.append(y, np.full(missing, y[-1])).reshape(-1, width)
    begins = np.arange(len(stretches)) * width
    extremes = [begins + stretches.argmin(1), begins + stretches.argmax(1), [0, len(y) - 1]]
    kept = np.unique(np.minimum(np.concatenate(extremes), len(y) - 1))
    return x[kept], y[kept]
