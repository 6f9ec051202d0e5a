"""Ray Tune on a Ray cluster on loopback: two trials at a time, one that crashes, and a kill."""

import json
import pathlib
import tempfile
import types

import numpy as np
import pyarrow.fs
import pytest

import kdist
from kdist.report.search import find_search
from kdist.testing import python
from tests.ray_programs import run_ray_program

PROGRAM = pathlib.Path(__file__).with_name("ray_tune_program.py")


@pytest.mark.slow
def test_a_killed_search_with_a_trial_that_crashes_finds_the_better_region():
    # Names of sockets may not be long.
    with tempfile.TemporaryDirectory(prefix="k", ignore_cleanup_errors=True) as directory:
        said, left = run_ray_program(PROGRAM, directory, 600)
        runs = kdist.report.read_runs([pathlib.Path(directory) / "planted"])
    assert left == []
    seen = json.loads(said.strip().splitlines()[-1])
    notes = seen.pop("notes")
    assert seen == {"best": "good", "failed": 1, "ended": 2, "tensorflow": False}
    assert [notes.count(f"{region} starts") for region in ("bad", "good")] == [1, 2]
    assert notes.count("good continues after step 8") == 1
    search = find_search(runs)
    assert search.parameters == {"region": ["crash", "bad", "good"]}
    assert list(search.states) == ["fail", "complete", "complete"]
    assert search.objective == "val_loss"
    assert search.results[1] > 2 > search.results[search.best]
    # The trial that was stopped early did not end its telemetry.
    assert [run.figure("epochs") for run in runs] == [None, None, 3]
    assert [run.finished for run in runs] == [False, True, True]


def test_values_that_json_does_not_have_are_recorded(tmp_path):
    storage = types.SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(), trial_fs_path=str(tmp_path / "a")
    )
    trial = types.SimpleNamespace(
        storage=storage,
        experiment_dir_name="search",
        trial_id="a",
        evaluated_params={"units": np.int64(3), "path": pathlib.Path("b"), "none": None},
        metric_analysis={"loss": {"last": np.float32(0.5)}},
    )
    kdist.tuning.ray_tune.RecordTrials("loss", "min").on_trial_complete(0, [trial], trial)
    run = kdist.report.read_run(tmp_path / "a")
    assert run.config["search"]["parameters"] == {"units": 3, "path": "b", "none": None}
    assert run.summary == {"loss": 0.5}


def test_a_storage_that_is_not_a_directory_is_refused():
    bucket = types.SimpleNamespace(
        storage_filesystem=pyarrow.fs._MockFileSystem(), storage_fs_path="bucket/search"
    )
    record = kdist.tuning.ray_tune.RecordTrials("loss", "min")
    with pytest.raises(ValueError, match="storage_path"):
        record.on_trial_start(0, [], types.SimpleNamespace(storage=bucket))


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="mode"):
        kdist.tuning.ray_tune.RecordTrials("loss", "minimize")


def test_without_ray_it_says_what_to_install():
    code = """
import json, sys
sys.modules["ray"] = None
try:
    import kdist.tuning.ray_tune
except ImportError as error:
    print(json.dumps(str(error)))
"""
    assert "pip install 'kdist[ray_tune]'" in python(code)
