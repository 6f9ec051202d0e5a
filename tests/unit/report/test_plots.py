import base64
import json
import math
import re

import numpy as np
import pytest

from benchmarks import large_report
from kdist import report
from kdist.report import tables
from kdist.report.plots import PAGE_POINTS, Style, points_per_line, thin
from kdist.report.progress_plots import axes_of, progress_plots
from kdist.report.telemetry_plots import (
    DEVICE_METRICS,
    breakdown,
    breakdown_plot,
    device_plots,
    devices_in_words,
    share_plots,
    step_time_plots,
)
from tests.report.example_runs import OPERATIONS, VERDICT, write_run


def numbers(packed):
    """The array behind plotly's base64."""
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def page_without_plotly(*arguments):
    head, rest = report.write(*arguments).read_text().split("<script>", 1)
    return head + rest[rest.index("</script>\n</head>") :]


def with_records(run, file, change):
    records = [json.loads(line) for line in (run / file).read_text().splitlines()]
    changed = (change(record) for record in records)
    (run / file).write_text("".join(json.dumps(r) + "\n" for r in changed if r is not None))
    return report.read_run(run)


@pytest.mark.parametrize("points", [4, 5, 50, 999, 1000])
@pytest.mark.parametrize("length", [1, 3, 4, 999, 1000, 12345])
def test_thinning_keeps_ends_and_extremes(points, length):
    chance = np.random.default_rng(length)
    x, y = np.arange(length), chance.normal(size=length)
    few_x, few_y = thin(x, y, points)
    assert len(few_x) <= max(points, 4)
    assert len(few_x) == length or length > points
    assert (np.diff(few_x) > 0).all()
    np.testing.assert_array_equal(y[few_x], few_y)
    assert {0, length - 1, y.argmin(), y.argmax()} <= set(few_x)


def test_thinning_keeps_the_extremes_of_every_stretch():
    y = np.zeros(10_000)
    spikes = np.arange(50, 10_000, 101)
    y[spikes] = np.where(np.arange(len(spikes)) % 2, 1, -1)
    kept, _ = thin(np.arange(len(y)), y, 2 * 101 * 2)
    assert set(spikes) <= set(kept)


def test_many_long_runs_make_a_page_of_bounded_size(tmp_path):
    directories = large_report.write_runs(tmp_path, runs=30, lines=3000, samples=200)
    with open(directories[7] / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "examples": 100, "loss": 77.5}\n')
    page = tmp_path / "page.html"
    text = page_without_plotly(directories, page)
    runs = report.read_runs(directories)
    points = points_per_line(r for run in runs for r in (*run.records.values(),))
    loss = progress_plots(runs, points)[0]
    assert len(loss.data) == 60
    assert max(len(numbers(line["x"])) for line in loss.data) <= points
    assert sum(77.5 in numbers(line["y"]) for line in loss.data) == 1
    assert max(extent.highest for extent in loss.extents) == 77.5
    assert re.search(r"\d+ of [\d,]+ lines were thinned to [\d,]+ points", text)
    plotly = page.stat().st_size - len(text.encode())
    # Nothing but the points grows with the runs' length: 11 bytes each, and a kilobyte a line.
    assert page.stat().st_size - plotly < 11 * PAGE_POINTS + 1000 * text.count('"bdata"')


def test_a_line_that_is_short_is_not_thinned(tmp_path):
    text = page_without_plotly([write_run(tmp_path / "run")], tmp_path / "page.html")
    assert "thinned" not in text


def test_a_plot_for_each_metric_and_a_line_for_each_device(tmp_path):
    run = report.read_run(write_run(tmp_path / "run"))
    plots = {plot.title: plot for plot in device_plots(run)}
    assert set(plots) == {metric.title for metric in DEVICE_METRICS} - {"NVLink"}  # all null
    utilization = plots["GPU utilization"].figure  # plotly checks it
    assert [line.name for line in utilization.data] == [f"gpu/{i}" for i in range(4)]
    measured = run.devices["node7", "gpu/2"].column("utilization")
    np.testing.assert_allclose(numbers(utilization.data[2].y), 100 * measured, rtol=1e-6)
    np.testing.assert_allclose(numbers(utilization.data[2].x), np.arange(30) / 6)
    assert plots["GPU memory used"].extents[0].highest == 60
    assert [e.name for e in plots["PCIe"].extents[:2]] == ["gpu/0: sent", "gpu/0: received"]
    assert devices_in_words(run) == "4 GPUs, 4 cores on node7"


