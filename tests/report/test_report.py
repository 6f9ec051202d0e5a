import json
import re

import pytest

from kdist import report

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


def run_directory(path, summary=SUMMARY, config=None, torn=False):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or {"model": "lenet", "seed": 0}))
    records = [
        {"kind": "train", "step": s, "examples": 128 * s, "loss": 2.0 / s, "learning_rate": 0.1}
        for s in range(1, 30)
    ]
    records += [{"kind": "epoch", "examples": 3840, "loss": 0.1, "val_loss": 0.2}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (path / "metrics.jsonl").write_text(text + ('{"kind": "tra' if torn else ""))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def without_plotly(page):
    text = page.read_text()
    return text[: text.index("<script>")] + text[text.index("</script>", len(text) // 2) :]


def test_one_run(tmp_path):
    page = report.write([run_directory(tmp_path / "first")], tmp_path / "page.html")
    text = without_plotly(page)
    for shown in ("0.8765", "0.4321", "12.3", "1,234.5", "CPU:0, CPU:1", "abc123", "2.21.0"):
        assert f"<td>{shown}</td>" in text
    titles = re.findall(r"<h2>(.*?)</h2>", page.read_text())
    assert titles == ["Loss", "Learning rate"]  # there was no accuracy
    assert "Speed-up" not in text


def test_two_runs_are_overlaid_and_compared(tmp_path):
    faster = {**SUMMARY, "examples_per_second": 2469.0}
    runs = [
        run_directory(tmp_path / "one"),
        run_directory(tmp_path / "two", faster, {"model": "lenet", "seed": 1}),
    ]
    text = report.write(runs, tmp_path / "page.html").read_text()
    assert "<td>2.00</td>" in text
    assert "<th scope=row>seed</th>" in text
    assert "<th scope=row>model</th>" not in text  # only what differs
    for name in ("one: training", "two: training", "one: test", "two: test"):
        assert f'"name":"{name}"' in text


def test_the_page_asks_for_nothing(tmp_path):
    page = report.write([run_directory(tmp_path / "first")], tmp_path / "page.html")
    tags = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[^>]*>", without_plotly(page))
    assert tags == []
    assert page.stat().st_size < 6e6


def test_names_cannot_inject(tmp_path):
    config = {"model": "<script>alert(1)</script>"}
    summary = {**SUMMARY, "dataset": "<img src=x onerror=alert(1)>"}
    runs = [run_directory(tmp_path / "a<b>", summary, config)]
    text = without_plotly(report.write(runs, tmp_path / "page.html"))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "a<b>" not in text


def test_what_is_missing_is_said(tmp_path):
    unfinished = run_directory(tmp_path / "unfinished", summary=None, torn=True)
    text = without_plotly(report.write([unfinished], tmp_path / "page.html"))
    assert "unfinished: not finished: there is no summary.json yet" in text
    assert "the last line of metrics.jsonl is cut short" in text


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no run directory"):
        report.write([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(ValueError, match="no run was given"):
        report.write([], tmp_path / "page.html")
    run = run_directory(tmp_path / "damaged")
    (run / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary.json is no JSON"):
        report.write([run], tmp_path / "page.html")
    (run / "summary.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        report.write([run], tmp_path / "page.html")
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text('{"kind": "train"}\n{\n{"kind": "train"}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        report.write([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
