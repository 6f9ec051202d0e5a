"""Starts the tasks of a job on this machine, from a terminal or from a notebook.

    kdist launch --workers=2 -- my_script.py

    result = kdist.launch.local(function, workers=2)    # calls function() in each task
    result = kdist.launch.on("ray", function, workers=2)    # on a Ray cluster

A `Task` is one process. A `TaskGroup` starts and ends the tasks of a job together. `local_engine`
creates the group for this machine: addresses, GPUs, threads. Nothing here imports TensorFlow.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdist.launch.function_job import TaskFailed, local, on

__all__ = ["TaskFailed", "local", "on"]


def __getattr__(name):
    # Imported on demand, because each task runs `python -m kdist.launch.function_job`.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kdist.launch import function_job

    return getattr(function_job, name)
