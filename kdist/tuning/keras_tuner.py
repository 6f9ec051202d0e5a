"""KerasTuner searches whose trials are run directories.

    tuner = keras_tuner.RandomSearch(build, "val_accuracy", directory="runs", project_name="digits")
    kdist.tuning.keras_tuner.record_trials(tuner)
    tuner.search(train, validation_data=test, epochs=10)

KerasTuner itself trains models under a strategy of kdist (`distribution_strategy=…`), shares trials
out to several processes, and continues a search that was killed.
"""

from typing import Any

from kdist.callbacks.telemetry import Telemetry
from kdist.run_directory import RunDirectory

__all__ = ["record_trials"]


def record_trials(tuner: Any, **telemetry_options: Any) -> None:
    """Records each trial of a tuner in KerasTuner's directory of the trial.

    The directory becomes a run directory with telemetry, parameters, and result, so that
    `kdist report DIRECTORY/PROJECT_NAME` compares the trials. Call it before `search`. With
    several executions per trial, one follows the other in the curves.

    Args:
        tuner: a `keras_tuner.Tuner` whose trials call `fit` with the given callbacks, as those of
            KerasTuner do.
        telemetry_options: options of `kdist.callbacks.Telemetry`, such as `wandb_mode="auto"`.

    Example:

        tuner = keras_tuner.Hyperband(build, "val_accuracy", max_epochs=9, project_name="digits")
        kdist.tuning.keras_tuner.record_trials(tuner)
        tuner.search(train, validation_data=test)
    """
    run_trial, on_trial_end = tuner.run_trial, tuner.on_trial_end

    def run_of(trial):
        return RunDirectory(tuner.get_trial_dir(trial.trial_id))

    def run_recorded(trial, *arguments, callbacks=(), **options):
        telemetry = Telemetry(run_of(trial), **telemetry_options)
        return run_trial(trial, *arguments, callbacks=[*callbacks, telemetry], **options)

    def end_recorded(trial):
        on_trial_end(trial)
        _record(run_of(trial), tuner, tuner.oracle.get_trial(trial.trial_id))

    tuner.run_trial, tuner.on_trial_end = run_recorded, end_recorded


def _record(run, tuner, trial):
    """Writes parameters and result to the run directory, where the report finds them."""
    objective = tuner.oracle.objective
    is_complete = trial.status == "COMPLETED"
    facts = {
        "name": tuner.project_name,
        "trial": trial.trial_id,
        "state": "complete" if is_complete else trial.status.lower(),
        "parameters": trial.hyperparameters.values,
        "objective": objective.name,
        "direction": f"{objective.direction}imize",
        "value": trial.score,
    }
    run.record_trial(facts)
