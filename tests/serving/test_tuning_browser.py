"""Tuning page in a browser."""

import shutil

import pytest

from kdist.serving import Objective
from kdist.serving.tune import page
from tests.unit.serving.test_tuning_page import example

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium (apt-get install chromium)")
def test_a_browser_draws_it(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip)")
    path = page.write(example(Objective()), tmp_path / "page.html")
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
