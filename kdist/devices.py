"""Devices of this process, configured before TensorFlow starts.

    names = find_devices()                # all GPUs, or the CPU if there is none
    names = find_devices(2)               # two GPUs, or two logical CPU devices
    names = find_devices(["GPU:1"])       # only this one

Logical devices and memory growth can be set only before TensorFlow runs its first operation. An
error reports what can no longer be set.
"""

import logging
import os
from collections.abc import Sequence

import tensorflow as tf

from kdist.hardware import CORES_VARIABLE, count_cores, parse_devices

_logger = logging.getLogger(__name__)


def find_devices(request: int | Sequence[str] | None = None) -> tuple[str, ...]:
    """Configures the devices to compute on: memory growth of GPUs, logical CPU devices.

    Example:

        names = kdist.devices.find_devices(2)    # ("GPU:0", "GPU:1") or ("CPU:0", "CPU:1")

    Args:
        request: Number of devices, or their names (`"GPU:0"`, `"CPU:1"`, `"/gpu:0"`). A number
            means GPUs if the machine has any. Otherwise it divides the CPU into that many logical
            devices, which use one core each if there are at least as many as cores. Defaults to all
            GPUs, or one CPU if there is no GPU.

    Returns:
        Names such as `("GPU:0", "GPU:1")`.

    Raises:
        ValueError: If fewer devices exist, or a name is invalid or given twice.
        RuntimeError: If TensorFlow has already started with fewer logical CPU devices.
    """
    names = parse_devices(request)
    _enable_memory_growth()
    gpus = _gpu_names()
    if names is None:
        return gpus or ("CPU:0",)
    if isinstance(names, int):
        return _take_gpus(names, gpus) if gpus else _take_cpus(names)
    wanted_cpus = [int(name.split(":")[1]) for name in names if name.startswith("CPU:")]
    if wanted_cpus:
        _take_cpus(max(wanted_cpus) + 1)
    missing = [name for name in names if name.startswith("GPU:") and name not in gpus]
    if missing:
        raise ValueError(f"no such device: {', '.join(missing)}. {_available_text(gpus)}")
    return names


def set_intra_op_threads(number: int):
    """Sets the threads of one operation on the CPU; logs a warning if TensorFlow has started."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(number)
    except RuntimeError:
        _logger.warning(
            "intra_op_threads=%d has no effect, since TensorFlow has already started with %s; "
            "create the strategy before anything else uses TensorFlow",
            number,
            tf.config.threading.get_intra_op_parallelism_threads() or "all cores",
        )


def _available_text(gpus):
    if gpus:
        return f"TensorFlow sees {len(gpus)} GPU(s): {', '.join(gpus)}"
    return (
        "TensorFlow sees no GPU; request CPU devices (--num_devices=N), or run `kdist check` to "
        "see what TensorFlow finds"
    )


def _take_gpus(number, gpus):
    if number > len(gpus):
        raise ValueError(
            f"{number} devices requested. {_available_text(gpus)}; request at most {len(gpus)}, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to train on logical CPU devices"
        )
    return gpus[:number]


def _take_cpus(number):
    """Returns the first `number` logical CPU devices, created before TensorFlow starts."""
    physical = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(physical)
    if len(configured or ()) < number:
        try:
            tf.config.set_logical_device_configuration(
                physical, [tf.config.LogicalDeviceConfiguration()] * number
            )
            _share_cores(number)
        except RuntimeError as error:
            existing = len(tf.config.list_logical_devices("CPU"))
            if existing >= number:
                return _numbered("CPU", number)
            raise RuntimeError(
                f"{number} CPU devices requested, but TensorFlow has already started with "
                f"{existing}, and their number can no longer change. Create the strategy, or call "
                f"kdist.devices.find_devices({number}), before anything else uses TensorFlow, such "
                f"as a model (in a notebook: restart the kernel); or request {existing}"
            ) from error
    return _numbered("CPU", number)


def _share_cores(devices):
    """Limits each operation to one core if there are no more cores than devices.

    All CPU devices share TensorFlow's thread pool, and each would split its operations over all
    threads. A value that the user has set stays. One that the launcher has set is only this task's
    share of the cores.
    """
    is_set = bool(tf.config.threading.get_intra_op_parallelism_threads())
    is_set |= "TF_NUM_INTRAOP_THREADS" in os.environ and CORES_VARIABLE not in os.environ
    if not is_set and devices >= count_cores(os.environ):
        tf.config.threading.set_intra_op_parallelism_threads(1)


def _enable_memory_growth():
    """Allocates GPU memory as needed, so that other processes can use the GPU as well."""
    for gpu in tf.config.list_physical_devices("GPU"):
        if tf.config.get_logical_device_configuration(gpu):
            continue  # Logical GPUs have a memory limit instead, and TensorFlow rejects both.
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except (RuntimeError, ValueError) as error:
            _logger.warning("memory growth of %s stays as configured before: %s", gpu.name, error)


def _gpu_names():
    """Returns all GPUs. TensorFlow numbers logical GPUs through, in the order of the GPUs."""
    configured = map(
        tf.config.get_logical_device_configuration, tf.config.list_physical_devices("GPU")
    )
    return _numbered("GPU", sum(len(logical or (None,)) for logical in configured))


def _numbered(kind, number):
    return tuple(f"{kind}:{index}" for index in range(number))
