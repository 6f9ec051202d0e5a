"""The page in headless Chromium, opened from disk: what a reader sees and can do."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kdist import report
from tests.report.example_runs import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip)")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Tests run as root in containers, where Chromium's sandbox does not.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """A page that is offline, and fails the test for a request, or an error in the console."""
    complaints = []

    def answer(route):
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            complaints.append(f"asked for {route.request.url}")
            route.abort()

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.route("**/*", answer)
    tab = context.new_page()
    watch_console(tab, complaints)
    yield tab
    context.close()
    assert complaints == []


def watch_console(tab, complaints):
    tab.on("console", lambda m: m.type in ("error", "warning") and complaints.append(m.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / "one_gpu", gpus=1, test_accuracy=0.905, global_batch_size=128),
        write_run(tmp_path / "four_gpus", gpus=4, slower=1.25),
    ]


def draw(tab, plot):
    """Brings a plot into view, which draws it."""
    tab.locator(f"#{plot}").scroll_into_view_if_needed()
    tab.wait_for_selector(f"#{plot}.js-plotly-plot .scatterlayer")


def visible(tab, plot):
    """Name of a run -> what its lines' visibility is, all of them."""
    pairs = tab.evaluate(
        f"document.getElementById('{plot}')._fullData.map(t => [t.meta.run, t.visible])"
    )
    return {run: {state for name, state in pairs if name == run} for run, _ in pairs}


def last_examples(tab, plot):
    """Returns the end of each line of a plot; nothing while it is redrawn."""
    return tab.evaluate(
        f"(document.getElementById('{plot}')?._fullData ?? []).map(t => t.x?.[t.x.length - 1])"
    )


def on_the_first_line(tab):
    """Returns the place of a point of the loss in the window."""
    return tab.evaluate(
        """(() => {
          const plot = document.getElementById("loss"), box = plot.getBoundingClientRect();
          const {xaxis, yaxis} = plot._fullLayout, line = plot._fullData[0];
          return [box.x + xaxis._offset + xaxis.d2p(line.x[150]),
                  box.y + yaxis._offset + yaxis.d2p(line.y[150])];
        })()"""
    )


def reload(tab):
    """Loads the page again, as soon as Chromium's other processes have what the page has stored."""
    tab.wait_for_timeout(1000)
    tab.reload()


def row(tab, run):
    headings = tab.locator("#runs thead th").all_inner_texts()
    cells = tab.locator("#runs tbody tr", has_text=run).locator("th, td").all_inner_texts()
    return dict(zip(headings, cells, strict=True))


