import base64
import json
import re

import numpy as np
import pytest

from kdist import report
from kdist.report.plots import MAX_POINTS
from kdist.report.progress_plots import progress_plots
from kdist.report.tables import summarize

SUMMARY = {
    "strategy": "MirroredStrategy",
    "devices": ["CPU:0", "CPU:1"],
    "num_replicas": 2,
    "local_batch_size": 64,
    "global_batch_size": 128,
    "model": "lenet",
    "dataset": "digits",
    "precision": "float32",
    "epochs": 2,
    "test_accuracy": 0.87654,
    "test_loss": 0.4321,
    "seconds_per_epoch": 12.34,
    "examples_per_second": 1234.5,
    "versions": {"tensorflow": "2.21.0"},
    "git_commit": "abc123",
}


def run_directory(path, summary=SUMMARY, config=None, torn="", lines=29):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config or {"model": "lenet", "seed": 0}))
    records = [
        {"kind": "train", "step": s, "examples": 128 * s, "loss": 2.0 / s, "learning_rate": 0.1}
        for s in range(1, lines + 1)
    ]
    records[1]["loss"] = None
    records += [{"kind": "epoch", "examples": 128 * (lines + 1), "loss": 0.1, "val_loss": 0.2}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (path / "metrics.jsonl").write_bytes(text.encode() + torn.encode("latin-1"))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def without_plotly(page):
    head, rest = page.read_text().split("<script>", 1)
    return head + rest[rest.index("</script>\n</head>") :]


def numbers(packed):
    """The array behind plotly's base64."""
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def cells(page, run):
    """Heading -> figure in the run's row of the first table, without hidden columns."""
    text = without_plotly(page)
    headings = re.findall(r"<th scope=col>(.*?)</th>", text.split("</thead>")[0])
    row = re.search(f"<tr><th scope=row>{re.escape(run)}</th>(.*?)</tr>", text).group(1)
    texts = [
        cell.replace("<wbr>", "") for cell in re.findall("<td(?![^>]* hidden)[^>]*>(.*?)</td>", row)
    ]
    return dict(zip(headings[1:], texts, strict=True))


def test_the_table_has_the_values_of_the_summary(tmp_path):
    page = report.write([run_directory(tmp_path / "first")], tmp_path / "page.html")
    assert cells(page, "first") == {
        "Model": "lenet",
        "Dataset": "digits",
        "Strategy": "Mirrored",
        "Devices": "2 × CPU",
        "Local batch": "64",
        "Global batch": "128",
        "Precision": "float32",
        "Epochs": "2",
        "Test accuracy": "0.8765",
        "Test loss": "0.4321",
        "Seconds per epoch": "12.3",
        "Examples per second": "1,234.5",
    }


def test_steps_without_some_workers_are_noted(tmp_path):
    numbers = {"0": 4, "120": 3, "180": 4, "200": 2}
    config = {"model": "lenet", "planned_workers": 4, "workers_from_step": numbers}
    run = run_directory(tmp_path / "first", config=config)
    text = without_plotly(report.write([run], tmp_path / "page.html"))
    assert "first: 3 of 4 workers from step 120 to 180</p>" in text
    assert "first: 2 of 4 workers from step 200</p>" in text
    assert "4 of 4 workers" not in text


def test_plots_configuration_and_environment_of_one_run(tmp_path):
    text = without_plotly(report.write([run_directory(tmp_path / "first")], tmp_path / "page.html"))
    assert re.findall("<h3>(.*?)</h3>", text) == ["Loss", "Learning rate"]  # there is no accuracy
    assert "<summary>All 2 settings" in text
    for name, value in [("seed", "0"), ("tensorflow", "2.21.0"), ("git_commit", "abc123")]:
        assert re.search(f"<tr><th scope=row>{name}</th><td[^>]*>{value}</td></tr>", text)


def test_two_runs_are_overlaid_and_compared(tmp_path):
    faster = {**SUMMARY, "examples_per_second": 2469.0}
    runs = [
        run_directory(tmp_path / "one"),
        run_directory(tmp_path / "two", faster, {"model": "lenet", "seed": 1, "run_dir": "two"}),
    ]
    page = report.write(runs, tmp_path / "page.html")
    text = without_plotly(page)
    assert [cells(page, run)["Speed-up"] for run in ("one", "two")] == ["1.00", "2.00"]
    different, equal = text.split("Settings that differ", 1)[1].split("<details", 1)
    seeds = '<td data-label="one">0</td><td data-label="two" class="differs">1</td>'
    assert f"<tr><th scope=row>seed</th>{seeds}</tr>" in different
    assert "<th scope=row>model</th>" not in different
    assert "<summary>1 equal settings" in equal
    assert "<th scope=row>run_dir</th>" not in text
    loss = progress_plots(report.read_runs(runs))[0].figure
    assert [(trace.name, trace.line.dash) for trace in loss.data] == [
        ("one", "solid"),
        ("one", "dash"),
        ("two", "solid"),
        ("two", "dash"),
    ]
    assert len({trace.line.color for trace in loss.data}) == 2
    assert sum(trace.showlegend for trace in loss.data) == 2
    assert numbers(loss.data[0].x).shape == (29,)  # of 29 lines and the epoch's, but the null one


def test_other_settings_and_results_that_differ_are_columns_to_choose(tmp_path):
    summaries = [{**SUMMARY, "parameters": 7, "first_call_seconds": n} for n in (1.5, 2.5)]
    configs = [{"model": "lenet", "run_dir": n, "optimizer": {"name": n}} for n in ("a", "<b>")]
    runs = [
        run_directory(tmp_path / str(n), summary, config)
        for n, (summary, config) in enumerate(zip(summaries, configs, strict=True))
    ]
    text = without_plotly(report.write(runs, tmp_path / "page.html"))
    table = text.split("<tbody>", 1)[0]
    hidden = re.findall("<th scope=col hidden>(.*?)</th>", table)
    assert hidden == ["optimizer.name", "first_<wbr>call_<wbr>seconds"]
    boxes = re.findall('<input type=checkbox value="(.*?)">', table)
    assert boxes == ["optimizer.name", "first_call_seconds"]
    assert '<td data-label="optimizer.name" hidden>&lt;b&gt;</td>' in text


def test_equal_configurations_are_noted(tmp_path):
    runs = [run_directory(tmp_path / name) for name in ("one", "two")]
    text = without_plotly(report.write(runs, tmp_path / "page.html"))
    assert "All runs have the same configuration." in text


def test_runs_with_the_same_name_get_distinct_names(tmp_path):
    runs = [run_directory(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in report.read_runs(runs)] == ["a/run", "b/run"]


def test_the_opening_sentence(tmp_path):
    first = run_directory(tmp_path / "first")
    slow = run_directory(tmp_path / "slow", {"examples_per_second": 617.25, "test_accuracy": 0.9})
    going = run_directory(tmp_path / "going", summary=None, config={"model": "mlp"})
    assert summarize(report.read_runs([first])) == (
        "lenet on digits, MirroredStrategy on CPU:0, CPU:1: test accuracy 0.8765, "
        "test loss 0.4321, 12.3 seconds per epoch, 1,234.5 examples per second."
    )
    assert summarize(report.read_runs([going])) == "mlp: not finished, 3,840 examples seen."
    assert summarize(report.read_runs([slow, first, going])) == (
        "3 runs, 1 of them not finished. Most accurate: slow (test accuracy 0.9000). "
        "Fastest: first (1,234.5 examples per second, 2.00 × slow)."
    )


def test_a_long_run_is_thinned_and_keeps_its_ends(tmp_path):
    run = report.read_run(run_directory(tmp_path / "long", lines=3 * MAX_POINTS))
    loss = progress_plots([run])[0]
    examples = numbers(loss.data[0]["x"])
    assert len(examples) <= MAX_POINTS
    assert (examples[0], examples[-1]) == (128, 128 * (3 * MAX_POINTS + 1))


def test_the_page_needs_no_network(tmp_path):
    page = report.write([run_directory(tmp_path / "first")], tmp_path / "page.html")
    text = without_plotly(page)
    assert not re.findall(r"\b(?:src|href)\s*=(?!\"#)|<link|@import|url\(", text)
    assert not re.findall(r"(?:src|href)=[\"']?https?:", text)
    assert "default-src 'none'" in text  # and the browser refuses what plotly.js might ask for
    assert 1e6 < page.stat().st_size < 1.3e6  # bytes, nearly all of them plotly.js


def test_the_same_runs_give_the_same_page(tmp_path):
    run = run_directory(tmp_path / "first")
    pages = [report.write([run], tmp_path / f"{n}.html").read_bytes() for n in range(2)]
    assert pages[0] == pages[1]


def test_names_cannot_inject(tmp_path):
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\" onfocus='x'"
    summary = {**SUMMARY, "dataset": attack, "versions": {attack: attack}, "git_commit": attack}
    runs = [
        run_directory(
            tmp_path / parent / "<script>alert(1)<" / "script>", summary, {attack: parent}
        )
        for parent in ("a", "b")
    ]
    text = without_plotly(report.write(runs, tmp_path / "page.html"))
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\" onfocus='" not in text


def test_the_page_notes_missing_parts(tmp_path):
    unfinished = run_directory(tmp_path / "unfinished", summary=None, torn='{"kind": "tr\xe2')
    page = report.write([unfinished], tmp_path / "page.html")
    text = without_plotly(page)
    assert "unfinished: not finished: there is no summary.json yet" in text
    assert "the last line of metrics.jsonl is incomplete and was skipped" in text
    assert cells(page, "unfinished (not finished)")["Model"] == "lenet"


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_run_that_has_just_started(tmp_path, text):
    run = run_directory(tmp_path / "new", summary=None)
    (run / "metrics.jsonl").write_text(text)
    text = without_plotly(report.write([run], tmp_path / "page.html"))
    assert "No measurements yet." in text
    assert "incomplete" not in text


def test_directories_without_a_run_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, found in [
        ("nowhere", "it does not exist"),
        ("empty", "it has no config.json, metrics.jsonl, or summary.json"),
        ("file", "it is a file"),
    ]:
        with pytest.raises(FileNotFoundError, match=f"{name} is no run directory: {found}"):
            report.write([tmp_path / name], tmp_path / "page.html")
    with pytest.raises(ValueError, match="name at least one"):
        report.write([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="a list"):
        report.write(str(tmp_path), tmp_path / "page.html")
    run = run_directory(tmp_path / "run")
    with pytest.raises(ValueError, match="given twice; name each run directory once"):
        report.write([run, tmp_path / "file" / ".." / "run"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", r"config.json is not valid JSON \(.*line 1.*omit this run"),
        ("summary.json", "[1]", "summary.json is not a JSON object"),
        ("metrics.jsonl", '{"kind": "train"}\n{\n{"kind": "train"}\n', "line 2 is not valid JSON"),
        ("metrics.jsonl", '{"kind": "train"}\n7\n', "line 2 is not a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, text, message):
    run = run_directory(tmp_path / "damaged")
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        report.write([run], tmp_path / "page.html")


def test_values_of_other_types_do_not_stop_the_page(tmp_path):
    strange = {**SUMMARY, "test_loss": "low", "examples_per_second": True, "versions": ["1"]}
    page = report.write([run_directory(tmp_path / "strange", strange)], tmp_path / "page.html")
    assert cells(page, "strange")["Test loss"] == "low"
    assert cells(page, "strange")["Examples per second"] == "true"


def test_a_page_that_cannot_be_written(tmp_path):
    run = run_directory(tmp_path / "run")
    with pytest.raises(OSError, match=r"nowhere/page\.html"):
        report.write([run], tmp_path / "nowhere" / "page.html")
