"""Local copies of data in object storage, here in fsspec's memory."""

import logging
import shutil
import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kdist.mirror import Store, cache, cached
from kdist.mirror.store import FileState

URL = "memory://bucket/pets"
FILES = {"cats/1.jpg": b"first cat", "cats/2.jpg": b"second cat", "dogs/1.jpg": b"dog"}


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """Returns a store in memory with `FILES`."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "cache"))
    found = Store(URL)
    for name, content in FILES.items():
        found.write(name, content)
    return found


@pytest.fixture
def fetched(monkeypatch):
    """Returns a list of the names of files that are fetched from now on."""
    names, get = [], Store.get

    def recorded(self, name, path):
        names.append(name)
        get(self, name, path)

    monkeypatch.setattr(Store, "get", recorded)
    return names


def files_in(directory):
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in paths
        if not path.name.startswith(".")
    }


def test_files_are_fetched_once_and_again_after_a_change(store, tmp_path, fetched):
    directory = cached(URL)
    assert directory == tmp_path / "cache" / "memory" / "bucket" / "pets"
    assert files_in(directory) == FILES
    assert sorted(fetched) == sorted(FILES)
    fetched.clear()
    assert cached(f"{URL}/") == directory
    assert not fetched

    store.write("cats/1.jpg", b"other cat")  # of the same size
    store.write("birds/1.jpg", b"bird")
    store.remove(["dogs/1.jpg"])
    cached(URL)
    assert sorted(fetched) == ["birds/1.jpg", "cats/1.jpg"]
    changed = {"cats/1.jpg": b"other cat", "birds/1.jpg": b"bird"}
    assert files_in(directory) == {"cats/2.jpg": b"second cat", **changed}


def test_an_interrupted_copy_is_continued(store, monkeypatch, fetched):
    monkeypatch.setattr(cache, "_THREADS", 1)
    get = Store.get

    def fail(self, name, path):
        if name == "dogs/1.jpg":
            raise OSError("the connection was lost")
        get(self, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", fail)
        with pytest.raises(OSError, match="connection was lost"):
            cached(URL)
    # A record that was cut off when the process was killed.
    with open(cache.cache_directory(URL) / cache._RECORDS, "a") as records:
        records.write('{"name": "dogs/1.j')
    fetched.clear()
    assert files_in(cached(URL)) == FILES
    assert fetched == ["dogs/1.jpg"]


def test_a_damaged_copy_is_fetched_again(fetched):
    path = cached(URL) / "cats/1.jpg"
    path.write_bytes(b"")
    fetched.clear()
    cached(URL)
    assert fetched == ["cats/1.jpg"]
    assert path.read_bytes() == b"first cat"


def test_several_processes_share_a_copy(monkeypatch, caplog, fetched):
    monkeypatch.setattr(cache, "_LOCK_POLL_SECONDS", 0.01)
    waits, get = threading.Event(), Store.get

    def slow(self, name, path):
        assert waits.wait(60)
        get(self, name, path)

    def note(message, *_):
        if message.startswith("waiting"):
            waits.set()

    monkeypatch.setattr(Store, "get", slow)
    monkeypatch.setattr(cache._logger, "info", note)
    threads = [threading.Thread(target=cached, args=(URL,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 3
    assert files_in(cached(URL)) == FILES


def test_progress_is_logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cache, "_LOG_SECONDS", 0.0)
    cached(URL)
    assert f"fetching {URL}: 3 files, 0.0 MB" in caplog.text
    assert caplog.text.count("fetched 0.0 of 0.0 MB") == 3


def test_what_cannot_be_fetched_is_reported(monkeypatch):
    with pytest.raises(FileNotFoundError, match="memory://bucket/birds has no files"):
        cached("memory://bucket/birds")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(OSError, match="KDIST_CACHE_DIR"):
        cached(URL)


def test_placeholders_of_folders_and_names_outside_are_passed_over():
    names = ["cats", "cats/1.jpg", "dogs/", "../stolen.jpg"]
    listing = {name: FileState(0, []) for name in names}  # fsspec's memory has no such names
    assert list(cache._files_of(listing)) == ["cats/1.jpg"]


def test_a_directory_of_this_machine_is_not_copied(tmp_path):
    (tmp_path / "pets").mkdir()
    assert cached(f"file://{tmp_path}/pets") == tmp_path / "pets"
    with pytest.raises(FileNotFoundError, match="no such directory"):
        cached(f"file://{tmp_path}/birds")


def test_a_file_is_created_once(store, tmp_path):
    for each in (store, Store(f"file://{tmp_path}/pets")):
        assert each.create("new.txt", b"first")
        assert not each.create("new.txt", b"second")
        assert each.read("new.txt") == b"first"
