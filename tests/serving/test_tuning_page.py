"""A model tried out, and the page about it."""

import dataclasses
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kdist.serving import BatchSettings, LatencyCurve, Objective, choose, poisson, tuning_page
from kdist.serving.probing import Measured
from kdist.serving.tuning_run import Tuned, TunedRate, in_words, tune

CURVE = LatencyCurve([1, 8, 32], [0.008, 0.009, 0.012])
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def example(objective, shares=(0.1, 0.6, 1.5)):
    """Found without measuring: what is measured is five percent more than simulated."""
    rates = []
    for share in shares:
        rate = share * CURVE.capacity(32)
        choice = choose(CURVE, poisson(rate, 2000), objective)
        shown = choice.tried[:3] if choice.best else []
        measured = {each.settings: _measured(each.outcome) for each in shown}
        if choice.best:
            measured[choice.best.settings] = _measured(choice.best.outcome)
        rates.append(TunedRate(share, rate, choice, choice.best, measured))
    return Tuned(CURVE, objective, rates)


def _measured(outcome):
    seconds = (outcome.mean_seconds, outcome.p50_seconds, outcome.p99_seconds)
    return Measured(np.zeros(1), np.zeros(1), *(1.05 * each for each in seconds), 0)


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
        (Objective(), "For the least mean latency, a timeout of 0 ms is best at every rate"),
        (Objective("device_time", 0.05), "within 50 ms, the best timeout is|within 50 ms, a time"),
        (Objective("latency", 0.001), "within 1 ms, nothing serves these rates"),
    ],
)
def test_the_answer_in_a_sentence(objective, says):
    assert re.search(says, tuning_page.sentence(example(objective)))


def test_a_rate_in_words():
    found = example(Objective("latency", 0.05)).rates
    assert re.search(r"\(10%\): timeout 0 ms.*99 of 100 within \d", in_words(found[0], Objective()))
    assert "breaks the bound" in in_words(found[0], Objective("latency", 0.001))
    assert "over capacity" in in_words(found[2], Objective())


def test_lines_are_simulated_and_points_are_measured():
    found = example(Objective("device_time", 0.05))
    plot = tuning_page.latency_plot(found, "mean_seconds", "Mean latency")
    names = [trace["name"] for trace in plot.data]
    for rate in found.rates[:2]:
        name = f"{rate.rate:,.0f} a second ({rate.share:.0%})"
        assert {name, f"{name}, chosen"} <= set(names)
        chosen = plot.data[names.index(f"{name}, chosen")]
        assert chosen["marker"]["symbol"] == "star"
        assert str(rate.best.settings) in chosen["text"][0]
    assert not [name for name in names if "150%" in name]  # it has no latency
    extents = {extent.name: extent for extent in plot.extents}
    first = found.rates[0]
    value = extents[f"{first.rate:,.0f} a second (10%), chosen"].first
    assert value == pytest.approx(1.05e3 * first.best.outcome.mean_seconds)


def test_measured_with_another_largest_batch_is_told_apart():
    found = example(Objective(), shares=(0.3,))
    rate = found.rates[0]
    other = BatchSettings(0.002, 8)
    measured = {**rate.measured, other: _measured(rate.best.outcome)}
    found = dataclasses.replace(found, rates=[dataclasses.replace(rate, measured=measured)])
    plot = tuning_page.latency_plot(found, "p99_seconds", "99th percentile")
    thin = next(trace for trace in plot.data if trace["name"].endswith("other batches"))
    assert thin["marker"]["symbol"] == "x-open"
    assert any(text.startswith(str(other)) for text in thin["text"])


def test_the_page_asks_for_nothing_and_escapes(tmp_path):
    path = tuning_page.write(example(Objective()), tmp_path / "page.html", "<b>fashion")
    text = path.read_text()
    assert "&lt;b&gt;fashion" in text
    assert "<b>fashion" not in text
    assert text.count("<figure") == 4
    assert "over capacity: " in text
    assert not re.search(r"(src|href)=[\"']?http", text.replace(_plotly(), ""))
    with pytest.raises(OSError, match="cannot write the page"):
        tuning_page.write(example(Objective()), tmp_path / "none" / "page.html")


def _plotly():
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium (apt-get install chromium)")
def test_a_browser_draws_it(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip)")
    path = tuning_page.write(example(Objective()), tmp_path / "page.html")
    complaints = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("console", lambda m: m.type in ("error", "warning") and complaints.append(m.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(path.as_uri())
        for plot in ("mean-latency", "tail-latency", "device-time", "batch-time"):
            tab.locator(f"#{plot}").scroll_into_view_if_needed()
            tab.wait_for_selector(f"#{plot}.js-plotly-plot .scatterlayer", timeout=20_000)
        ticks = tab.locator("#mean-latency .xtick text").all_text_contents()
        browser.close()
    assert complaints == []
    assert ticks == ["0", "0.5", "1", "2", "4", "8", "16", "32", "64"]


def test_measuring_imports_no_tensorflow():
    code = (
        "import sys, kdist.serving.tuning_page, kdist.serving.adapting\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('tensorflow', 'plotly')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert found.stdout.strip() == b"[]", found.stderr
