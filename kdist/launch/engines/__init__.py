"""Engines that start the tasks of a job on other machines: Slurm, Kubernetes, and others.

    engine = get_engine("slurm")
    job = Job("cats", ("train.py", "--epochs=3"), workers=4, options={"partition": "gpu"})
    print(engine.text(job))
    handle = engine.submit(job)        # later, from elsewhere: engine.find("cats")
    handle.follow(print)

kdist has no engine of its own. Each module here writes the file that an engine reads, and calls the
engine's own command line, with the user's own account. Nothing here imports TensorFlow.
"""

import importlib

from kdist.launch.engines.base import (
    Cost,
    Engine,
    EngineJob,
    Handle,
    Job,
    MachineType,
    NoSuchJobError,
    Saving,
    Status,
)

__all__ = [
    "ENGINES",
    "Cost",
    "Engine",
    "EngineJob",
    "Handle",
    "Job",
    "MachineType",
    "NoSuchJobError",
    "Saving",
    "Status",
    "get_engine",
]

# Name -> module and class.
ENGINES = {
    "slurm": ("slurm", "Slurm"),
    "kubernetes": ("kubernetes", "Kubernetes"),
    "gce": ("gce", "ComputeEngine"),
    "skypilot": ("skypilot", "SkyPilot"),
    "ray": ("ray", "Ray"),
}


def get_engine(name: str) -> Engine:
    """Returns the engine with a name.

    Example:

        >>> get_engine("slurm").program
        'sbatch'

    Args:
        name: A name of `ENGINES`.

    Returns:
        The `Engine`.

    Raises:
        ValueError: If there is no such engine.
    """
    if name not in ENGINES:
        raise ValueError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    module, kind = ENGINES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
