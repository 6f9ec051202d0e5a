"""Seconds that a host needs to get the examples of an update ready.

All functions take numbers or NumPy arrays of them, and `constants` as
`kdist.planner.constants.Constants`.
"""

import numpy as np

REFERENCE_MEGAPIXELS = 0.05  # of 224 x 224, where the time of augmentation policies is stated


def core_seconds(work, constants):
    """One core of a PCIe-3 host on one example: decode, resize, augment.

    Args:
        work: with the attributes `source_megapixels`, `model_megapixels`, `policy`, `masks` and
            `dali` (see `InputWork`).
        constants: with the time of each.
    """
    pixels = work.model_megapixels
    policy = (pixels / REFERENCE_MEGAPIXELS) ** constants.policy_exponent * REFERENCE_MEGAPIXELS
    milliseconds = (
        constants.decode_core_ms_per_megapixel * work.source_megapixels
        + constants.resize_core_ms_per_megapixel * pixels
        + constants.policy_core_ms_per_megapixel * work.policy * policy
        + constants.masks_core_ms * work.masks
    )
    return milliseconds * 1e-3 * np.where(work.dali, constants.dali_cpu_share, 1)


def effective_cores(host, processes, constants):
    """Cores of a PCIe-3 host that would prepare input as fast as this host's do.

    A vCPU is less than a core, newer hosts have faster ones, and each Horovod process keeps some
    busy by itself.

    Args:
        host: with the attributes `cores`, `vcpus` and `recent_host`, and `input_threads`, which
            is all that are used of them.
        processes: of Horovod on the node.
        constants: with the weight of each.
    """
    cores = np.minimum(host.cores, host.input_threads) * np.where(
        host.vcpus, constants.cores_per_vcpu, 1
    )
    left = 1 / (1 + constants.horovod_process_cores * processes / cores)
    return cores * left * np.where(host.recent_host, constants.recent_core_speed, 1)


def copy_seconds(bytes_per_example, examples, constants):
    """One process copies the images of all devices of a node to them."""
    return examples * bytes_per_example / (constants.in_graph_copy_gb_s * 1e9)


def numpy_feed_seconds(bytes_per_example, examples, tensors, devices, constants):
    """One Python thread feeds arrays to all devices and starts each device's operations.

    That is what Keras's `multi_gpu_model` did; its variables were read tensor by tensor.
    """
    feed = examples * bytes_per_example * constants.numpy_feed_ns_per_byte * 1e-9
    return feed + devices * tensors * constants.dispatch_ms_per_tensor * 1e-3


def soft_maximum(first, second, exponent):
    """What two things take that run beside each other, a little more than the longer of them.

    (a^p + b^p)^(1/p): now and then the one that is faster on average is late.
    """
    longer = np.maximum(first, second)
    return longer * ((first / longer) ** exponent + (second / longer) ** exponent) ** (1 / exponent)
