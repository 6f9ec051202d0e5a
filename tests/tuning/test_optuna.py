"""Optuna's searches with trials in processes of their own: two at a time, crashes, and kills."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import optuna
import psutil
import pytest
from optuna.storages.journal import JournalFileBackend

import kdist
from tests.faults.test_faults import MEMORY_BYTES, memory_group  # noqa: F401 (a fixture)

PROGRAM = pathlib.Path(__file__).with_name("optuna_program.py")


def command(directory, trials, *bad):
    return [sys.executable, str(PROGRAM), str(directory), str(trials), *bad]


def search(directory, trials, *bad, prefix=()):
    """Runs the program; returns the last line of its output."""
    ended = subprocess.run(
        [*prefix, *command(directory, trials, *bad)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


def group_of(directory, number):
    config = json.loads((directory / f"trial-{number:04d}" / "config.json").read_text())
    return config["search"]


@pytest.mark.slow
def test_two_workers_find_the_better_region(tmp_path):
    found = search(tmp_path, 10, "nothing")
    assert found["best"] == "good"
    assert found["states"] == ["COMPLETE"] * 10
    assert len({round(x, 6) for x in found["xs"]}) == 10  # each trial has its own random numbers
    assert not found["tensorflow"]
    groups = [group_of(tmp_path, number) for number in range(10)]
    assert [group["parameters"]["region"] for group in groups] == found["regions"]
    runs = kdist.report.read_runs([tmp_path])
    assert [run.finished for run in runs] == [True] * 10


@pytest.mark.slow
def test_a_trial_that_fails_does_not_end_the_search(tmp_path):
    found = search(tmp_path, 5, "crash", "raise", "limit")
    assert found["best"] == "good"
    assert found["states"][:4] == ["FAIL"] * 3 + ["COMPLETE"]
    for number, reason in enumerate(["SIGABRT", "ValueError: planted", "MemoryError"]):
        assert reason in found["failures"][number]
        assert group_of(tmp_path, number)["failure"] == found["failures"][number]


@pytest.mark.slow
def test_the_kernel_ends_a_trial_that_exhausts_the_memory(tmp_path, memory_group):  # noqa: F811
    assert MEMORY_BYTES < 4 << 30
    join = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh"]
    found = search(tmp_path, 4, "allocate", prefix=join)
    assert found["states"][:2] == ["FAIL", "COMPLETE"]
    assert "SIGKILL" in found["failures"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_search_that_is_ended_continues(tmp_path, number):
    first = subprocess.Popen(command(tmp_path, 4, "wait"), stdout=subprocess.DEVNULL)
    logs = [tmp_path / f"trial-{number:04d}" for number in range(2)]
    study = None
    deadline = time.monotonic() + 200
    while study is None or sum(len(trial.params) for trial in study.trials) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        if all(map(os.path.exists, logs)):
            study = optuna.load_study(
                study_name="planted", storage=f"sqlite:///{tmp_path}/study.db"
            )
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) >= 2
    first.send_signal(number)
    first.wait()
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running()]
    (tmp_path / "continue").touch()
    found = search(tmp_path, 4, "wait")
    assert found["states"] == ["FAIL"] * 2 + ["COMPLETE"] * 4
    assert sorted(found["xs"][2:4]) == sorted(found["xs"][:2])  # those that were interrupted
    assert [group_of(tmp_path, number)["state"] for number in (0, 1, 2)] == [
        *["interrupted"] * 2,
        "complete",
    ]
    assert search(tmp_path, 4, "wait") == found  # nothing is missing


def test_an_interrupted_trial_keeps_parameters_that_it_had_not_read(tmp_path):
    backend = JournalFileBackend(str(tmp_path / "journal.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    study.enqueue_trial({"x": 0.25})
    started = study.ask()  # as a search leaves it that is killed while a trial starts
    started.set_user_attr("run_directory", str(tmp_path / "trial-0000"))
    kdist.tuning.optuna.optimize(
        study, lambda trial: trial.suggest_float("x", 0.0, 1.0), tmp_path, 1
    )
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.best_params == {"x": 0.25}


def test_a_sampler_that_has_tried_everything_ends_the_search(tmp_path):
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [0, 1]}))
    kdist.tuning.optuna.optimize(study, lambda trial: trial.suggest_int("x", 0, 1), tmp_path, 4)
    assert sorted(trial.value for trial in study.trials) == [0, 1]


def test_a_grid_whose_last_trials_were_interrupted_is_completed(tmp_path):
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [0, 1]}))
    for number in range(2):
        started = study.ask()
        started.set_user_attr("run_directory", str(tmp_path / f"trial-000{number}"))
        started.suggest_int("x", 0, 1)
    kdist.tuning.optuna.optimize(study, lambda trial: trial.suggest_int("x", 0, 1), tmp_path, 4)
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 2 + ["COMPLETE"] * 2
    assert sorted(trial.value for trial in study.trials[2:]) == [0, 1]


def test_a_signal_without_a_name_fails_the_trial(tmp_path):
    number = signal.SIGRTMIN + 3
    with pytest.raises(RuntimeError, match=f"signal {number}"):
        kdist.tuning.optuna.optimize(
            optuna.create_study(), lambda trial: os.kill(os.getpid(), number), tmp_path, 1
        )


def test_no_trial_starts_after_search_seconds(tmp_path):
    study = optuna.create_study()
    kdist.tuning.optuna.optimize(study, len, tmp_path, 4, search_seconds=0)
    assert not study.trials


def test_a_directory_of_another_study_is_refused(tmp_path):
    (tmp_path / "trial-0000").mkdir()
    study = optuna.create_study()
    study.enqueue_trial({})  # has the number 0, and did not run
    with pytest.raises(FileExistsError, match="another study"):
        kdist.tuning.optuna.optimize(study, len, tmp_path, 1)


def test_a_directory_in_a_bucket_is_refused():
    with pytest.raises(ValueError, match="URL"):
        kdist.tuning.optuna.optimize(optuna.create_study(), len, "gs://bucket/search", 1)


def test_two_searches_in_one_directory_are_refused(tmp_path):
    lock = kdist.run_directory.FileLock(tmp_path)
    try:
        with pytest.raises(FileExistsError, match="another search"):
            kdist.tuning.optuna.optimize(optuna.create_study(), len, tmp_path, 1)
    finally:
        lock.release()


def test_a_search_whose_trials_all_fail_raises(tmp_path):
    def fail(trial):
        raise ValueError(f"planted in {trial.number}")

    study = optuna.create_study()
    with pytest.raises(RuntimeError, match="planted in [01]"):
        kdist.tuning.optuna.optimize(study, fail, tmp_path, 2, workers=2)
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 2


def test_a_trial_that_hangs_is_ended(tmp_path):
    def hang(trial):
        import time

        time.sleep(3600)

    with pytest.raises(RuntimeError, match="trial_seconds"):
        kdist.tuning.optuna.optimize(optuna.create_study(), hang, tmp_path, 1, trial_seconds=0.5)


def test_the_number_of_values_is_checked(tmp_path):
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(RuntimeError, match="1 values, and the study has 2"):
        kdist.tuning.optuna.optimize(study, lambda trial: trial.number, tmp_path, 1)
    kdist.tuning.optuna.optimize(study, lambda trial: (trial.number, 2.0), tmp_path, 2)
    assert study.trials[1].values == [1.0, 2.0]
    kdist.tuning.optuna.optimize(study, len, tmp_path, 1, workers=2)  # has more trials already
    assert len(study.trials) == 2


def test_trials_share_out_the_gpus_and_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr("kdist.launch.local_engine.count_cores", lambda environment: 8)
    shares = kdist.tuning.optuna._shares(2, False)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["3", "5"]
    assert [share["TF_NUM_INTRAOP_THREADS"] for share in shares] == ["4", "4"]
    with pytest.raises(ValueError, match="GPUs"):
        kdist.tuning.optuna._shares(3, False)


def test_pruning_ends_fit_after_the_files_of_other_callbacks_are_complete(tmp_path, mirrored):
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=2))

    def objective(trial):
        with mirrored.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((8, 2), "float32")
        prune = kdist.callbacks.PruneTrial(trial, "loss")
        telemetry = kdist.callbacks.Telemetry(
            tmp_path / "run", device_seconds=None, profiles=False, report=False
        )
        model.fit(x, x[:, :1], batch_size=4, epochs=9, verbose=0, callbacks=[telemetry, prune])

    study.optimize(objective, n_trials=1)
    [trial] = study.trials
    assert trial.state.name == "PRUNED"
    assert list(trial.intermediate_values) == [1, 2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epochs"] == 2


def test_pruning_refuses_several_workers(monkeypatch):
    monkeypatch.setattr("kdist.callbacks.prune_trial.is_multi_worker", lambda strategy: True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    prune = kdist.callbacks.PruneTrial(optuna.trial.FixedTrial({}), "loss")
    with pytest.raises(ValueError, match="several workers"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[prune])


def test_a_metric_that_does_not_exist_is_named():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    prune = kdist.callbacks.PruneTrial(optuna.trial.FixedTrial({}), "val_loss")
    with pytest.raises(ValueError, match="be one of loss"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[prune])
