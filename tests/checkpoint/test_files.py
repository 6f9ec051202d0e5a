import json
import os
import pathlib
import pickle
import shutil
import socket

import ml_dtypes
import numpy as np
import pytest

import kdist.checkpoint
from kdist.checkpoint import CheckpointError, CheckpointFiles, open_checkpoint
from kdist.checkpoint.files import BackgroundWriter
from kdist.mirror import Mirror

ARRAYS = {
    "model/weights/0": np.arange(6, dtype="float32").reshape(2, 3),
    "model/weights/1": np.array(7, "int64"),
    "model/weights/2": np.array([1.5, -2.0], ml_dtypes.bfloat16),
}


def write(directory, *steps, keep=3, best=()):
    files = CheckpointFiles(directory, keep)
    for step in steps:
        files.write(step, ARRAYS, {"number": step}, is_best=step in best)
    return files


def steps(files):
    return [int(path.name.split("-")[1]) for path in files.paths()]


def test_arrays_are_read_bit_by_bit(tmp_path):
    saved = write(tmp_path / "new" / "directory", 12).newest()
    assert (saved.step, saved.state["number"]) == (12, 12)
    found = saved.tensors()
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_no_checkpoint_in_an_empty_or_missing_directory(tmp_path):
    assert CheckpointFiles(tmp_path).newest() is None
    assert CheckpointFiles(tmp_path / "none").newest() is None


def test_newest_and_best_are_kept(tmp_path):
    files = write(tmp_path, 1, 2, 3, 4, 5, keep=2, best=(1, 2))
    assert files.best().name == "step-0000000002"
    assert steps(files) == [2, 4, 5]
    assert list(tmp_path.glob("unfinished*")) == []


def test_same_step_replaces_the_checkpoint(tmp_path):
    files = write(tmp_path, 3)
    files.write(3, ARRAYS, {"number": "second"})
    assert files.newest().state["number"] == "second"
    assert steps(files) == [3]


def test_kill_during_replacement_loses_no_checkpoint(tmp_path):
    """Kills before the new checkpoint is renamed, and before the old one is removed."""
    files = write(tmp_path, 3, 7)
    (tmp_path / "step-0000000007").rename(tmp_path / "unfinished-replaced-step-0000000007")
    assert files.newest().step == 7
    files.write(7, ARRAYS, {"number": "second"})
    assert files.newest().state["number"] == "second"
    leftover = tmp_path / "unfinished-replaced-step-0000000007"
    leftover.mkdir()
    (leftover / "state.json").touch()
    files.write(7, ARRAYS, {"number": "third"})
    assert files.newest().state["number"] == "third"
    assert list(tmp_path.glob("unfinished*")) == []


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-3])


def make_pipe(file):
    file.unlink()
    os.mkfifo(file)


def make_json_list(file):
    file.write_text("[1, 2]")


def make_directory(file):
    file.unlink()
    file.mkdir()


def make_link_to_nothing(file):
    file.unlink()
    file.symlink_to("missing")


def make_link_to_itself(file):
    file.unlink()
    file.symlink_to(file.name)


def make_socket(file):
    file.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(file.relative_to(pathlib.Path.cwd())))


def make_nested_json(file):
    file.write_text("[" * 200_000)


def make_endless(file):
    os.truncate(file, 1 << 40)  # a sparse file: reading it would fill the memory, or take hours


SPECIAL = [make_directory, make_link_to_nothing, make_link_to_itself, make_socket]


@pytest.mark.timeout(60)  # opening a pipe waits for a writer
@pytest.mark.parametrize(
    "harm", [flip_a_bit, truncate, make_pipe, make_json_list, lambda file: file.unlink(), *SPECIAL]
)
@pytest.mark.parametrize(
    "name", ["state.json", "checksums.json", "tensors.index", "tensors.data-00000-of-00001"]
)
def test_damaged_checkpoint_falls_back_to_the_previous_one(
    tmp_path, capsys, monkeypatch, harm, name
):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    files = write(tmp_path, 1, 2)
    harm(tmp_path / "step-0000000002" / name)
    assert files.newest().step == 1
    logged = capsys.readouterr().err
    assert "step-0000000002 is " in logged
    assert logged.rstrip().endswith("trying the checkpoint before it")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "step-0000000002")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("harm", [make_nested_json, make_endless])
@pytest.mark.parametrize("name", ["state.json", "checksums.json"])
def test_json_that_no_run_has_written_is_not_read(tmp_path, harm, name):
    files = write(tmp_path, 1, 2)
    harm(tmp_path / "step-0000000002" / name)
    assert files.newest().step == 1


def make_file_instead(path):
    shutil.rmtree(path)
    path.write_text("")


