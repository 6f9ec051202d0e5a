"""What is known of machines and models before anything runs, and plans made of it.

Nothing here imports TensorFlow, but for `read_workload`, when it is asked for.
"""

import importlib

# Public name -> the module that holds it.
_PUBLIC = {
    "Found": "searching",
    "Gpu": "gpus",
    "InputWork": "cost.setup",
    "Job": "job",
    "Layout": "plans",
    "LayerWork": "workload",
    "Limits": "limits",
    "Machine": "machines",
    "Measurements": "measurements",
    "Offer": "prices",
    "Plan": "plans",
    "Planned": "planning",
    "Predictor": "predicting",
    "Workload": "workload",
    "check_trainings": "time_to_accuracy",
    "choose": "planning",
    "find_gpu": "gpus",
    "known_gpus": "gpus",
    "known_machines": "machines",
    "known_offers": "prices",
    "known_workload": "known",
    "known_workloads": "known",
    "learned": "predicting",
    "own_offers": "planning",
    "plan": "planning",
    "read_machines": "machines",
    "read_offers": "prices",
    "read_workload": "reading",
    "scaled_seconds": "cost.compute",
    "search": "searching",
    "trainings_text": "time_to_accuracy",
    "validate": "validation",
    "workload_of": "planning",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
