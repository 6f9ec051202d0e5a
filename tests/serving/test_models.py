"""Versions are added and removed while requests are served; none of the requests fails."""

import dataclasses
import os
import shutil
import threading

import grpc
import pytest
from tensorflow_serving.apis import get_model_status_pb2

from kdist.serving.core.settings import BatchSettings
from kdist.serving.engine import in_process
from kdist.serving.engine.models import Models
from tests.serving.running import SECONDS, running, save_times


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Returns a directory with versions 1 to 3 of y = version * x, to copy from."""
    home = tmp_path_factory.mktemp("times")
    for version in (1, 2, 3):
        save_times(home / str(version), version)
    return home


def add(ready, directory, version, as_version=None):
    """Adds a version as `export` does: copied elsewhere, then renamed."""
    directory.mkdir(exist_ok=True)
    shutil.copytree(ready / str(version), directory / ".writing")
    os.rename(directory / ".writing", directory / str(as_version or version))


def y_of(served, version=None, model="m"):
    name = model if version is None else f"{model}/versions/{version}"
    return served.predict(name, {"instances": [[1.0]]})["predictions"][0][0]


def states(served, model="m"):
    found = served.get(f"/v1/models/{model}").json()["model_version_status"]
    return {int(each["version"]): each["state"] for each in found}


@pytest.fixture
def served(ready, tmp_path):
    add(ready, tmp_path / "m", 1)
    with running({"m": tmp_path / "m"}, BatchSettings(0.0, 2)) as it:
        yield it


@pytest.fixture
def refresh(served):
    return lambda: served.do(served.models.refresh())


@pytest.mark.slow
def test_a_new_version_replaces_the_old_one_and_its_end_brings_it_back(
    served, refresh, ready, tmp_path
):
    assert y_of(served) == 1
    add(ready, tmp_path / "m", 2)
    refresh()
    assert y_of(served) == y_of(served, 2) == 2
    assert states(served) == {1: "END", 2: "AVAILABLE"}
    assert served.post("/v1/models/m/versions/1:predict", {"instances": [[1]]}).status_code == 404
    shutil.rmtree(tmp_path / "m" / "2")
    refresh()
    assert y_of(served) == y_of(served, 1) == 1
    assert states(served) == {1: "AVAILABLE"}
    add(ready, tmp_path / "m", 3, as_version=2)
    refresh()
    assert y_of(served) == 3


@pytest.mark.slow
def test_no_request_fails_by_a_swap(served, refresh, ready, tmp_path):
    wrong, seen, done = [], set(), threading.Event()

    def ask():
        while not done.is_set():
            response = served.post("/v1/models/m:predict", {"instances": [[1.0]] * 3})
            if response.status_code != 200:
                wrong.append(response.text)
                return
            rows = {row[0] for row in response.json()["predictions"]}
            seen.update(rows)
            if len(rows) != 1:
                wrong.append(rows)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in (2, 3):
        add(ready, tmp_path / "m", version)
        refresh()
    for _ in range(3):
        shutil.rmtree(tmp_path / "m" / "3")
        refresh()
        add(ready, tmp_path / "m", 3)
        refresh()
    done.set()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert seen == {1.0, 2.0, 3.0}


def test_what_waits_is_answered_by_the_version_that_took_it(ready, tmp_path, monkeypatch):
    class Held(in_process.InProcess):
        may_go_on, begun = threading.Event(), threading.Event()

        def compute(self, key, signature, arrays):
            self.begun.set()
            assert self.may_go_on.wait(SECONDS)
            return super().compute(key, signature, arrays)

    add(ready, tmp_path / "m", 1)
    with running({"m": tmp_path / "m"}, BatchSettings(0.0, 2), compute_engine=Held()) as served:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(y_of(served))) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert Held.begun.wait(SECONDS)
        waiting = threading.Event()
        served.loop.call_soon_threadsafe(_when, served, lambda rows: rows >= 4, waiting)
        assert waiting.wait(SECONDS)
        add(ready, tmp_path / "m", 2)
        thread = threading.Thread(target=lambda: served.do(served.models.refresh()))
        thread.start()
        while states(served).get(2) != "AVAILABLE":
            pass
        assert states(served)[1] in ("AVAILABLE", "UNLOADING")
        Held.may_go_on.set()
        for each in (*threads, thread):
            each.join(SECONDS)
        assert answers == [1.0] * 6
        assert y_of(served) == 2


def _when(served, holds, event):
    """Sets an event when the queue holds a number of rows."""
    if holds(served.models.model("m").version().waiting_rows):
        event.set()
    else:
        served.loop.call_later(0.01, _when, served, holds, event)


def test_a_version_that_does_not_load_changes_nothing(served, refresh, tmp_path):
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "saved_model.pb").write_bytes(b"garbage")
    for _ in range(5):
        refresh()
    assert y_of(served) == 1
    status = served.get("/v1/models/m/versions/2").json()["model_version_status"][0]
    assert status["state"] == "END"
    assert "is not a SavedModel" in status["status"]["error_message"]
    with served.stubs() as (_, stub):
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = "m"
        found = stub.GetModelStatus(request, timeout=SECONDS).model_version_status
        assert [each.status.error_code for each in found] == [2, 0]
        request.model_spec.version.value = 3
        with pytest.raises(grpc.RpcError, match="has no version 3"):
            stub.GetModelStatus(request, timeout=SECONDS)


def test_a_version_that_has_been_mended_is_loaded(served, refresh, ready, tmp_path):
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "saved_model.pb").write_bytes(b"garbage")
    for _ in range(5):
        refresh()
    shutil.rmtree(tmp_path / "m" / "2")
    refresh()
    add(ready, tmp_path / "m", 2)
    refresh()
    assert y_of(served) == 2


def test_a_version_that_is_copied_slowly_is_loaded_when_it_is_whole(
    served, refresh, ready, tmp_path, monkeypatch
):
    loads = []
    load = served.models.compute_engine.load
    monkeypatch.setattr(
        served.models.compute_engine, "load", lambda *given: loads.append(given[0]) or load(*given)
    )
    files = sorted(path for path in (ready / "2").rglob("*") if path.is_file())
    # What it is known by comes first, what it cannot do without last.
    files.sort(key=lambda path: (path.name != "saved_model.pb", path.parent.name == "variables"))
    for path in files:
        assert y_of(served) == 1
        to = tmp_path / "m" / "2" / path.relative_to(ready / "2")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        for _ in range(5):
            refresh()
    assert y_of(served) == 2
    assert 3 < len(loads) <= 3 * len(files)  # thrice for the same files, at most


@pytest.mark.parametrize(
    "which", [".", "saved_model.pb", "variables", "variables/variables.index", "assets"]
)
def test_what_points_out_of_the_directory_is_not_loaded(served, refresh, ready, tmp_path, which):
    add(ready, tmp_path / "m", 2)
    path = tmp_path / "m" / "2" / which
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(ready / "2" / which)
    refresh()
    assert y_of(served) == 1
    assert states(served) == {1: "AVAILABLE", 2: "END"}
    said = served.get("/v1/models/m/versions/2").json()["model_version_status"][0]["status"]
    assert "leads out of" in said["error_message"]


def test_a_link_to_where_a_link_leads_out_is_not_followed(served, refresh, ready, tmp_path):
    add(ready, tmp_path / "m", 2, as_version="shared")
    add(ready, tmp_path / "m", 2)
    shutil.rmtree(tmp_path / "m" / "2" / "variables")
    (tmp_path / "m" / "2" / "variables").symlink_to(tmp_path / "m" / "shared" / "variables")
    index = tmp_path / "m" / "shared" / "variables" / "variables.index"
    index.unlink()
    index.symlink_to(ready / "2" / "variables" / "variables.index")
    refresh()
    assert states(served) == {1: "AVAILABLE", 2: "END"}


def test_links_within_the_directory_are_followed(served, refresh, ready, tmp_path):
    """Kubernetes volumes contain such links."""
    add(ready, tmp_path / "m", 2, as_version="..data")
    (tmp_path / "m" / "2").symlink_to("..data")
    (tmp_path / "m" / "..data" / "assets.extra" / "..").mkdir(exist_ok=True, parents=True)
    (tmp_path / "m" / "..data" / "assets.extra" / "again").symlink_to(tmp_path / "m")
    refresh()
    assert y_of(served) == 2


def test_where_the_newest_does_not_load_an_older_one_is_served(ready, tmp_path):
    for version in (1, 2):
        add(ready, tmp_path / "m", version)
    for version in (3, 4):
        (tmp_path / "m" / str(version)).mkdir()
        (tmp_path / "m" / str(version) / "saved_model.pb").write_bytes(b"garbage")
    with running({"m": tmp_path / "m"}, BatchSettings(0.0, 2)) as served:
        assert y_of(served) == 2
        assert states(served) == {2: "AVAILABLE", 3: "END", 4: "END"}
        shutil.rmtree(tmp_path / "m" / "4")
        add(ready, tmp_path / "m", 3, as_version="4")
        served.do(served.models.refresh())
        assert y_of(served) == 3
        assert states(served)[2] == "END"


def test_what_is_no_version_is_left_alone(served, refresh, ready, tmp_path):
    add(ready, tmp_path / "m", 2, as_version="02")
    add(ready, tmp_path / "m", 2, as_version="latest")
    (tmp_path / "m" / "7").mkdir()  # is being copied
    (tmp_path / "m" / "8").write_text("a file")
    refresh()
    assert states(served) == {1: "AVAILABLE"}


def test_a_directory_that_has_gone_leaves_what_is_loaded(served, refresh, ready, tmp_path):
    shutil.rmtree(tmp_path / "m")
    refresh()
    assert y_of(served) == 1
    add(ready, tmp_path / "m", 2)
    refresh()
    assert y_of(served) == 2


@pytest.mark.slow
def test_several_models_and_versions_at_once(ready, tmp_path):
    for name, versions in (("m", (1, 2, 3)), ("n", (3,))):
        for version in versions:
            add(ready, tmp_path / name, version)
    both = {name: tmp_path / name for name in ("m", "n")}
    with running(both, BatchSettings(0.0, 2), newest=2) as served:
        assert [y_of(served), y_of(served, 2), y_of(served, 3)] == [3, 2, 3]
        assert y_of(served, model="n") == 3
        assert states(served) == {2: "AVAILABLE", 3: "AVAILABLE"}
        shutil.rmtree(tmp_path / "m" / "3")
        served.do(served.models.refresh())
        assert [y_of(served), y_of(served, 1), y_of(served, model="n")] == [2, 1, 3]


def test_a_directory_that_is_not_there():
    with pytest.raises(ValueError, match="is not a directory"):
        Models({"m": "/nowhere/at/all"})


def test_a_version_that_hangs_while_loading_holds_up_no_other(
    served, refresh, ready, tmp_path, monkeypatch
):
    engine, loads = served.models.compute_engine, []
    release, freed = threading.Event(), threading.Event()
    load, unload = engine.load, engine.unload

    def hang(*given):
        loads.append(given[0])
        release.wait(SECONDS)
        return load(*given)

    def free(key):
        unload(key)
        freed.set()

    monkeypatch.setattr(engine, "load", hang)
    monkeypatch.setattr(engine, "unload", free)
    served.models.limits = dataclasses.replace(served.models.limits, load_seconds=0.2)
    add(ready, tmp_path / "m", 2)
    refresh()
    refresh()
    status = served.get("/v1/models/m/versions/2").json()["model_version_status"][0]
    assert status["state"] == "END"
    assert "within 0.2 s (--load_seconds)" in status["status"]["error_message"]
    assert len(loads) == 1  # the same files are not tried again
    assert y_of(served) == 1
    release.set()
    assert freed.wait(SECONDS)
    assert not [key for key in engine._loaded if key.version == 2]
    assert y_of(served) == 1