def test_names_include_the_host_if_there_are_several(tmp_path):
    run = report.read_run(write_run(tmp_path / "run", gpus=1, hosts=("b", "a")))
    names = [line["name"] for line in device_plots(run)[0].data]
    assert names == ["a/gpu/0", "b/gpu/0"]
    assert devices_in_words(run) == "2 GPUs, 8 cores on 2 hosts"


def test_many_cores_are_their_mean_and_extremes(tmp_path):
    path = write_run(tmp_path / "run", windows=3, gpus=0)
    lines = [
        {"seconds": s, "host": "h", "device": f"cpu/{core}", "utilization": core / 100 + s / 10}
        for s in (0, 1)
        for core in range(64)
    ]
    (path / "devices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = report.read_run(path)
    assert list(run.devices)[9:11] == [("h", "cpu/9"), ("h", "cpu/10")]
    (plot,) = device_plots(run)
    assert [e.name for e in plot.extents] == [
        f"{what} of 64 cores" for what in ("mean", "highest", "lowest")
    ]
    assert [e.first for e in plot.extents] == pytest.approx([31.5, 63, 0])
    assert [e.last for e in plot.extents] == pytest.approx([41.5, 73, 10])


def test_breakdown_of_the_summary_and_of_an_unfinished_run(tmp_path):
    path = write_run(tmp_path / "run")
    assert breakdown(report.read_run(path)) == {
        "input": 0.22,
        "callbacks": 0.02,
        "compute": 0.56,
        "reduce": 0.2,
    }
    (path / "summary.json").unlink()
    shares = breakdown(report.read_run(path))
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compute"] / shares["reduce"] == pytest.approx(0.55 / 0.21)
    not_profiled = with_records(
        path, "metrics.jsonl", lambda r: {k: v for k, v in r.items() if k != "compute_share"}
    )
    assert breakdown(not_profiled) == pytest.approx(
        {"input": 0.22, "callbacks": 0.02, "step": 0.76}
    )
    nothing = with_records(path, "metrics.jsonl", lambda r: None if r["kind"] == "timing" else r)
    assert breakdown(nothing) == {}
    assert breakdown_plot([nothing]) is None


def test_bars_are_milliseconds_if_known_for_all_runs(tmp_path):
    paths = [write_run(tmp_path / "one"), write_run(tmp_path / "two", slower=2)]
    figure = breakdown_plot(report.read_runs(paths)).figure
    assert figure.layout.barmode == "stack"
    bars = {bar.name: bar.x for bar in figure.data}
    assert bars["waiting for input"] == pytest.approx((22, 44))
    assert sum(lengths[1] for lengths in bars.values()) == pytest.approx(200)
    with_records(paths[0], "metrics.jsonl", lambda r: None if r["kind"] == "timing" else r)
    in_percent = breakdown_plot(report.read_runs(paths))
    assert in_percent.x_title == "% of the time"
    assert in_percent.data[0]["x"] == pytest.approx([22, 22])


def test_percentiles_of_many_runs_have_a_plot_each(tmp_path):
    paths = [write_run(tmp_path / str(n), windows=2) for n in range(5)]
    runs = report.read_runs(paths)
    assert [len(plot.data) for plot in step_time_plots(runs[:4])] == [12]
    assert [plot.title for plot in step_time_plots(runs)] == [
        f"Time of a step, {which}" for which in ("median", "90th percentile", "99th percentile")
    ]


def test_replicas_and_shares_over_time(tmp_path):
    shares, busy = share_plots(report.read_run(write_run(tmp_path / "run")))
    assert shares.extents[0].name == "waiting for input"
    assert shares.extents[0].first == pytest.approx(22)
    assert [e.first for e in busy.extents] == pytest.approx([60, 65, 70, 75])


def test_two_dozen_runs_look_different():
    assert len({(s.color, s.dash) for s in map(Style.of_order, range(24))}) == 24


def test_a_run_without_examples_is_plotted_against_steps(tmp_path):
    run = with_records(
        write_run(tmp_path / "run"), "metrics.jsonl", lambda r: {**r, "examples": None}
    )
    loss = progress_plots([run])[0]
    assert loss.x_title == "steps"
    assert numbers(loss.data[0]["x"])[0] == 10


def test_curves_of_windows_have_no_points_of_epochs(tmp_path):
    run = write_run(tmp_path / "run")
    old = progress_plots([report.read_run(run)])[0]
    assert old.extents[0].points == 303  # of 300 lines and 3 epochs
    new = with_records(
        run, "metrics.jsonl", lambda r: {**r, "window_steps": 10} if r["kind"] == "train" else r
    )
    assert progress_plots([new])[0].extents[0].points == 300
    short = with_records(
        run, "metrics.jsonl", lambda r: r if r["kind"] != "train" or r["step"] == 10 else None
    )
    assert progress_plots([short])[0].extents[0].points == 3


def test_axes_of_runs(tmp_path):
    runs = report.read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", slower=2)])
    axes = axes_of(runs)
    assert axes["choices"] == ["examples", "minutes", "epoch"]
    moments = axes["runs"]["b"]
    assert {name: values[0] for name, values in moments.items()} == dict.fromkeys(moments, 0.0)
    ends = {name: values[-1] for name, values in moments.items()}
    assert ends == {"examples": 192000, "minutes": 5.0, "step": 1500, "epoch": 3.0}
    at_epoch = np.interp(1, moments["epoch"], moments["minutes"])
    assert at_epoch == pytest.approx(100 / 60, rel=0.01)
    early = with_records(
        tmp_path / "a", "metrics.jsonl", lambda r: None if r["kind"] == "epoch" else r
    )
    assert axes_of([early])["choices"] == ["examples", "minutes"]


def test_tiles_of_one_run(tmp_path):
    run = report.read_run(write_run(tmp_path / "run", total_seconds=7505.0))
    tiles = tables.tiles(run, 3.6)
    shown = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", tiles))
    assert shown == {
        "Test accuracy": "91.2 %",
        "Examples per second": "1,200",
        "Training time": "2 h 5 min",
        "Cost": "$7.50",
    }


def test_validation_is_shown_where_there_is_no_test(tmp_path):
    validation = {"val_accuracy": 0.8}
    tested = write_run(tmp_path / "tested", **validation)
    validated = write_run(tmp_path / "validated", **validation)
    summary = json.loads((validated / "summary.json").read_text())
    del summary["test_accuracy"]
    (validated / "summary.json").write_text(json.dumps(summary))
    for path, name in ((tested, "test"), (validated, "validation")):
        run = report.read_run(path)
        other = "validation" if name == "test" else "test"
        for text in (tables.summarize([run]), tables.tiles(run), tables.run_table([run])):
            assert f"{name} accuracy" in text.lower()
            assert f"{other} accuracy" not in text.lower()


def test_a_page_has_no_more_of_plotly_than_it_needs(tmp_path):
    page = report.write([write_run(tmp_path / "run")], tmp_path / "page.html")
    assert page.stat().st_size < 1.5e6


def test_a_verdict_without_findings_says_why(tmp_path):
    for enough, remark in ((True, "No bottleneck was found."), (False, "No verdict.")):
        measured = {"measured_steps": 12, "measured_seconds": 3.0, "measured_enough": enough}
        run = write_run(tmp_path / str(enough), verdict=[], **measured)
        text = page_without_plotly([run], tmp_path / "page.html")
        assert f"{remark} 12 steps were measured, in 3.0 seconds" in text


def test_verdicts_precede_the_table_and_operations_have_one(tmp_path):
    text = page_without_plotly([write_run(tmp_path / "run")], tmp_path / "page.html")
    assert text.index(VERDICT[0]) < text.index(VERDICT[1]) < text.index("<h2>Runs")
    (row,) = re.findall("<tr><th scope=row>conv0/Conv2D</th>(.*?)</tr>", text)
    assert re.findall("<td[^>]*>(.*?)</td>", row) == ["Conv2D", "GPU:0", "4.00", "20.0 %", "2"]
    assert text.count("/Conv2D</th>") == len(OPERATIONS) == 10


def test_speed_up_efficiency_and_cost(tmp_path):
    runs = [
        write_run(tmp_path / "one", gpus=1, cost_usd=1.25, global_batch_size=128),
        write_run(tmp_path / "two", gpus=2, hosts=("a", "b"), slower=1.6),
    ]

    def columns(*prices):
        text = page_without_plotly(runs, tmp_path / "page.html", *prices)
        headings = re.findall("<th scope=col>(.*?)</th>", text.split("</thead>")[0])[1:]
        rows = re.findall("<tr><th scope=row>(?:one|two)</th>(.*?)</tr>", text)[:2]
        found = [re.findall("<td(?![^>]* hidden)[^>]*>(.*?)</td>", row) for row in rows]
        return dict(zip(headings, zip(*found, strict=True), strict=True))

    known = columns()
    assert known["Speed-up"] == ("1.00", "2.50")
    assert known["Efficiency"] == ("100.0 %", "62.5 %")
    assert known["Cost (USD)"] == ("1.25", "–")
    assert known["Median step (ms)"] == ("100.00", "160.00")
    assert columns(12.0)["Cost (USD)"] == ("1.00", "1.00")  # 300 seconds
    assert columns({"two": 24.0})["Cost (USD)"] == ("1.25", "2.00")
    write_run(tmp_path / "other", gpus=1, global_batch_size=32)
    other, first = report.read_runs([tmp_path / "other", runs[0]])
    assert tables.scaling_efficiency(other, first) is None
    with pytest.raises(ValueError, match="no run 'three'; the runs are one, two"):
        columns({"three": 1.0})


def test_prices_of_the_command_line():
    assert report.parse_prices([]) is None
    assert report.parse_prices(["2.1"]) == 2.1
    assert report.parse_prices(["a=2.1", "b=c=0"]) == {"a": 2.1, "b=c": 0}
    for texts in (["two"], ["-1"], ["nan"], ["a=x"], ["1", "2"], ["a=1", "2"]):
        with pytest.raises(ValueError, match="--price_usd_per_hour: .* NAME=2.1,NAME2=0.4"):
            report.parse_prices(texts)


def test_incomplete_and_damaged_files(tmp_path):
    path = write_run(tmp_path / "run", windows=2)
    whole = (path / "devices.jsonl").read_text()
    (path / "devices.jsonl").write_text(whole[:-20])
    (path / "summary.json").write_text('{"test_accuracy": 0.9, "dev')
    run = report.read_run(path)
    assert run.notes == [
        "summary.json is empty or incomplete and was skipped; copy it again",
        "the last line of devices.jsonl is incomplete and was skipped",
    ]
    assert not run.finished
    assert ("node7", "network") in run.devices  # of the sample before
    (path / "summary.json").write_text("")
    assert report.read_run(path).notes[0].startswith("summary.json is empty")
    (path / "devices.jsonl").write_text("{\n" + whole)
    with pytest.raises(ValueError, match="devices.jsonl, line 1 is not valid JSON"):
        report.read_run(path)
    (path / "devices.jsonl").write_text('{"a": [\n1]}\n{}\n')
    with pytest.raises(ValueError, match="devices.jsonl, line 1 is not valid JSON"):
        report.read_run(path)


def test_records_of_another_kind_are_skipped(tmp_path):
    path = write_run(tmp_path / "run", windows=2)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"kind": 7}\n{}\n{"kind": "epoch", "examples": 1, "val_loss": "low"}\n')
        file.write(
            '{"kind": "train", "examples": 1e400, "loss": true, "step": 1' + "0" * 400 + "}\n"
        )
    run = report.read_run(path)
    assert set(run.records) == {"train", "epoch", "timing"}
    assert run.metrics("train").length == 21
    assert math.isnan(run.metrics("train").column("loss")[-1])
    assert math.isnan(run.metrics("train").column("step")[-1])
    report.write([path], tmp_path / "page.html")


