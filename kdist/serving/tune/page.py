"""Web page of a tuning: latency by timeout at several rates, simulated and measured.

The page is one self-contained HTML file, like the report about runs.
"""

import html
import os
import pathlib
from importlib import resources

import numpy as np

from kdist.serving.tune import RateTuning, TuningResult, rate_text

_HEADINGS = [
    *("Requests per second", "Of capacity", "Timeout, ms", "Largest batch"),
    *("Mean, ms", "simulated", "99th percentile, ms", "simulated", "Device busy, simulated"),
]
_NONE = "–"
_SYMBOLS = {"measured": "x", "measured, other batches": "x-open", "chosen": "star"}


def write(tuned: TuningResult, path: str | os.PathLike, name: str = "the model") -> pathlib.Path:
    """Returns the path of the page, after writing it. An existing file is replaced."""
    from kdist.report.page import fill_template, save  # importing plotly is slow

    template = resources.files(__package__).joinpath("tuning.html").read_text(encoding="utf-8")
    return save(fill_template(template, _parts(tuned, name)), path)


def _parts(tuned, name):
    from kdist.report.plots import figure_html
    from kdist.report.tables import table

    unserved = [rate for rate in tuned.rates if rate.best is None]
    return {
        "title": html.escape(f"Batches of {name}"),
        "sentence": html.escape(summary(tuned)),
        "warnings": "".join(
            f"<p class=note>{html.escape(rate_text(rate, tuned.objective))}</p>"
            for rate in unserved
        ),
        "choices": table("Settings, by rate", _HEADINGS, [_cells(rate) for rate in tuned.rates]),
        "mean": figure_html(latency_plot(tuned, "mean_seconds", "Mean latency"), "mean-latency"),
        "tail": figure_html(latency_plot(tuned, "p99_seconds", "99th percentile"), "tail-latency"),
        "busy": figure_html(_busy_plot(tuned), "device-time"),
        "curve": figure_html(_curve_plot(tuned.curve), "batch-time"),
    }


def summary(tuned: TuningResult) -> str:
    """Returns the best timeouts in one sentence."""
    aim = {
        "latency": "For the lowest mean latency",
        "throughput": "For the highest throughput",
        "device_time": "For the lowest device time",
    }[tuned.objective.aim]
    bound = tuned.objective.p99_seconds
    within = f" with 99 of 100 requests within {bound * 1e3:g} ms" if bound else ""
    served = [rate for rate in tuned.rates if rate.best]
    if not served:
        return f"{aim}{within}, no settings serve these rates."
    timeouts = {_timeout_ms(rate) for rate in served}
    if len(timeouts) == 1:
        answer = f"a timeout of {timeouts.pop():g} ms is best at every rate that can be served"
    else:
        answer = "the best timeout is " + ", ".join(
            f"{_timeout_ms(rate):g} ms at {rate.rate:,.0f} requests per second" for rate in served
        )
    return f"{aim}{within}, {answer}."


def _timeout_ms(rate):
    return rate.best.settings.timeout_seconds * 1e3


def _cells(rate: RateTuning):
    head = [f"{rate.rate:,.0f}", f"{rate.share:.0%}"]
    if rate.best is None:
        return [*head, rate.choice.reason.partition(":")[0], *[_NONE] * (len(_HEADINGS) - 3)]
    simulated, measured = rate.best.outcome, rate.measured[rate.best.settings]
    means = [measured.mean_seconds, simulated.mean_seconds]
    tails = [measured.p99_seconds, simulated.p99_seconds]
    return [
        *head,
        f"{_timeout_ms(rate):g}",
        f"{rate.best.settings.max_batch}",
        *(f"{each * 1e3:.2f}" for each in means + tails),
        f"{simulated.device_share:.0%}",
    ]


