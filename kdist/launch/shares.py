"""What each task of this machine gets of its GPUs and of its cores.

    gpus = share_gpus(everyone, find_gpus(os.environ))      # {"worker 0": "0,1", "ps 0": "", …}
    threads = share_threads(everyone, os.environ)           # {"TF_NUM_INTRAOP_THREADS": "4", …}

The tasks that compute share them evenly: workers, and a chief that trains. A parameter server, a
coordinator and an evaluator get no GPU.
"""

import os
from collections.abc import Mapping, Sequence

from kdist.cluster import Cluster

VISIBLE = "CUDA_VISIBLE_DEVICES"

# Cores of this task; `kdist.devices` shares them among logical devices.
CORES = "KDIST_CORES"
_INTRA = "TF_NUM_INTRAOP_THREADS"
_THREADS = (_INTRA, "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, else all that NVIDIA's driver knows.

    Returns:
        Their names as CUDA_VISIBLE_DEVICES takes them: numbers, or UUIDs if it has those.
    """
    if VISIBLE not in environment:
        return [str(number) for number in range(_count_by_nvml())]
    found = []
    for name in environment[VISIBLE].split(","):
        if not name.strip() or name.strip().startswith("-"):
            break  # CUDA sees none from there on
        found.append(name.strip())
    return found


def share_gpus(
    tasks: Sequence[Cluster], gpus: Sequence[str], several_on_one: bool = False
) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for each task, by its name; equal numbers, so that some may stay idle.

    Where there are no GPUs, a task that computes is not in it.

    Args:
        tasks: all of the job.
        gpus: those to share.
        several_on_one: where there are more tasks than GPUs, whether they take turns.

    Raises:
        ValueError: there are more tasks than GPUs, and they do not share one.
    """
    takers = [task.name for task in tasks if computes(task)]
    given = {task.name: "" for task in tasks if not computes(task)}
    each = len(gpus) // len(takers)
    if gpus and not each and not several_on_one:
        raise ValueError(
            f"{len(takers)} tasks compute, and there are {len(gpus)} GPUs ({', '.join(gpus)}); "
            "take fewer --workers, --share_gpus to let several tasks use one, or hide them to "
            f"compute on the CPU ({VISIBLE}=-1)"
        )
    for number, name in enumerate(takers if gpus else ()):
        some = gpus[number * each : (number + 1) * each] or [gpus[number % len(gpus)]]
        given[name] = ",".join(some)
    return given


def share_threads(tasks: Sequence[Cluster], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that give each task its part of the cores, at least one; the same for all tasks.

    What the user has set is not among them.
    """
    takers = [task for task in tasks if computes(task) or task.role == "evaluator"]
    each = str(max(1, cores(environment) // len(takers)))
    # Those that a launcher has set, for a task that launches a job itself, are shared on.
    of_launcher = CORES in environment
    shared = {name: each for name in _THREADS if of_launcher or name not in environment}
    # It says as well that the number of threads is nobody's wish.
    return {**shared, CORES: each} if _INTRA in shared else shared


def computes(task: Cluster) -> bool:
    """Whether it computes gradients: workers do, and a chief that is no coordinator."""
    return task.role == "worker" or (task.role == "chief" and "ps" not in task.tasks)


def _count_by_nvml():
    """How many GPUs the driver knows; 0 without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()


def cores(environment: Mapping[str, str]) -> int:
    """CPU cores that this process may run on; under the launcher, its part of them."""
    if CORES in environment:
        return int(environment[CORES])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
