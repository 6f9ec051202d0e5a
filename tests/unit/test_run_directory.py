import json
import os

import pytest

from kdist.run_directory import RunDirectory
from kdist.telemetry import JsonlWriter


def test_a_new_run(tmp_path):
    run = RunDirectory.create(tmp_path / "a" / "b", {"model": "mlp", "rate": float("nan")})
    assert json.loads(run.config.read_text()) == {"model": "mlp", "rate": None}
    run.write_summary({"test_accuracy": 0.5, "losses": [1.0, float("inf")]})
    assert json.loads(run.summary.read_text()) == {"test_accuracy": 0.5, "losses": [1.0, None]}
    assert sorted(os.listdir(run.path)) == ["config.json", "summary.json"]


def test_directory_of_another_run_is_not_overwritten(tmp_path):
    RunDirectory.create(tmp_path, {"model": "mlp", "dataset": "digits"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"another run \(mlp on digits\).*--run_dir"):
        RunDirectory.create(tmp_path, {"model": "lenet"})
    RunDirectory(tmp_path).write_summary({})
    with pytest.raises(FileExistsError, match="a finished run"):
        RunDirectory.create(tmp_path, {})
    (tmp_path / "summary.json").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_file_instead_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="already holds a file"):
        RunDirectory.create(tmp_path / "file", {})
    with pytest.raises(OSError, match="cannot write the run directory"):
        RunDirectory.create(tmp_path / "file" / "below", {})
    assert (tmp_path / "file").read_text() == "mine"


def test_lines_are_written_immediately(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"loss": float("nan"), "step": 1})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"loss": None, "step": 1}
    writer.close()
    writer.write({"step": 2})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's always full device")
def test_full_disk_is_reported_once(capsys):
    writer = JsonlWriter("/dev/full")
    for step in range(3):
        writer.write({"step": step})
    logged = capsys.readouterr().err
    assert logged.count("cannot write metrics to /dev/full: No space left on device") == 1