def test_a_loss_that_is_not_finite_is_noted(tmp_path):
    path = write_run(tmp_path / "run", windows=2)
    assert not report.read_run(path).notes
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 70, "loss": true}\n{"kind": "train", "step": 71}\n')
        file.write('{"kind": "train", "step": 80, "loss": null}\n')
        file.write('{"kind": "epoch", "step": 90, "loss": NaN, "val_loss": Infinity}\n')
    run = report.read_run(path)
    assert run.notes == [
        "the loss is NaN or infinite, first recorded at step 80",
        "the validation loss is NaN or infinite, first recorded at step 90",
    ]


def test_the_page_notes_missing_measurements(tmp_path):
    path = write_run(tmp_path / "run", windows=2)
    (path / "devices.jsonl").unlink()
    with_records(path, "metrics.jsonl", lambda r: None if r["kind"] == "timing" else r)
    text = page_without_plotly([path], tmp_path / "page.html")
    assert "metrics.jsonl has no records of kind “timing”: run." in text
    assert "No devices were measured" in text
    assert "class=note" not in text.split("<noscript>")[0]  # an older run is no damaged one


def test_names_of_many_runs_are_abbreviated(tmp_path):
    paths = large_report.write_runs(tmp_path, runs=40, lines=10, samples=0)
    for path in paths:
        (path / "summary.json").unlink()
    text = page_without_plotly(paths, tmp_path / "page.html")
    assert "run0, run1, run2, run3, run4, 35 others: not finished" in text
    assert "<th scope=col>run39</th>" not in text  # runs are rows


def test_show_needs_a_notebook(tmp_path):
    with pytest.raises(RuntimeError, match="needs a notebook.*kdist.report.write"):
        report.show([write_run(tmp_path / "run", windows=1)])


def test_show_in_a_notebook(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("kdist.report.page._in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    assert report.show([write_run(tmp_path / "run", windows=1)], height=500) is None
    frame = shown[0].data
    assert frame.startswith('<div><iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert 'height="500"' in frame
    assert frame.count("<") == 4  # the page within is text to the notebook
