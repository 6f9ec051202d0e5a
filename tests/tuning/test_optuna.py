"""Searches with Optuna: trials in processes of their own, and pruning."""

import functools
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
from kdist.tuning.optuna import PruningCallback, run_trials
from tests.tuning import optuna_objectives as objectives


@pytest.fixture
def storage(tmp_path):
    return f"sqlite:///{tmp_path}/search.db"


def states(study):
    return [trial.state.name for trial in study.get_trials()]


@pytest.mark.slow
def test_finds_the_good_region_with_a_model_on_two_devices(storage):
    study = optuna.create_study(storage=storage)
    for rate in (1e-8, 0.1):
        study.enqueue_trial({"rate": rate})
    run_trials(objectives.train, study, trials=2, processes=2)
    assert states(study) == ["COMPLETE", "COMPLETE"]
    assert study.best_params["rate"] == 0.1
    assert study.best_value < 0.1


def test_a_killed_trial_fails_alone_and_a_search_continues(tmp_path):
    backend = JournalFileBackend(str(tmp_path / "journal.log"))
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend), sampler=sampler, study_name="search"
    )
    run_trials(objectives.draw, study, trials=4)
    assert states(study) == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE"]
    draws = [trial.params["x"] for trial in study.get_trials() if trial.params]
    assert len(set(draws)) == 3  # not each process the same ones

    study.ask()  # as a search leaves it that is killed
    run_trials(objectives.draw, study, trials=6)
    assert states(study)[4:] == ["FAIL", "COMPLETE"]
    run_trials(objectives.draw, study, trials=6)
    assert len(study.trials) == 6


def test_two_trials_run_at_the_same_time(storage, tmp_path):
    (tmp_path / "met").mkdir()
    study = optuna.create_study(storage=storage)
    run_trials(functools.partial(objectives.meet, tmp_path / "met"), study, 2, processes=2)
    assert states(study) == ["COMPLETE", "COMPLETE"]


@pytest.mark.slow
def test_a_killed_search_ends_its_trials(storage, tmp_path):
    study = optuna.create_study(storage=storage, study_name="search")
    code = f"""
import functools, optuna
from kdist.tuning.optuna import run_trials
from tests.tuning import optuna_objectives as objectives
if __name__ == "__main__":
    study = optuna.load_study(study_name="search", storage={storage!r})
    run_trials(functools.partial(objectives.meet, {str(tmp_path / "met")!r}), study, trials=1)
"""
    (tmp_path / "met").mkdir()
    search = subprocess.Popen([sys.executable, "-c", code])
    while not (pids := list((tmp_path / "met").glob("*"))):
        assert search.poll() is None
        time.sleep(0.05)
    search.kill()
    search.wait()
    trial = psutil.Process(int(pids[0].name))
    while trial.is_running() and trial.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    run_trials(objectives.draw, study, trials=1)
    assert states(study) == ["FAIL"]


def test_an_exception_fails_the_trial(storage, caplog):
    study = optuna.create_study(storage=storage)
    run_trials(objectives.fail, study, trials=1)
    assert states(study) == ["FAIL"]
    assert "exit code 1" in caplog.text


def test_a_signal_without_a_name_fails_the_trial(storage, caplog):
    study = optuna.create_study(storage=storage)
    number = signal.SIGRTMIN + 3
    run_trials(functools.partial(objectives.end_by, number), study, trials=1)
    assert states(study) == ["FAIL"]
    assert f"signal {number}" in caplog.text


def test_no_trial_starts_after_the_timeout(storage):
    study = optuna.create_study(storage=storage)
    run_trials(objectives.draw, study, trials=4, timeout_s=0)
    assert not study.trials


@pytest.mark.parametrize("url", [None, "sqlite://", "sqlite:///:memory:"])
def test_refuses_a_study_in_memory(url):
    with pytest.raises(ValueError, match="load_if_exists"):
        run_trials(objectives.draw, optuna.create_study(storage=url), trials=1)


def test_refuses_what_a_process_cannot_import(storage):
    study = optuna.create_study(storage=storage)
    with pytest.raises(TypeError, match="lambda"):
        run_trials(lambda trial: 1.0, study, trials=1)
    with pytest.raises(ValueError, match="processes=0"):
        run_trials(objectives.draw, study, trials=1, processes=0)


def fit(strategy, trial, **options):
    """Trains a model that learns nothing, for up to five epochs."""
    with strategy.scope():
        inputs = keras.Input((2,))
        outputs = keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
        model = kdist.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    pruning = PruningCallback(trial, **options)
    model.fit(x, y, batch_size=8, epochs=5, verbose=0, callbacks=[pruning])


def test_a_bad_trial_ends_before_its_last_epoch(mirrored):
    pruner = optuna.pruners.ThresholdPruner(upper=0.5, n_warmup_steps=1)
    study = optuna.create_study(pruner=pruner)
    trial = study.ask()
    with pytest.raises(optuna.TrialPruned, match="loss"):
        fit(mirrored, trial, monitor="loss")
    assert study.trials[0].intermediate_values == {0: 1.0, 1: 1.0}


def test_a_good_trial_reports_all_epochs(mirrored):
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=2.0))
    fit(mirrored, study.ask(), monitor="loss")
    assert len(study.trials[0].intermediate_values) == 5


def test_a_missing_metric_names_the_logs(mirrored):
    with pytest.raises(ValueError, match="contain loss"):
        fit(mirrored, optuna.create_study().ask())


def test_pruning_refuses_several_workers(mirrored, monkeypatch):
    monkeypatch.setattr("kdist.tuning.optuna.pruning.num_workers", lambda strategy: 2)
    with pytest.raises(ValueError, match="2 workers"):
        fit(mirrored, optuna.create_study().ask())
