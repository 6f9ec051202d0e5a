"""Copies of runs in object storage, here in fsspec's memory and in a directory."""

import json
import logging
import os
import shutil
import threading
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import kdist.report
from kdist.mirror import Mirror, Store, lease, mirror
from kdist.mirror.store import check_url, local_directory
from kdist.report import live

URL = "memory://bucket/a"


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """Returns an empty store in memory; short waits."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    monkeypatch.setattr(mirror, "_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 0.02)
    monkeypatch.setattr(lease, "_EXPIRY_SECONDS", 0.3)
    return Store(URL)


def write_run(directory, step=None, content="first"):
    """Writes an unfinished run with the checkpoint of a step."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model": "mlp"}')
    (directory / "metrics.jsonl").write_text(f'{{"kind": "train", "step": {step}}}\n')
    if step is not None:
        checkpoint = directory / "checkpoints" / f"step-{step:010d}"
        shutil.rmtree(checkpoint, ignore_errors=True)
        checkpoint.mkdir(parents=True)
        for name in ("checksums.json", "state.json", "tensors.index"):
            (checkpoint / name).write_text(f"{name} {content}")
    return directory


def mirrored(directory, *steps, url=URL):
    """Copies a run after checkpoints of several steps."""
    with Mirror(url, directory) as copy:
        for step in steps:
            write_run(directory, step)
            wait_until(lambda copy=copy, step=step: step in [c.step for c in copy.checkpoints()])
    return directory


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_run_is_copied_and_fetched_on_a_new_disk(tmp_path, kind):
    url = URL if kind == "memory" else f"file://{tmp_path}/bucket/a"
    first = mirrored(tmp_path / "first", 10, url=url)
    write_run(first, 12)
    second = tmp_path / "second"
    with Mirror(url, second) as copy:
        assert json.loads((second / "config.json").read_text()) == {"model": "mlp"}
        newest = copy.checkpoints()[0]
        copy.fetch(newest, second)
        assert newest.step == 10
    assert (second / "state.json").read_text() == "state.json first"
    assert not [name for name in os.listdir(second) if name.startswith(".")]
    with pytest.raises(FileExistsError, match="another run than"):
        Mirror(url, write_run(tmp_path / "third", 3)).open()
    with Mirror(url, first):  # the first disk is back, with a later checkpoint
        assert (first / "metrics.jsonl").read_text() == '{"kind": "train", "step": 12}\n'


@pytest.mark.parametrize("is_written_meanwhile", [False, True])
def test_a_large_file_does_not_delay_what_resuming_needs(
    tmp_path, monkeypatch, is_written_meanwhile
):
    first = write_run(tmp_path / "first", 10)
    (first / "best.keras").write_text("from the bucket")
    mirrored(first, 10)
    get, may_fetch = Store.get, threading.Event()

    def slow_get(store, name, path):
        assert name != "best.keras" or may_fetch.wait(20)
        get(store, name, path)

    monkeypatch.setattr(Store, "get", slow_get)
    second = tmp_path / "second"
    with Mirror(URL, second) as copy:
        assert (second / "config.json").exists()
        assert not (second / "best.keras").exists()
        write_run(second, 12)
        copy.copy()
        wait_until(lambda: copy.checkpoints()[0].step == 12)
        if is_written_meanwhile:
            (second / "best.keras").write_text("a better one")
        may_fetch.set()
        copy.wait_for_files()
        expected = "a better one" if is_written_meanwhile else "from the bucket"
        assert (second / "best.keras").read_text() == expected
    assert not [name for name in os.listdir(second) if name.startswith(".")]


def test_the_last_file_of_a_checkpoint_is_written_last(tmp_path, monkeypatch):
    written = []
    put = Store.put
    monkeypatch.setattr(Store, "put", lambda *a: written.append(a[2]) or put(*a))
    mirrored(tmp_path, 10)
    names = [name.rpartition("/")[2] for name in written if name.startswith("checkpoints/")]
    assert sorted(names) == ["checksums.json", "state.json", "tensors.index"]
    assert names[-1] == "checksums.json"


def test_incomplete_checkpoints_are_passed_over_and_removed(tmp_path, store):
    mirrored(tmp_path, 10)
    store.write("checkpoints/step-0000000020/state.json", b"{}")  # its writer was killed
    with Mirror(URL, tmp_path) as copy:
        assert [each.step for each in copy.checkpoints()] == [10]
        for step in (30, 40, 50):
            write_run(tmp_path, step)
            wait_until(lambda step=step: copy.checkpoints()[0].step == step)
    assert {name.split("/")[1] for name in store.names("checkpoints")} == {
        "step-0000000030",
        "step-0000000040",
        "step-0000000050",
    }


def test_a_second_checkpoint_of_a_step_does_not_replace_the_first_while_it_is_written(
    tmp_path, monkeypatch
):
    mirrored(tmp_path, 10)
    write_run(tmp_path, 10, "second")
    complete = []
    put = Store.put

    def observed(*arguments):
        if "checkpoints/" in arguments[2]:
            complete.append([each.version for each in copy.checkpoints()])
        put(*arguments)

    monkeypatch.setattr(Store, "put", observed)
    for _ in range(2):  # the second time, nothing has changed
        with Mirror(URL, tmp_path) as copy:
            pass
        assert [each.version for each in copy.checkpoints()] == [1]
    assert complete == [[0]] * 3


