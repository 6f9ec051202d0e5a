"""Ray Tune searches whose trials are run directories.

    def train(config):
        telemetry = kdist.callbacks.Telemetry(kdist.tuning.ray_tune.run_directory())
        report = TuneReportCheckpointCallback(checkpoint_on=[])
        model.fit(data, validation_data=test, callbacks=[telemetry, report])

    record = kdist.tuning.ray_tune.RecordTrials("val_accuracy", "max")
    tune.Tuner(train, run_config=tune.RunConfig("digits", callbacks=[record])).fit()

Ray starts the trials, gives them their share of a cluster, and continues a search that was killed.
"""

import pathlib

import numpy as np

from kdist.run_directory import RunDirectory

try:
    import pyarrow.fs
    from ray import tune
except ImportError as error:
    raise ImportError(
        f"kdist.tuning.ray_tune needs Ray Tune: pip install 'kdist[ray_tune]' ({error})"
    ) from error

__all__ = ["RecordTrials", "run_directory"]


def run_directory() -> pathlib.Path:
    """Returns the run directory of the trial that calls it.

    It remains the same if the trial runs again. The working directory of a trial is another one, on
    its machine.

    Returns:
        Ray's directory of the trial in the storage of the search, `STORAGE_PATH/NAME/TRIAL`.

    Raises:
        ValueError: If the storage is not a file system that all machines share, but a bucket.

    Example:

        def train(config):
            run = kdist.tuning.ray_tune.run_directory()
            model.fit(data, callbacks=[kdist.callbacks.Telemetry(run)])
    """
    return _path(tune.get_context().get_storage())


class RecordTrials(tune.Callback):
    """Records parameters and result of each trial in its run directory.

    `kdist report STORAGE_PATH/NAME` then compares the trials. A trial that a scheduler stopped
    counts with its last result, as in `ResultGrid.get_best_result`.

    Args:
        metric: name of the reported metric to compare by.
        mode: `"min"` or `"max"`.

    Raises:
        ValueError: If the mode is another one, or when a search starts whose storage is a bucket.

    Example:

        record = kdist.tuning.ray_tune.RecordTrials("val_accuracy", "max")
        run_config = tune.RunConfig("digits", storage_path="/shared/runs", callbacks=[record])
        tune.Tuner(train, param_space=space, run_config=run_config).fit()
    """

    def __init__(self, metric: str, mode: str):
        if mode not in ("min", "max"):
            raise ValueError(f'RecordTrials: mode={mode!r} must be "min" or "max"')
        self._metric, self._mode = metric, mode

    def on_trial_start(self, iteration, trials, trial, **info):
        _path(trial.storage)  # refuses a bucket before anything runs

    def on_trial_complete(self, iteration, trials, trial, **info):
        last = trial.metric_analysis.get(self._metric, {}).get("last")
        self._record(trial, "complete", None if last is None else float(last))

    def on_trial_error(self, iteration, trials, trial, **info):
        self._record(trial, "fail", None)

    def _record(self, trial, state, value):
        facts = {
            "name": trial.experiment_dir_name,
            "trial": trial.trial_id,
            "state": state,
            "parameters": {key: _plain(value) for key, value in trial.evaluated_params.items()},
            "objective": self._metric,
            "direction": f"{self._mode}imize",
            "value": value,
        }
        # A trial that a scheduler has stopped has not ended its telemetry.
        results = {self._metric: value} if state == "complete" else None
        RunDirectory(_path(trial.storage)).record_trial(facts, results)


def _plain(value):
    """Returns a parameter as JSON has it, and other objects as text."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | int | float | None) else str(value)


def _path(storage):
    """Returns the directory of a trial, by Ray's description of its storage."""
    if not isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        raise ValueError(
            f"the storage of the search, {storage.storage_fs_path}, is not a directory; for run "
            "directories, give RunConfig a storage_path in a file system that all machines share"
        )
    return pathlib.Path(storage.trial_fs_path)
