"""Comparison of the runs of a search: best run, parallel coordinates, importance."""

import json
import re

import numpy as np
import pytest

from kdist import report
from kdist.report.runs import read_runs
from kdist.report.search import find_search, importance_of, search_plot, search_text
from tests.unit.report.test_report import run_directory, without_plotly


def trial(parent, number, parameters, value, state="complete", direction="maximize"):
    """Writes the run directory of a trial."""
    group = {"trial": number, "state": state, "parameters": parameters, "value": value}
    group |= {"objective": "score", "direction": direction}
    summary = {"score": value} if state == "complete" else None
    return run_directory(parent / f"trial-{number}", summary, {"search": group})


@pytest.fixture
def parent(tmp_path):
    """A search of 12 trials that differ in a rate, which matters, and a word, which does not."""
    for number in range(12):
        rate, word = 10.0 ** -(number % 6), "<b>" if number % 2 else "plain"
        trial(tmp_path, number, {"rate": rate, "word": word}, 1 - abs(number % 6 - 2) / 5)
    trial(tmp_path, 12, {"rate": 1.0, "word": "plain"}, 99.0, "pruned")
    trial(tmp_path, 13, {"rate": 1.0}, None, "fail")
    return tmp_path


def test_a_directory_of_runs_is_its_runs_in_order(parent, tmp_path):
    (tmp_path / "no run").mkdir()
    names = [run.name for run in read_runs([parent])]
    assert names == [f"trial-{number}" for number in range(14)]


def test_the_page_names_the_best_run_and_its_parameters(parent, tmp_path):
    text = without_plotly(report.write([parent], tmp_path / "page.html"))
    section = re.search("<section id=search>.*?</section>", text, re.DOTALL)[0]
    assert "14 runs (12 complete, 1 pruned, 1 fail). Best: trial-2, " in section
    row = re.search("<th scope=row>rate</th>(.*?)</tr>", section)[1]
    assert re.findall(r"<td[^>]*>(.*?)</td>", row)[:2] == ["0.01", "1e-05 to 1"]
    assert "<b>" not in section
    assert '<a href="#search">' in text
    alone = report.write([parent / "trial-0"], tmp_path / "alone.html")
    assert "#search" not in without_plotly(alone)


def test_the_lowest_is_the_best_if_the_search_minimizes(tmp_path):
    for number, value in enumerate([3.0, 1.0, 2.0]):
        trial(tmp_path, number, {"x": number}, value, direction="minimize")
    found = find_search(read_runs([tmp_path]))
    assert found.runs[found.best].name == "trial-1"
    assert "Importance needs" in search_text(found)


def test_runs_that_did_not_complete_have_lines_and_no_influence(parent):
    found = find_search(read_runs([parent]))
    plot = search_plot(found)
    dashes = {trace["meta"]["run"]: trace["line"]["dash"] for trace in plot.data}
    assert {run for run, dash in dashes.items() if dash == "dot"} == {"trial-12", "trial-13"}
    assert plot.data[-1]["meta"]["run"] == found.runs[found.best].name
    assert plot.data[-1]["line"]["width"] > plot.data[0]["line"]["width"]
    positions = {trace["meta"]["run"]: trace["x"] for trace in plot.data}
    assert positions["trial-0"][0] == 1  # the largest rate, on a logarithmic axis
    assert positions["trial-1"][0] == pytest.approx(0.8)
    assert positions["trial-13"][1:] == [None, None]
    json.dumps(plot.data, allow_nan=False)
    assert len(plot.figure.data) == 14  # plotly accepts them


def test_differing_settings_are_the_parameters_of_other_runs(tmp_path):
    for number in range(4):
        summary = {"test_accuracy": 0.5 + number / 10}
        config = {"model": "mlp", "optimizer": {"rate": number}, "run_dir": str(number)}
        run_directory(tmp_path / str(number), summary, config)
    found = find_search(read_runs([tmp_path]))
    assert found.parameters == {"optimizer.rate": [0, 1, 2, 3]}
    assert found.best == 3
    assert find_search(read_runs([tmp_path / "0", tmp_path / "1"])) is None


def test_importance_finds_a_peak_and_tells_it_from_chance():
    random = np.random.default_rng(1)
    x, y = random.uniform(-1, 1, (2, 60))
    results = (-(x**2) + 0.02 * random.normal(size=60)).tolist()
    kinds = random.choice(["a", "b", "c"], 60).tolist()
    parameters = {"x": x.tolist(), "y": y.tolist(), "kind": kinds, "same": [1] * 60}
    found = importance_of(parameters, results)
    assert found["x"][0] > 0.7 > found["x"][1]
    for name in ("y", "kind", "same"):
        assert found[name][0] <= max(found[name][1], 1e-9)
    assert np.corrcoef(x, results)[0, 1] ** 2 < 0.1  # which a correlation would not find


def test_importance_of_a_known_table():
    """Epsilon squared of ranks 0 to 7 in two halves: 1 - (10 / 6) / (42 / 7) = 0.7222."""
    found = importance_of({"half": [0] * 4 + [1] * 4}, list(range(8)))
    assert found["half"][0] == pytest.approx(13 / 18)
    assert importance_of({"half": [0] * 4 + [1] * 4}, [None, *range(7)]) is None
