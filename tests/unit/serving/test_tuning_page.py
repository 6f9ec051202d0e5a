"""Tuning of a model, and its page."""

import dataclasses
import re
from importlib import resources

import numpy as np
import pytest

from kdist import report
from kdist.serving import BatchSettings, LatencyCurve, Objective, choose, poisson
from kdist.serving.tune import ProbeResult, RateTuning, TuningResult, page, rate_text, tune

CURVE = LatencyCurve([1, 8, 32], [0.008, 0.009, 0.012])


def example(objective, shares=(0.1, 0.6, 1.5)):
    """Returns a result whose measured latencies are 5 % above the simulated ones."""
    rates = []
    for share in shares:
        rate = share * CURVE.capacity(32)
        choice = choose(CURVE, poisson(rate, 2000), objective)
        shown = choice.tried[:3] if choice.best else []
        measured = {each.settings: _measured(each.outcome) for each in shown}
        if choice.best:
            measured[choice.best.settings] = _measured(choice.best.outcome)
        rates.append(RateTuning(share, rate, choice, choice.best, measured))
    return TuningResult(CURVE, objective, rates)


def _measured(outcome):
    seconds = (outcome.mean_seconds, outcome.p50_seconds, outcome.p99_seconds)
    return ProbeResult(np.zeros(1), np.zeros(1), *(1.05 * each for each in seconds), 0)


def test_a_model_is_tried_out():
    said, sizes = [], set()

    def compute(arrays):
        sizes.add(len(arrays["x"]))
        return {"y": arrays["x"]}

    example = {"x": np.zeros((3, 2), "float32")}
    found = tune(compute, example, Objective(), [1, 4], [0.01, 2.0], 0.5, said.append)
    slow, fast = found.rates
    assert sizes == {1, 4}
    assert list(found.curve.sizes) == [1, 4]
    assert slow.best.settings in slow.measured
    assert 1 <= len(slow.measured) <= 3
    assert all(not measured.failed for measured in slow.measured.values())
    assert fast.best is None
    assert not fast.measured
    assert said[0].startswith("at most ")
    assert "over capacity" in said[-1]
    with pytest.raises(ValueError, match="shares=.*above zero"):
        tune(compute, example, Objective(), [1, 4], [0.0])


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (Objective(), "lowest mean latency, a timeout of 0 ms is best at every rate"),
        (Objective("device_time", 0.05), "within 50 ms, the best timeout is|within 50 ms, a time"),
        (Objective("latency", 0.001), "within 1 ms, no settings serve"),
    ],
)
def test_the_answer_in_a_sentence(objective, says):
    assert re.search(says, page.summary(example(objective)))


def test_rate_text():
    rates = example(Objective("latency", 0.05)).rates
    assert re.search(
        r"\(10%\): timeout 0 ms.*99 of 100 within \d", rate_text(rates[0], Objective())
    )
    assert "breaks the bound" in rate_text(rates[0], Objective("latency", 0.001))
    assert "over capacity" in rate_text(rates[2], Objective())


def test_lines_are_simulated_and_points_are_measured():
    found = example(Objective("device_time", 0.05))
    plot = page.latency_plot(found, "mean_seconds", "Mean latency")
    names = [trace["name"] for trace in plot.data]
    for rate in found.rates[:2]:
        name = f"{rate.rate:,.0f} per second ({rate.share:.0%})"
        assert {name, f"{name}, chosen"} <= set(names)
        chosen = plot.data[names.index(f"{name}, chosen")]
        assert chosen["marker"]["symbol"] == "star"
        assert str(rate.best.settings) in chosen["text"][0]
    assert not [name for name in names if "150%" in name]  # it has no latency
    extents = {extent.name: extent for extent in plot.extents}
    first = found.rates[0]
    value = extents[f"{first.rate:,.0f} per second (10%), chosen"].first
    assert value == pytest.approx(1.05e3 * first.best.outcome.mean_seconds)


def test_latencies_have_whole_numbers_as_labels():
    plot = page.latency_plot(example(Objective()), "p99_seconds", "99th percentile")
    assert {"1", "10"} < set(plot.layout["yaxis"]["ticktext"])


def test_measured_with_another_largest_batch_is_told_apart():
    found = example(Objective(), shares=(0.3,))
    rate = found.rates[0]
    other = BatchSettings(0.002, 8)
    measured = {**rate.measured, other: _measured(rate.best.outcome)}
    found = dataclasses.replace(found, rates=[dataclasses.replace(rate, measured=measured)])
    plot = page.latency_plot(found, "p99_seconds", "99th percentile")
    thin = next(trace for trace in plot.data if trace["name"].endswith("other batches"))
    assert thin["marker"]["symbol"] == "x-open"
    assert any(text.startswith(str(other)) for text in thin["text"])


def test_the_page_asks_for_nothing_and_escapes(tmp_path):
    path = page.write(example(Objective()), tmp_path / "page.html", "<b>fashion")
    text = path.read_text()
    assert "&lt;b&gt;fashion" in text
    assert "<b>fashion" not in text
    assert text.count("<figure") == 4
    assert "over capacity: " in text
    assert not re.search(r"(src|href)=[\"']?http", text.replace(_plotly(), ""))
    with pytest.raises(OSError, match=r"none/page\.html"):
        page.write(example(Objective()), tmp_path / "none" / "page.html")


def _plotly():
    return resources.files(report).joinpath("plotly/plotly-basic.min.js").read_text()
