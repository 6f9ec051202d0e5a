"""Searches for settings of a training on this machine.

    tuned = kdist.tuning.Tuned.load("tuned.json")  # of kdist tune --output=tuned.json
    strategy = kdist.create_strategy(tuned)

Names are imported on first use.
"""

from kdist.public_names import import_on_demand

_PUBLIC = {
    "NoiseScale": "noise_scale",
    "Tuned": "settings",
    "gradient_noise_scale": "noise_scale",
}

__all__ = sorted(_PUBLIC)


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return sorted(__all__)