def test_two_runs_to_one_prefix_are_refused(tmp_path):
    with (
        Mirror(URL, write_run(tmp_path / "first")),
        pytest.raises(FileExistsError, match="another run writes to memory://bucket/a"),
    ):
        Mirror(URL, tmp_path / "second").open()
    with pytest.raises(FileExistsError, match="already holds a run"):
        Mirror(URL, tmp_path / "second", resume=False).open()
    (tmp_path / "first" / "summary.json").write_text("{}")
    with Mirror(URL, tmp_path / "first"):
        pass
    with pytest.raises(FileExistsError, match="finished run"):
        Mirror(URL, tmp_path / "second").open()
    Store("memory://other").write("notes.txt", b"")
    with pytest.raises(FileExistsError, match="not empty"):
        Mirror("memory://other", tmp_path / "second").open()


def test_the_lease_of_a_dead_process_is_taken_over(store, monkeypatch):
    first = lease.Lease(store)
    first.acquire("run")
    monkeypatch.setattr(lease, "_start_time", lambda process: None)  # it was killed
    second = lease.Lease(store)
    second.acquire("run")
    wait_until(lambda: first.is_lost)
    first.release()
    assert second.read()["holder"]
    second.release()
    assert not second.read()["holder"]


def test_the_lease_of_another_machine_ends_when_it_is_not_renewed(store, monkeypatch):
    first, second = lease.Lease(store), lease.Lease(store)
    monkeypatch.setattr(lease, "_machine", lambda: "the first")
    first.acquire("run")
    monkeypatch.setattr(lease, "_machine", lambda: "the second")
    with pytest.raises(FileExistsError, match="another run writes"):
        second.acquire("run")
    first._ending.set()  # as after a power failure
    first._thread.join()
    second.acquire("run")
    second.release()


def test_a_refusing_store_is_reported_once_until_it_accepts_again(tmp_path, monkeypatch, caplog):
    put, refusals = MemoryFileSystem.put_file, []

    def refuse(self, lpath, rpath, **options):
        refusals.append(rpath)
        raise PermissionError("403: quota exceeded")

    caplog.set_level(logging.INFO)
    with Mirror(URL, tmp_path) as copy:
        monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
        write_run(tmp_path, 10)
        wait_until(lambda: len(refusals) >= 3)
        monkeypatch.setattr(MemoryFileSystem, "put_file", put)
        wait_until(lambda: [each.step for each in copy.checkpoints()] == [10])
    assert caplog.text.count("403: quota exceeded") == 1
    assert "training continues" in caplog.text
    assert "copied to memory://bucket/a again" in caplog.text


def test_a_store_that_hangs_holds_up_neither_training_nor_its_end(tmp_path, monkeypatch, caplog):
    hanging = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: hanging.wait())
    monkeypatch.setattr(mirror, "_STALL_SECONDS", 0.3)
    copy = Mirror(URL, write_run(tmp_path, 10))
    copy.open()
    began = time.monotonic()
    for _ in range(1000):
        copy.copy()
    assert time.monotonic() - began < 0.2
    thread = copy._thread
    copy.close()
    assert "given up" in caplog.text
    hanging.set()
    thread.join()


def test_a_slow_store_gets_the_newest_checkpoint(tmp_path, monkeypatch, caplog, store):
    put = Store.put

    def slow(*arguments):
        if "step-0000000010/checksums" in arguments[2]:
            write_run(tmp_path, 20)
            shutil.rmtree(tmp_path / "checkpoints" / "step-0000000010")
            write_run(tmp_path, 30)
        put(*arguments)

    monkeypatch.setattr(Store, "put", slow)
    mirrored(write_run(tmp_path, 10))
    steps = [int(name.split("/")[1][5:]) for name in store.names("checkpoints")]
    assert sorted(set(steps)) == [10, 30]
    assert caplog.text.count("longer than the time between checkpoints") == 1


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_copied_whole(tmp_path, monkeypatch):
    link = mirror._link

    def link_and_replace(source, target):
        link(source, target)
        monkeypatch.setattr(mirror, "_link", link)
        write_run(tmp_path, 10, "second")

    monkeypatch.setattr(mirror, "_link", link_and_replace)
    mirrored(write_run(tmp_path, 10))
    names = Mirror(URL, tmp_path).checkpoints()[0].names
    assert {Store(URL).read(name).split()[1] for name in names} == {b"second"}


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("gs://bucket", ValueError, "names no directory of a bucket; write gs://BUCKET/NAME"),
        ("gs://bucket/../a", ValueError, "names no directory"),
        ("runs/a", ValueError, "is no URL"),
        ("nowhere://bucket/a", ValueError, "fsspec knows no nowhere://"),
    ],
)
def test_wrong_urls_are_refused(url, error, words):
    with pytest.raises(error, match=words):
        check_url(url)


@pytest.mark.parametrize(("url", "extra"), [("gs://b/a", "gs"), ("s3://b/a", "s3")])
def test_a_missing_package_names_the_extra(url, extra, monkeypatch):
    def missing(protocol):
        raise ImportError(f"install it for {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ImportError, match=rf"pip install 'kdist\[{extra}\]'"):
        check_url(url)


def test_urls_have_a_local_directory():
    assert local_directory("gs://bucket/cats/a/") == local_directory("runs/gs/bucket/cats/a")


def test_reports_read_mirrored_runs(tmp_path):
    mirrored(tmp_path / "first", 10)
    run, local = kdist.report.read_runs([URL, tmp_path / "first"])
    assert (run.config, run.name) == ({"model": "mlp"}, "a")
    assert local.metrics("train").length == run.metrics("train").length == 1
    with pytest.raises(FileNotFoundError, match="memory://bucket/b is no run directory"):
        kdist.report.read_run("memory://bucket/b")


def test_the_live_page_follows_a_mirrored_run(tmp_path, store):
    mirrored(tmp_path / "first", 10)
    page = live._LivePage([URL], tmp_path / "page.html", None)
    page.make()
    version = page.version
    page.update()
    assert page.version == version
    store.write("config.json", b'{"model": "lenet"}')
    page.update()
    assert (page.version != version, page.error) == (True, "")