def make_link_instead(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_dead_link_instead(path):
    shutil.rmtree(path)
    path.symlink_to("missing")


@pytest.mark.parametrize("harm", [make_file_instead, make_link_instead, make_dead_link_instead])
@pytest.mark.parametrize("prefix", ["", "unfinished-", "unfinished-replaced-"])
def test_other_things_with_the_name_of_a_checkpoint_are_replaced(tmp_path, harm, prefix):
    files = write(tmp_path, 1, 2)
    harm((tmp_path / "step-0000000002").rename(tmp_path / f"{prefix}step-0000000002"))
    files.write(2, ARRAYS, {"number": 2})
    assert files.newest().step == 2
    assert not (tmp_path / "step-0000000002").is_symlink()
    assert list(tmp_path.glob("unfinished*")) == []


def test_a_link_to_an_old_checkpoint_is_removed_and_its_target_is_not(tmp_path):
    files = write(tmp_path, 1, 2, keep=1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-0000000001").symlink_to("elsewhere")
    files.write(3, ARRAYS, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step-0000000003"]


def test_a_deleted_directory_is_created_again(tmp_path, monkeypatch):
    files = write(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run")
    files.write(2, ARRAYS, {})
    assert files.newest().step == 2
    # Also if it is deleted at the end of a write.
    monkeypatch.setattr(files, "_put_in_place", lambda *_: shutil.rmtree(tmp_path / "run"))
    files.write(3, ARRAYS, {})


def test_unfinished_checkpoints_are_ignored_and_replaced(tmp_path):
    files = write(tmp_path, 1)
    (tmp_path / "unfinished-step-0000000002").mkdir()
    (tmp_path / "unfinished-step-0000000002" / "state.json").write_text("{")
    assert files.newest().step == 1
    write(tmp_path, 2)
    assert steps(files) == [1, 2]
    assert list(tmp_path.glob("unfinished*")) == []


def test_what_killed_writes_leave_is_removed(tmp_path):
    for name in ("unfinished-step-0000000001", "unfinished-step-0000000005"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.index").touch()
    model = tmp_path / "unfinished-epoch-0001.keras"  # a file of EpochCheckpoint
    model.touch()
    assert steps(write(tmp_path, 7)) == [7]
    assert list(tmp_path.glob("unfinished*")) == [model]


def test_a_pipe_among_old_checkpoints_does_not_hang(tmp_path):
    files = write(tmp_path, 1)
    make_pipe(tmp_path / "step-0000000001" / "state.json")
    write(tmp_path, 2)
    assert files.newest().step == 2


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ("unpickled",)

    files = write(tmp_path, 1)
    (tmp_path / "step-0000000001" / "state.json").write_bytes(pickle.dumps(Trap()))
    assert files.newest() is None


def test_failed_write_keeps_existing_checkpoints(tmp_path):
    files = write(tmp_path / "files", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CheckpointFiles(tmp_path / "file").write(1, ARRAYS, {})
    assert files.newest().step == 1


def test_keep_is_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointFiles(tmp_path, keep=0)


def test_background_writer_logs_failures(tmp_path, capsys):
    files = CheckpointFiles(tmp_path / "in" / "here")
    writer = BackgroundWriter(files)
    writer.put(1, ARRAYS, {})
    writer.wait()
    assert files.newest().step == 1
    (tmp_path / "file").write_text("")
    blocked = BackgroundWriter(CheckpointFiles(tmp_path / "file"))
    blocked.put(1, ARRAYS, {})
    blocked.close()
    writer.close()
    assert blocked.failed == 1
    assert "training continues" in capsys.readouterr().err


def test_background_writer_survives_other_errors(tmp_path, caplog):
    writer = BackgroundWriter(CheckpointFiles(tmp_path))
    writer.put(1, ARRAYS, {"not": {"JSON"}})
    writer.wait()
    writer.put(2, ARRAYS, {})
    writer.close()
    assert steps(CheckpointFiles(tmp_path)) == [2]
    assert "not JSON serializable" in caplog.text


def test_newest_and_best_queued_checkpoints_are_written(tmp_path):
    files = CheckpointFiles(tmp_path, keep=100)
    writer = BackgroundWriter(files)
    for step in range(1, 40):
        writer.put(step, ARRAYS, {}, step == 20)
    writer.close()
    assert {20, 39} <= set(steps(files))
    best = [
        s
        for s in steps(files)
        if json.loads((tmp_path / f"step-{s:010d}" / "state.json").read_text())["is_best"]
    ]
    assert best == [20]


@pytest.mark.parametrize("name", ["Saved", "opened"])
def test_old_names_warn(name):
    with pytest.warns(DeprecationWarning, match=name):
        assert callable(getattr(kdist.checkpoint, name))


def test_the_newest_valid_checkpoint_of_a_mirror_is_fetched(tmp_path, caplog):
    run, url = tmp_path / "run", f"file://{tmp_path}/bucket/run"
    mirror = Mirror(url, run)
    for step in (10, 20):
        with mirror:
            write(run / "checkpoints", step)
    new = CheckpointFiles(tmp_path / "new")
    assert new.fetch(mirror).step == 20
    assert new.newest().path == tmp_path / "new" / "step-0000000020"
    assert new.newest().tensors().keys() == ARRAYS.keys()
    assert new.fetch(mirror, after=20) is None
    # Damaged in the store: the one before it, as long as it is newer than what is there.
    (tmp_path / "bucket/run/checkpoints/step-0000000020/state.json").write_text("{}")
    assert CheckpointFiles(tmp_path / "newer").fetch(mirror).step == 10
    assert "trying the checkpoint before it" in caplog.text
    assert os.listdir(tmp_path / "newer") == ["step-0000000010"]
