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

# Name of an engine, and of its module -> class.
ENGINES = {
    "slurm": "Slurm",
    "kubernetes": "Kubernetes",
    "gce": "ComputeEngine",
    "skypilot": "SkyPilot",
    "ray": "Ray",
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
    return getattr(importlib.import_module(f"{__name__}.{name}"), ENGINES[name])()
