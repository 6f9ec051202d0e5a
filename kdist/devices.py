"""Which devices this process has: the first thing in a run that touches TensorFlow's settings.

    names = find_devices()                # every GPU, or the CPU where there is none
    names = find_devices(2)               # two GPUs, or two logical CPU devices
    names = find_devices(["GPU:1"])       # just this one

Logical devices and memory growth can be set only before TensorFlow runs its first operation.
What can no longer be set is said, with what to do about it.
"""

import os
import re
import sys
from collections.abc import Sequence

import tensorflow as tf

from kdist.launch.shares import CORES, cores


def find_devices(request: int | Sequence[str] | None = None) -> tuple[str, ...]:
    """The devices to compute on, made ready: GPUs grow their memory, logical CPUs exist.

    Args:
        request: a number of devices, their names (`"GPU:0"`, `"CPU:1"`, `"/gpu:0"`), or None for
            all GPUs, or one CPU where there is no GPU. A number takes GPUs if the machine has
            any, else it divides the CPU into that many logical devices; as many as there are
            cores, or more, compute with one core each.

    Returns:
        Names such as `("GPU:0", "GPU:1")`.

    Raises:
        ValueError: there are fewer such devices, a name is no device's, or one is named twice.
        RuntimeError: TensorFlow already runs with fewer logical CPU devices.
    """
    _let_gpu_memory_grow()
    gpus = _physical_names("GPU")
    if request is None:
        return gpus or ("CPU:0",)
    if isinstance(request, int):
        return _take_gpus(request, gpus) if gpus else _take_cpus(_at_least_one(request))
    names = tuple(_device_name(name) for name in request)
    _check_distinct(names)
    wanted_cpus = [int(name.split(":")[1]) for name in names if name.startswith("CPU:")]
    if wanted_cpus:
        _take_cpus(max(wanted_cpus) + 1)
    missing = [name for name in names if name.startswith("GPU:") and name not in gpus]
    if missing:
        raise ValueError(f"no such device: {', '.join(missing)}. {_what_there_is(gpus)}")
    return names


def _what_there_is(gpus):
    if gpus:
        return f"TensorFlow sees {len(gpus)} GPU(s): {', '.join(gpus)}"
    return (
        "TensorFlow sees no GPU here; ask for CPU devices (--num_devices=N), or see "
        "`scripts/check.py` for what TensorFlow finds"
    )


def _at_least_one(number):
    if number < 1:
        raise ValueError(f"--num_devices (devices=) must be at least 1, got {number}")
    return number


def _take_gpus(number, gpus):
    if _at_least_one(number) > len(gpus):
        raise ValueError(
            f"{number} devices asked for. {_what_there_is(gpus)}; ask for at most {len(gpus)}, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to train on logical CPU devices"
        )
    return gpus[:number]


def _take_cpus(number):
    """The first `number` logical CPU devices, made if TensorFlow's context still allows it."""
    physical = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(physical)
    if len(configured or ()) < number:
        try:
            tf.config.set_logical_device_configuration(
                physical, [tf.config.LogicalDeviceConfiguration()] * number
            )
            _share_cores(number)
        except RuntimeError as error:
            there_are = len(tf.config.list_logical_devices("CPU"))
            if there_are >= number:
                return _numbered("CPU", number)
            raise RuntimeError(
                f"{number} CPU devices asked for, but TensorFlow has already started with "
                f"{there_are}, and their number is fixed from then on. Create the strategy before "
                "anything else runs on TensorFlow (in a notebook: restart the kernel), or ask for "
                f"{there_are}"
            ) from error
    return _numbered("CPU", number)


def _share_cores(devices):
    """Lets each operation have one core, where there are no more cores than devices.

    All CPU devices share TensorFlow's one pool of threads, and each of them would cut its
    operations up for the whole of it. What the user has set stays; what the launcher has, is this
    task's part of the cores, and no wish.
    """
    is_set = bool(tf.config.threading.get_intra_op_parallelism_threads())
    is_set |= "TF_NUM_INTRAOP_THREADS" in os.environ and CORES not in os.environ
    if not is_set and devices >= _cores():
        tf.config.threading.set_intra_op_parallelism_threads(1)


def _cores():
    return cores(os.environ)


def _let_gpu_memory_grow():
    """Takes GPU memory as needed, so that one process does not lock out all others."""
    for gpu in tf.config.list_physical_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except (RuntimeError, ValueError) as error:
            print(
                f"kdist: GPU memory of {gpu.name} is as it was set before: {error}", file=sys.stderr
            )


def _physical_names(kind):
    return _numbered(kind, len(tf.config.list_physical_devices(kind)))


def _numbered(kind, number):
    return tuple(f"{kind}:{index}" for index in range(number))


def _device_name(text):
    match = re.fullmatch(r"(?:/?device:|/)?(CPU|GPU):(\d+)", str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} names no device; write it as 'GPU:0' or 'CPU:1'")
    return f"{match[1].upper()}:{int(match[2])}"


def _check_distinct(names):
    if not names:
        raise ValueError("an empty list of devices; name at least one, or leave it out for all")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"named twice: {', '.join(sorted(twice))}; name each device once")
    if len({name.split(":")[0] for name in names}) > 1:
        raise ValueError(f"{', '.join(names)}: replicas run on devices of one kind, GPU or CPU")
