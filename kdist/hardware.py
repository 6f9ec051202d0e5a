"""GPUs and CPU cores of this host that this process may use; imports no TensorFlow."""

import contextlib
import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# Set by the launcher: cores of this task, which `kdist.devices` divides among logical devices.
CORES_VARIABLE = "KDIST_CORES"

# With 256 logical CPU devices TensorFlow starts in 3 seconds, with 1,024 in half a minute.
_MAX_DEVICES = 256


def parse_devices(request: int | Sequence[str] | None) -> int | tuple[str, ...] | None:
    """Returns a number of devices, or their names as "GPU:0"; see `kdist.devices.find_devices`.

    Raises:
        ValueError: a number is too small or too large, or a name is invalid or given twice.
    """
    if request is None:
        return None
    if isinstance(request, int):
        if not 1 <= request <= _MAX_DEVICES:
            raise ValueError(
                f"--num_devices (devices=) must be at least 1 and at most {_MAX_DEVICES} per "
                f"process, got {request}"
            )
        return request
    names = tuple(map(_device_name, request))
    if not names:
        raise ValueError("the list of devices is empty; name at least one, or leave it out for all")
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(f"named twice: {', '.join(sorted(duplicates))}; name each device once")
    if len({name.split(":")[0] for name in names}) > 1:
        raise ValueError(f"{', '.join(names)}: replicas must be on devices of one kind, GPU or CPU")
    return names


def _device_name(text):
    match = re.fullmatch(r"(?:/?device:|/)?(CPU|GPU):([0-9]{1,9})", str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a device name; write it as 'GPU:0' or 'CPU:1'")
    if int(match[2]) >= _MAX_DEVICES:
        raise ValueError(f"{text}: devices are numbered from 0 to {_MAX_DEVICES - 1}")
    return f"{match[1].upper()}:{int(match[2])}"


def has_tpu(environment: Mapping[str, str]) -> bool:
    """Returns whether this machine has a TPU, or variables name one; it may not answer."""
    if any(environment.get(name) for name in ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")):
        return True
    # Devices of Google's drivers: older ones, and those of TPU v5 and later.
    return any(any(pathlib.Path("/dev").glob(files)) for files in ("accel*", "vfio/[0-9]*"))


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
    return _by_nvml(lambda nvml: nvml.nvmlDeviceGetCount(), 0)


def _by_nvml(read, without_driver):
    """Returns `read(pynvml)`, or `without_driver`."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return without_driver
    try:
        return read(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _name_gpus(nvml):
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]


def describe_processors() -> str:
    """Returns the CPU's model and instruction sets, and the models of the GPUs.

    Machines with the same description run the same machine code.
    """
    cpu = {platform.machine()}
    with contextlib.suppress(OSError):  # not Linux
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu |= {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([*sorted(cpu), *sorted(set(_by_nvml(_name_gpus, [])))])


def count_cores(environment: Mapping[str, str]) -> int:
    """Returns the number of CPU cores of this process; under the launcher, its share of them."""
    if CORES_VARIABLE in environment:
        return int(environment[CORES_VARIABLE])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
