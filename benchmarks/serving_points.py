"""Table of simulated and measured batch settings, with the errors of the simulation."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.tables import markdown
from kdist.serving import BatchSettings, Outcome
from kdist.serving.tune import ProbeResult

_DIFFER = 1.1  # settings that differ by less may rank in any order


@dataclasses.dataclass
class Point:
    """Simulated and measured result of settings under a load."""

    load: str
    share: float
    settings: BatchSettings
    before: Outcome  # with the curve measured before
    during: Outcome  # with what batches took in this run
    measured: ProbeResult

    def error(self, when: str, name: str) -> float:
        """Returns the relative error of the simulation."""
        return getattr(getattr(self, when), name) / getattr(self.measured, name) - 1


def milliseconds(point: Point) -> str:
    """Returns the timeout of a point in milliseconds."""
    return f"{point.settings.timeout_seconds * 1e3:g}"


def table(points: Sequence[Point]) -> str:
    """Returns a table with a line for each point."""
    head = ["load", "of capacity", "timeout ms", "mean ms", "before", "during"]
    head += ["p99 ms", "before", "during"]
    lines = [
        [
            p.load,
            f"{p.share:.0%}",
            milliseconds(p),
            f"{p.measured.mean_seconds * 1e3:.2f}",
            f"{p.error('before', 'mean_seconds'):+.1%}",
            f"{p.error('during', 'mean_seconds'):+.1%}",
            f"{p.measured.p99_seconds * 1e3:.2f}",
            f"{p.error('before', 'p99_seconds'):+.1%}",
            f"{p.error('during', 'p99_seconds'):+.1%}",
        ]
        for p in points
    ]
    return markdown([head, *lines])


def summary(points: Sequence[Point]) -> str:
    """Returns the errors, and how often two settings are ranked correctly."""
    curves = {"before": "measured before", "during": "of the run itself"}
    return "\n".join(f"- {_summary_of(points, when, said)}" for when, said in curves.items())


def _summary_of(points, when, said):
    means, tails = (
        [abs(p.error(when, name)) for p in points] for name in ("mean_seconds", "p99_seconds")
    )
    pairs, right = 0, 0
    for one, other in itertools.combinations(points, 2):
        if (one.load, one.share) != (other.load, other.share):
            continue
        low, high = sorted((one, other), key=lambda p: p.measured.mean_seconds)
        if high.measured.mean_seconds > _DIFFER * low.measured.mean_seconds:
            pairs += 1
            right += getattr(low, when).mean_seconds < getattr(high, when).mean_seconds
    return (
        f"With the curve {said}: error of the mean: median {np.median(means):.1%}, at most "
        f"{max(means):.1%}; of the 99th percentile: median {np.median(tails):.1%}, at most "
        f"{max(tails):.1%}. Of {pairs} pairs of settings that differ by more than a tenth, {right} "
        f"are ranked correctly."
    )