@pytest.mark.slow
def test_it_opens_offline_and_every_plot_is_one_that_plotly_accepts(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    complaints = tab.evaluate(
        """[...document.querySelectorAll(".plot")].flatMap(plot => {
          const {data, layout} = specification(plot);
          // The check does not know arrays in base64, which drawing takes.
          for (const trace of data) for (const axis of ["x", "y"]) {
            if (trace[axis].bdata) trace[axis] = [1, 2];
          }
          return Plotly.validate(data, layout) ?? [];
        }).map(complaint => complaint.msg)"""
    )
    assert complaints == []
    assert tab.locator(".plot").count() > 30


def test_the_table_matches_the_summaries(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html", 3.6).as_uri())
    first, second = (json.loads((run / "summary.json").read_text()) for run in runs)
    cells = row(tab, "four_gpus")
    assert cells["Test accuracy"] == f"{second['test_accuracy']:.4f}"
    assert cells["Examples per second"] == f"{second['examples_per_second']:,.1f}"
    speed_up = second["examples_per_second"] / first["examples_per_second"]
    assert cells["Speed-up"] == f"{speed_up:.2f}" == "3.20"
    assert cells["Efficiency"] == "80.0 %"
    assert cells["Total time (s)"] == f"{second['total_seconds']:.1f}"
    assert cells["Cost (USD)"] == f"{3.6 * second['total_seconds'] / 3600:.2f}" == "0.30"


@pytest.mark.slow
def test_a_name_in_the_legend_hides_its_run_in_all_plots(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    draw(tab, "loss")
    assert visible(tab, "loss") == {"one_gpu": {True}, "four_gpus": {True}}
    tab.locator("#loss .legendtoggle").nth(0).click()
    tab.wait_for_selector("#picker input:not(:checked)")
    hidden = {"one_gpu": {"legendonly"}, "four_gpus": {True}}
    assert visible(tab, "loss") == hidden
    draw(tab, "time-of-a-step")  # not drawn until now
    assert visible(tab, "time-of-a-step") == hidden
    reload(tab)
    draw(tab, "loss")
    assert visible(tab, "loss") == hidden  # remembered


@pytest.mark.slow
def test_the_reader_chooses_the_axis_smoothing_and_scale(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    draw(tab, "loss")
    draw(tab, "time-of-a-step")
    assert max(last_examples(tab, "time-of-a-step")) == max(last_examples(tab, "loss")) == 307200
    tab.locator("#controls [value=minutes]").check()
    draw(tab, "time-of-a-step")
    assert set(last_examples(tab, "loss")) == set(last_examples(tab, "time-of-a-step")) == {5}
    tab.locator("#controls [value=epoch]").check()
    draw(tab, "loss")
    assert last_examples(tab, "loss") == pytest.approx([3] * 4)
    assert visible(tab, "loss").keys() == {"one_gpu", "four_gpus"}
    noise = """(() => {
      const line = document.getElementById("loss")._fullData.find(t => t.opacity === 1).y;
      return Math.max(...line.slice(1).map((y, i) => Math.abs(y - line[i])));
    })()"""
    before = tab.evaluate(noise)
    tab.locator("#smoothing").fill("0.9")
    assert tab.evaluate(noise) < before / 2
    tab.locator("#logarithmic").check()
    reload(tab)
    draw(tab, "loss")
    assert tab.evaluate("document.getElementById('loss')._fullLayout.yaxis.type") == "log"
    assert tab.locator("#controls [value=epoch]").is_checked()  # remembered


def test_the_pointer_shows_the_same_moment_in_other_plots(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    draw(tab, "accuracy")
    draw(tab, "loss")
    tab.mouse.move(*on_the_first_line(tab))
    for plot in ("loss", "accuracy"):
        tab.wait_for_selector(f"#{plot} .hovertext")
    texts = [tab.locator(f"#{p} .hovertext").first.text_content() for p in ("loss", "accuracy")]
    one, other = (re.search(r"after ([\d,]+) examples", text).group(1) for text in texts)
    assert one == other


def test_a_heading_sorts_the_runs(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    names = tab.locator("#runs tbody th")
    assert names.all_inner_texts() == ["one_gpu", "four_gpus"]
    tab.locator("#runs th button", has_text="Examples per second").click()
    assert names.all_inner_texts() == ["one_gpu", "four_gpus"]
    tab.locator("#runs th button", has_text="Examples per second").click()
    assert names.all_inner_texts() == ["four_gpus", "one_gpu"]
    reload(tab)
    assert names.all_inner_texts() == ["four_gpus", "one_gpu"]  # remembered


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("width", [400, 1400])
def test_the_reader_chooses_the_columns_of_the_runs(tab, runs, tmp_path, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())

    def shown(name):
        return tab.locator(f"#runs td[data-label='{name}']:visible").all_inner_texts()

    accuracies, times = shown("Test accuracy"), ["0.12", "0.15"]
    tab.locator("#runs th button", has_text="Run").click()
    assert shown("Test accuracy") == accuracies[::-1]
    tab.locator("#runs th button", has_text="Run").click()
    assert shown("step_seconds_p90") == []
    tab.locator("#columns > summary").click()
    tab.get_by_label("step_seconds_p90").check()
    tab.get_by_label("Test accuracy").uncheck()
    reload(tab)
    assert (shown("step_seconds_p90"), shown("Test accuracy")) == (times, [])  # remembered
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.locator("#columns button").click()
    assert (shown("step_seconds_p90"), shown("Test accuracy")) == ([], accuracies)


@pytest.mark.slow
def test_the_keyboard_hides_a_run_and_opens_another(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    draw(tab, "loss")
    tab.locator("#picker input").nth(1).focus()
    tab.keyboard.press("Space")
    assert visible(tab, "loss") == {"one_gpu": {True}, "four_gpus": {"legendonly"}}
    assert not tab.locator("#run-1-gpu-power").is_visible()
    tab.locator("#run-1-devices > summary").focus()
    tab.keyboard.press("Enter")
    draw(tab, "run-1-gpu-power")
    assert tab.evaluate("document.getElementById('run-1-gpu-power').data.length") == 4


def test_the_text_at_the_pointer_is_the_measurement(tab, runs, tmp_path):
    tab.goto(report.write(runs[:1], tmp_path / "page.html").as_uri())
    draw(tab, "loss")
    tab.mouse.move(*on_the_first_line(tab))
    text = tab.locator("#loss .hoverlayer .hovertext").first.text_content()
    loss, examples = re.search(r"([\d.]+) after ([\d,]+) examples", text).groups()
    records = map(json.loads, (runs[0] / "metrics.jsonl").read_text().splitlines())
    measured = {r["examples"]: r["loss"] for r in records if r["kind"] == "train"}
    assert loss == f"{measured[int(examples.replace(',', ''))]:.4g}"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_window_and_is_legible(tab, runs, tmp_path, width, scheme):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    draw(tab, "loss")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = """[...document.querySelectorAll(".scroll")]
      .filter(table => table.checkVisibility() && table.scrollWidth > table.clientWidth)"""
    assert tab.evaluate(f"{wide}.map(table => table.getAttribute('aria-label'))") == []
    assert tab.evaluate("document.getElementById('loss').offsetWidth") <= width
    colour = tab.locator("#loss .legendtext").first.evaluate("e => getComputedStyle(e).fill")
    assert colour == {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[scheme]


def test_every_plot_has_a_text_and_a_table(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    plots = tab.locator("figure:has(.plot)")
    assert plots.count() == tab.locator("figure > details table").count() > 30
    label = tab.locator("#learning-rate").get_attribute("aria-label")
    assert "one_gpu: training: from 0.00064 to 0.1, between 0.00064 and 0.1" in label
    assert tab.locator("th:not([scope])").count() == 0


def test_on_paper_all_plots_are_drawn(tab, runs, tmp_path):
    tab.goto(report.write(runs, tmp_path / "page.html").as_uri())
    assert tab.pdf().startswith(b"%PDF")
    undrawn = ".plot:not(.js-plotly-plot)"
    folded = tab.locator(f"#run-1-devices {undrawn}").count()
    assert tab.locator(undrawn).count() == folded > 0
    tab.emulate_media(media="print")
    assert tab.locator("#runs thead th", has_text="Speed-up").inner_text() == "Speed-up"
    assert not tab.locator("#controls").is_visible()


@pytest.mark.slow
def test_a_served_page_updates_and_keeps_the_scroll_position(browser, runs, tmp_path):
    script = pathlib.Path(__file__).parents[2] / "scripts" / "report.py"
    flags = ["--watch", "--port=0", f"--output={tmp_path / 'page.html'}"]
    program = subprocess.Popen(
        [sys.executable, script, *runs, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        address = program.stdout.readline().decode().strip()
        _follow(browser, address, runs)
    finally:
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=30)
    assert program.returncode == 130
    assert b"not updated: " in said
    assert said.endswith(b"stopped by Ctrl-C\n")


def _follow(browser, address, runs):
    complaints = []
    tab = browser.new_page()
    watch_console(tab, complaints)
    tab.goto(address)
    draw(tab, "loss")
    tab.locator("#loss .legendtoggle").nth(0).click()
    tab.wait_for_selector("#picker input:not(:checked)")
    place = tab.evaluate("scrollY")
    assert place > 0
    tab.wait_for_selector("text=Live. Updated at")
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "examples": 10**6, "loss": 7.5}) + "\n")
    until = time.monotonic() + 30
    while 10**6 not in last_examples(tab, "loss"):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert tab.evaluate("scrollY") == place
    assert visible(tab, "loss") == {"one_gpu": {"legendonly"}, "four_gpus": {True}}
    # The page stays and shows the error.
    (runs[1] / "config.json").write_text("{")
    tab.wait_for_selector("text=config.json is not valid JSON")
    assert tab.locator("#loss").count() == 1
    tab.close()
    assert complaints == []
