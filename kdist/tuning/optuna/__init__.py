"""Searches with Optuna: trials in processes of their own, and pruning of Keras trainings.

    from kdist.tuning.optuna import PruningCallback, run_trials

    storage = "sqlite:///search.db"
    study = optuna.create_study(storage=storage, study_name="lenet", load_if_exists=True)
    run_trials(objective, study, trials=20)

Needs `pip install 'kdist[optuna]'`. Names are imported on first use, and `run_trials` imports no
TensorFlow.
"""

from kdist.public_names import import_on_demand

_PUBLIC = {"PruningCallback": "pruning", "run_trials": "trials"}

__all__ = sorted(_PUBLIC)


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return sorted(__all__)
