"""What is known of machines and models before anything runs.

Nothing here imports TensorFlow, but for `read_workload`, when it is asked for.
"""

from kdist.planner.gpus import Gpu, find_gpu, known_gpus
from kdist.planner.workload import LayerWork, Workload

__all__ = ["Gpu", "LayerWork", "Workload", "find_gpu", "known_gpus", "read_workload"]


def __getattr__(name):
    if name == "read_workload":
        from kdist.planner.reading import read_workload

        return read_workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
