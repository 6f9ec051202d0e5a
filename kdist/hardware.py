"""GPUs and CPU cores of this host that this process may use; imports no TensorFlow."""

import os
from collections.abc import Mapping

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# Set by the launcher: cores of this task, which `kdist.devices` divides among logical devices.
CORES_VARIABLE = "KDIST_CORES"


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs of NVIDIA's driver if it is not set.

    Returns:
        Indices or UUIDs, in the format of CUDA_VISIBLE_DEVICES.
    """
    if VISIBLE_DEVICES not in environment:
        return [str(index) for index in range(_count_by_nvml())]
    gpus = []
    for name in environment[VISIBLE_DEVICES].split(","):
        if not name.strip() or name.strip().startswith("-"):
            break  # CUDA ignores the rest
        gpus.append(name.strip())
    return gpus


def _count_by_nvml():
    """Returns the number of GPUs that the driver reports; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()


def count_cores(environment: Mapping[str, str]) -> int:
    """Returns the number of CPU cores of this process; under the launcher, its share of them."""
    if CORES_VARIABLE in environment:
        return int(environment[CORES_VARIABLE])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
