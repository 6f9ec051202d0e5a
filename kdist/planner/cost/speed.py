"""What a GPU reaches in one precision, from its data sheet."""

import dataclasses

from kdist.planner.cost.compute_constants import ComputeConstants
from kdist.planner.gpus import Gpu

# Before Pascal memory was GDDR5, whose error correction takes a fifth of its bandwidth.
_ECC_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Speed:
    """A GPU in one precision.

    Attributes:
        peak: FLOP/s.
        bandwidth: of its memory, bytes/s.
        byte_share: of the bytes that float32 moves.
        convolution: share of the peak that convolutions reach.
        matmul: share of the peak that matrix products reach.
    """

    peak: float
    bandwidth: float
    byte_share: float
    convolution: float
    matmul: float


def speed_of(gpu: Gpu, precision: str, c: ComputeConstants) -> Speed:
    """The speed of a GPU in one precision.

    Where the table has no more operations a second for 16 bits than for 32 though there are tensor
    cores, it has those of the ordinary cores; tensor cores that add up in float32 do twice as many
    (RTX 3090: 71 TFLOP/s; NVIDIA, "Ampere GA102 GPU Architecture", table 2).

    Args:
        gpu: the device.
        precision: a Keras dtype policy; without tensor cores for it, 16 bits count as float32.
        c: the shares of peaks that are reached.

    Raises:
        ValueError: the GPU's peak or bandwidth is not known.
    """
    if not gpu.float32_tflops or not gpu.bandwidth_gb_s:
        missing = "peak" if gpu.bandwidth_gb_s else "bandwidth of the memory"
        raise ValueError(
            f"the {missing} of the GPU {gpu.name!r} is not known, without which its time cannot be "
            "told; give a measured step, or take another GPU"
        )
    bandwidth = gpu.bandwidth_gb_s * 1e9
    wanted = gpu.peak_flops(precision) if precision.endswith("float16") else None
    if wanted and gpu.fp16_tensor_cores:
        fast = wanted if wanted > gpu.float32_tflops * 1e12 else 2 * wanted
        return Speed(fast, bandwidth, 0.5, c.convolution_16_bit, c.matmul_tensor_cores)
    peak = (gpu.tf32_tflops or gpu.float32_tflops) * 1e12
    if gpu.tf32_tflops:
        return Speed(peak, bandwidth, 1.0, c.convolution_tf32, c.matmul_tensor_cores)
    old = gpu.float16_tflops is None
    slower, share = (c.before_pascal, _ECC_SHARE) if old else (1.0, 1.0)
    convolution, matmul = c.convolution_float32 * slower, c.matmul_float32 * slower
    return Speed(peak, bandwidth * share, 1.0, convolution, matmul)