def latency_plot(tuned: TuningResult, value: str, title: str):
    """Returns a plot of latency in milliseconds by timeout.

    The `value` is `"mean_seconds"` or `"p99_seconds"`.
    """
    from kdist.report.plots import Style, log_axis

    plot, places = _plot(tuned, title, "ms")
    latencies = [getattr(tried.outcome, value) for rate in tuned.rates for tried in _line(rate)]
    latencies += [getattr(each, value) for rate in tuned.rates for each in rate.measured.values()]
    positive = [seconds * 1e3 for seconds in latencies if 0 < seconds < float("inf")]
    plot.layout["yaxis"] |= log_axis(positive) if positive else {"type": "log"}
    for order, rate in enumerate(tuned.rates):
        style, name = Style.of_order(order), _name(rate)
        tried = _line(rate)
        x = np.array([places[t.settings.timeout_seconds] for t in tried], float)
        y = np.array([getattr(t.outcome, value) for t in tried]) * 1e3
        plot.add_line(name, x, y, style, hover="%{y:.3g} ms")
        points: dict[str, list] = {kind: [] for kind in _SYMBOLS}
        for settings, measured in rate.measured.items():
            points[_point_kind(settings, rate)].append((settings, getattr(measured, value)))
        for kind, shown in points.items():
            _add_points(plot, places, f"{name}, {kind}", shown, _SYMBOLS[kind], style)
    return plot


def _point_kind(settings, rate):
    if settings == rate.best.settings:
        return "chosen"
    same = settings.max_batch == rate.best.settings.max_batch
    return "measured" if same else "measured, other batches"


def _add_points(plot, places, name, points, symbol, style):
    x = np.array([places[settings.timeout_seconds] for settings, _ in points], float)
    texts = [f"{settings}: measured {seconds * 1e3:.3g} ms" for settings, seconds in points]
    plot.add_points(name, x, np.array([s for _, s in points]) * 1e3, texts, style)
    if points:
        size = 15 if symbol == "star" else 9
        plot.data[-1]["marker"] = {"size": size, "symbol": symbol, "color": style.color}


def _busy_plot(tuned):
    from kdist.report.plots import Style

    plot, places = _plot(tuned, "Fraction of time that the device computes", "")
    plot.layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    for order, rate in enumerate(tuned.rates):
        tried = _line(rate)
        x = np.array([places[t.settings.timeout_seconds] for t in tried], float)
        y = np.array([t.outcome.device_share for t in tried])
        plot.add_line(_name(rate), x, y, Style.of_order(order), hover="%{y:.0%}")
    return plot


def _plot(tuned, title, unit):
    """Returns a plot with categorical timeouts, since a logarithmic axis has no place for 0."""
    from kdist.report.plots import Plot

    tried = [each for rate in tuned.rates for each in rate.choice.tried]
    timeouts = sorted({each.settings.timeout_seconds for each in tried})
    plot = Plot(title, "timeout, ms", unit, 2 * len(tuned.rates))
    plot.layout["xaxis"] |= {
        "tickvals": list(range(len(timeouts))),
        "ticktext": [f"{timeout * 1e3:g}" for timeout in timeouts],
    }
    return plot, {timeout: place for place, timeout in enumerate(timeouts)}


def _line(rate):
    """Returns the simulated settings with the best batch size, by timeout."""
    largest = max(t.settings.max_batch for t in rate.choice.tried)
    size = rate.best.settings.max_batch if rate.best else largest
    served = [
        t for t in rate.choice.tried if t.settings.max_batch == size and not t.outcome.over_capacity
    ]
    return sorted(served, key=lambda each: each.settings.timeout_seconds)


def _name(rate):
    return f"{rate.rate:,.0f} per second ({rate.share:.0%})"


def _curve_plot(curve):
    from kdist.report.plots import Plot, Style

    plot = Plot("Time of a batch", "rows", "ms", from_zero=True)
    seconds = np.array(curve.batch_seconds) * 1e3
    plot.add_line("measured", np.array(curve.sizes), seconds, Style.of_order(0), hover="%{y:.3g}")
    return plot
