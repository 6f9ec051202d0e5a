"""Planner: predicts time, memory, and price of a training, and recommends a plan.

Nothing here imports TensorFlow, except `read_workload` when it is called.
"""

from kdist.public_names import import_on_demand

# Name -> the module that holds it.
_MODULES = {
    "Constraints": "selection.constraints",
    "Gpu": "tables.gpus",
    "InputWork": "cost.setup",
    "Job": "plans",
    "LayerWork": "workload.layers",
    "Machine": "tables.machines",
    "Measurements": "measurements",
    "Offer": "tables.prices",
    "Plan": "plans",
    "Predictor": "selection.prediction",
    "RankedPlans": "planning",
    "Spot": "cost.step",
    "Workload": "workload.layers",
    "DataWorkerOption": "selection.data_workers",
    "extrapolate_seconds": "cost.compute",
    "find_data_workers": "selection.data_workers",
    "find_gpu": "tables.gpus",
    "known_gpus": "tables.gpus",
    "known_machines": "tables.machines",
    "known_offers": "tables.prices",
    "known_workload": "workload.layers",
    "known_workloads": "workload.layers",
    "make_measurement": "selection.prediction",
    "make_offers": "planning",
    "plan": "planning",
    "read_machines": "tables.machines",
    "read_catalog": "tables.catalog",
    "read_offers": "tables.prices",
    "read_workload": "workload.reading",
    "resolve_workload": "planning",
    "search": "planning",
    "select_offers": "planning",
    "write_offers": "tables.prices",
}

__all__ = sorted(_MODULES)

# Deprecated name -> the name that replaces it.
_RENAMED = {
    "Found": "RankedPlans",
    "Layout": "kdist.Layout",
    "Limits": "Constraints",
    "Planned": "RankedPlans",
    "choose": "select_offers",
    "learned": "make_measurement",
    "own_offers": "make_offers",
    "scaled_seconds": "extrapolate_seconds",
    "workload_of": "resolve_workload",
}

__getattr__ = import_on_demand(__name__, _MODULES, _RENAMED)


def __dir__():
    return __all__
