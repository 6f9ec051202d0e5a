"""The page's opening sentence: what came out, before any table.

sentence([run])         # "lenet on digits, mirrored on CPU:0, CPU:1: test accuracy 0.8712, …"
sentence([run, other])  # "2 runs. Most accurate: first (test accuracy 0.8712). Fastest: …"
"""

from collections.abc import Sequence

from kdist.report.records import number
from kdist.report.runs import Run
from kdist.report.tables import shown, speed_up


def sentence(runs: Sequence[Run]) -> str:
    """What one run reached, or which of several is the most accurate and which the fastest."""
    return _about_one(runs[0]) if len(runs) == 1 else _about_several(runs)


def _about_one(run):
    what = [f"{shown(run.get('model'))} on {shown(run.get('dataset'))}", _where(run)]
    results = _results(run) if run.finished else _so_far(run)
    return ", ".join(filter(None, what)) + ": " + ", ".join(results) + "."


def _where(run):
    strategy, devices = run.get("strategy"), run.summary.get("devices")
    where = f" on {shown(devices)}" if devices else ""
    return f"{shown(strategy)}{where}" if strategy else ""


def _results(run):
    """The figures that the summary has, each with its unit."""
    figures = [
        ("test_accuracy", 4, "test accuracy {}"),
        ("test_loss", 4, "test loss {}"),
        ("seconds_per_epoch", 1, "{} seconds an epoch"),
        ("examples_per_second", 1, "{} examples a second"),
    ]
    known = [(number(run.summary.get(key)), digits, words) for key, digits, words in figures]
    results = [
        words.format(shown(value, digits)) for value, digits, words in known if value is not None
    ]
    return results or ["finished without figures"]


def _so_far(run):
    seen = [run.metrics(kind).points("examples", "examples")[0] for kind in ("train", "epoch")]
    most = max(examples.max(initial=0) for examples in seen)
    return [f"not finished, {shown(float(most), 0)} examples seen"]


def _about_several(runs):
    unfinished = sum(not run.finished for run in runs)
    parts = [f"{len(runs)} runs" + (f", {unfinished} of them not finished" if unfinished else "")]
    best = _highest(runs, "test_accuracy")
    if best:
        accuracy = shown(best.summary["test_accuracy"], 4)
        parts.append(f"Most accurate: {best.name} (test accuracy {accuracy})")
    fastest = _highest(runs, "examples_per_second")
    if fastest:
        parts.append(f"Fastest: {fastest.name} ({_speed(fastest, runs[0])})")
    return ". ".join(parts) + "."


def _highest(runs, key):
    known = [run for run in runs if number(run.summary.get(key)) is not None]
    return max(known, key=lambda run: run.summary[key], default=None)


def _speed(run, first):
    rate = f"{shown(run.summary['examples_per_second'], 1)} examples a second"
    factor = speed_up(run, first)
    return rate if run is first or factor is None else f"{rate}, {factor:.2f} × {first.name}"
