"""Searches for settings of a training on this machine.

    tuned = kdist.tuning.Tuned.load("tuned.json")  # of kdist tune --output=tuned.json
    strategy = kdist.create_strategy(tuned)

    study = optuna.create_study(direction="maximize")
    kdist.tuning.optuna.optimize(study, objective, "runs/search", num_trials=40, workers=2)

Public names are imported on first use, since some need a package of their own.
"""

from kdist.public_names import import_on_demand

_PUBLIC = {
    "NoiseScale": "noise_scale",
    "Tuned": "settings",
    "gradient_noise_scale": "noise_scale",
    "keras_tuner": "keras_tuner",
    "optuna": "optuna",
    "ray_tune": "ray_tune",
}

__all__ = sorted(_PUBLIC)


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return sorted(__all__)
