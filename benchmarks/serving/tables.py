"""Results of servers under load as Markdown tables, with ratios."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import tables
from benchmarks.serving.contenders import CONTENDERS, OURS, Contender
from benchmarks.serving.dialects import DIALECTS
from benchmarks.serving.outcomes import RIGHT
from benchmarks.serving.sessions import Load, Measured

_HEAD = (
    *("server", "requests/s", "min–max", "p50 ms", "p90 ms", "p99 ms", "mean ms", "memory MB"),
    *("clients' cores", "not right", "kdist answers"),
)


def report(title: str, measured: Mapping[Load, Sequence[Measured]]) -> str:
    """Returns a table for each load of one model, followed by ratios."""
    parts = [f"## {title}"]
    for load, rows in measured.items():
        ours = _of(rows, OURS)
        lines = [_line(row, ours) for row in rows]
        parts += [f"### {load}", tables.markdown([_HEAD, *lines]), *_ratios(rows, ours)]
    return "\n\n".join(parts)


def bodies(contenders: Sequence[Contender]) -> str:
    """Returns the protocol of each server."""
    said = {
        contender.title: DIALECTS[contender.dialect].said
        for contender in contenders
        if contender.dialect in DIALECTS
    }
    return "; ".join(f"{name}: {what}" for name, what in said.items())


def ratio(one: Measured, other: Measured, key: str) -> float:
    """Returns the median of the ratios within each round, as the machine changes between rounds."""
    pairs = zip(one.values(key), other.values(key), strict=True)
    return statistics.median(ours / theirs if theirs else float("nan") for ours, theirs in pairs)


def _line(row, ours):
    rates = row.values("per_second")
    figures = [f"{_median(row, key):.1f}" for key in ("p50_ms", "p90_ms", "p99_ms", "mean_ms")]
    return [
        row.entry.title,
        f"{statistics.median(rates):.0f}",
        f"{min(rates):.0f}–{max(rates):.0f}",
        *figures,
        f"{statistics.median(row.memory) / 1e6:.0f}",
        f"{_median(row, 'client_cores'):.2f}",
        _not_right(row),
        f"{ratio(ours, row, 'per_second'):.2f} ×" if ours else "",
    ]


def _not_right(row):
    """Returns the counts of incorrect responses in all rounds, by kind."""
    total: dict[str, int] = {}
    for outcome in row.outcomes:
        for kind, number in outcome["answers"].items():
            if kind != RIGHT:
                total[kind] = total.get(kind, 0) + number
    return ", ".join(f"{number} {kind}" for kind, number in sorted(total.items())) or "0"


def _ratios(rows, ours):
    """Returns ratios of kdist's server to the best rival and to a server without batching."""
    if not ours:
        return []
    said = []
    rivals = [row for row in rows if row.entry.contender.is_rival]
    if rivals:
        best = max(rivals, key=lambda row: _median(row, "per_second"))
        said.append(_beside(ours, best, f"the best rival, {best.entry.title}"))
    for name in ("unbatched", "kdist_single"):
        other = _of(rows, name)
        if other:
            said.append(_beside(ours, other, f"{other.entry.title}"))
    return [" ".join(said)] if said else []


def _beside(ours, other, name):
    def of(key) -> str:
        return f"{ratio(ours, other, key):.2f}"

    return (
        f"kdist beside {name}: {of('per_second')} × the requests/s, at {of('p50_ms')} × its p50, "
        f"{of('mean_ms')} × its mean and {of('p99_ms')} × its p99."
    )


def _of(rows, name):
    title = CONTENDERS[name].title
    return next((row for row in rows if row.entry.contender.title == title), None)


def _median(row, key):
    return statistics.median(row.values(key))
