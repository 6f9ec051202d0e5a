import collections
import errno
import json
import os
import pathlib
import shutil

import pytest

from kdist import planner, run_directory
from kdist.report import page
from kdist.run_directory import RunDirectory, check_writable, replacing
from kdist.telemetry import JsonlWriter, RunWriter
from kdist.tuning.settings import Tuned


def test_a_new_run(tmp_path):
    run = RunDirectory.create(tmp_path / "a" / "b", {"model": "mlp", "rate": float("nan")})
    assert json.loads(run.config.read_text()) == {"model": "mlp", "rate": None}
    run.write_summary({"test_accuracy": 0.5, "losses": [1.0, float("inf")]})
    assert json.loads(run.summary.read_text()) == {"test_accuracy": 0.5, "losses": [1.0, None]}
    assert sorted(os.listdir(run.path)) == ["config.json", "summary.json"]


@pytest.mark.parametrize("owns", [True, False])
def test_the_number_of_workers_is_recorded(tmp_path, owns):
    run = RunDirectory.create(tmp_path, {"model": "mlp"})
    recording = run if owns else RunDirectory(tmp_path)
    recording.record_workers(0, 4, 4)
    recording.record_workers(150, 3, 4)
    recording.record_workers(120, 2, 4)  # it resumes from an earlier checkpoint
    recording.record_workers(160, 2, 4)
    recorded = recording.record_workers(180, 4, 4)
    numbers = {"0": 4, "120": 2, "180": 4}
    assert recorded == {"planned_workers": 4, "workers_from_step": numbers}
    assert run.read_config() == {"model": "mlp", **recorded}
    if owns:
        run.check_intact()
        with pytest.raises(FileExistsError, match="another process is using"):
            RunDirectory.create(tmp_path, {}, resume=True)


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


def fill_disk(monkeypatch):
    """Lets the disk be full after the first character of a JSON file."""

    def dump(value, file, **options):
        file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_directory.json, "dump", dump)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(OSError, match=r"cannot write the run directory .*No space left"):
            RunDirectory.create(tmp_path, {"model": "mlp"})
    assert list(tmp_path.iterdir()) == []
    run = RunDirectory.create(tmp_path, {"model": "mlp"})
    run.write_summary({"accuracy": 0.5})
    before = run.summary.read_bytes()
    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(OSError, match=r"No space left on device: .*summary\.json"):
            run.write_summary({})
    assert run.summary.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "summary.json"]


def test_one_of_two_runs_that_start_together_fails(tmp_path):
    """Both have found the directory empty."""

    def start_second():
        with replacing(tmp_path / "config.json", is_new=True) as file:
            RunDirectory.create(tmp_path, {"model": "first"})
            file.write("{}")

    with pytest.raises(FileExistsError, match="config.json"):
        start_second()
    assert json.loads((tmp_path / "config.json").read_text()) == {"model": "first"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"model": "ml', "\x00" * 20])
def test_a_damaged_configuration_is_written_again(tmp_path, text, caplog):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "checkpoints").mkdir()
    run = RunDirectory(tmp_path)
    assert run.is_interrupted()
    run.check_same_config({"model": "mlp"}, ["model"])
    assert f"{run.config} is damaged" in caplog.text
    first = RunDirectory.create(tmp_path, {"model": "mlp"}, resume=True)
    assert json.loads(first.config.read_text()) == {"model": "mlp"}
    with pytest.raises(FileExistsError, match="another process is using"):
        RunDirectory.create(tmp_path, {"model": "mlp"}, resume=True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json"]


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket", "file:///tmp/a", "gs:/bucket"])
def test_urls_are_refused(path):
    with pytest.raises(ValueError, match="is a URL; give a path"):
        RunDirectory(path)


@pytest.mark.parametrize("path", ["runs/a", "/tmp/a:b/c", "C:/runs", "./gs://a", "a b/c"])
def test_paths_are_no_urls(path):
    assert RunDirectory(path).path == pathlib.Path(path)


Disk = collections.namedtuple("Disk", "total used free")


def test_paths_that_cannot_be_written_are_known_before(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path in (tmp_path / "new" / "run", tmp_path / "file", tmp_path):
        check_writable(path)
    assert os.listdir(tmp_path) == ["file"]
    for path in (tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match="give another path"):
            check_writable(path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: Disk(10**9, 10**9 - 4096, 4096))
        with pytest.raises(OSError, match="no space left in .*; free disk space"):
            check_writable(tmp_path / "new" / "run")
        full.setattr(shutil, "disk_usage", lambda _: Disk(0, 0, 0))  # of a pipe
        check_writable(tmp_path / "new" / "run")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=f"write in {tmp_path}; give another path"):
        check_writable(tmp_path / "new" / "run")


def delete(run):
    shutil.rmtree(run.path)


def move(run):
    run.path.rename(run.path.with_name("moved"))


def replace_by_another_run(run):
    shutil.rmtree(run.path)
    RunDirectory.create(run.path, {"model": "another"})


def delete_the_configuration(run):
    run.config.unlink()


@pytest.mark.parametrize("harm", [delete, move, replace_by_another_run, delete_the_configuration])
def test_a_directory_that_is_lost_during_the_run_is_reported(tmp_path, harm, caplog):
    run = RunDirectory.create(tmp_path / "run", {"model": "mlp"})
    run.check_intact()
    harm(run)
    with pytest.raises(FileNotFoundError, match="was deleted, moved, or replaced"):
        run.check_intact()
    RunWriter(run).write_summary({"loss": 1.0})
    assert not run.summary.exists()
    assert "was deleted, moved, or replaced" in caplog.text


def test_a_resumed_run_is_intact(tmp_path):
    first = RunDirectory.create(tmp_path / "run", {"model": "mlp"})
    first._config_lock.release()
    first.config.write_text("{")  # damaged, and written again
    RunDirectory.create(tmp_path / "run", {"model": "mlp"}, resume=True).check_intact()


def test_a_deleted_file_of_lines_is_reported_once_and_continued(tmp_path, caplog):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    path.unlink()
    for step in (2, 3):
        writer.write({"step": step})
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    assert caplog.text.count("was deleted, moved, or replaced") == 1
    shutil.rmtree(path.parent)
    for step in (4, 5):
        writer.write({"step": step})
    assert caplog.text.count("cannot write metrics") == 1


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


def test_the_result_of_a_trial_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "file").touch()
    RunDirectory(tmp_path / "file" / "a").record_trial({"trial": 7, "parameters": {}})
    assert "trial 7" in caplog.text


@pytest.mark.parametrize(
    "save",
    [
        lambda path: Tuned({}).save(path),
        lambda path: planner.write_offers([], path),
        lambda path: page.save("<html>", path),
    ],
)
def test_a_full_disk_keeps_the_earlier_file(tmp_path, monkeypatch, save):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "earlier"
    path.write_text("earlier")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save(path)
    assert path.read_text() == "earlier"


def test_a_program_can_name_the_file_and_a_remedy(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "report.html"
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left") as raised:
        page.save("<html>", path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "stdout"
    path.symlink_to("/dev/null")
    with replacing(path) as file:
        file.write("a")
    assert path.is_symlink()
    assert os.listdir(tmp_path) == ["stdout"]
