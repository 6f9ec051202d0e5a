"""Compute time of one device: forward and backward pass and update, from its data sheet.

    time = compute_seconds(known_workload("resnet50"), find_gpu("V100"), 64, "float32")
    time.seconds, [(term.name, term.seconds) for term in time.terms]

For each kind of layer, arithmetic takes

    (examples × operations + layers × operations lost while a device fills) / (peak × efficiency)

and memory takes (examples × bytes moved × share really moved) / bandwidth; half of these bytes
where tensor cores compute in 16 bits. A large device computes small layers, and the loss in each of
them makes efficiency grow with the batch. The host launches operations one by one while the device
computes, so that the slower of the two counts. This is the roofline model (Williams et al. 2009,
doi:10.1145/1498765.1498785) with efficiencies fitted to published rates.
"""

import dataclasses
import functools

from kdist.planner.cost.constants import ComputeConstants, known_compute_constants
from kdist.planner.cost.sharding import DividedState
from kdist.planner.tables.gpus import Gpu
from kdist.planner.workload.layers import Workload

KINDS = ("convolution", "depthwise", "matmul", "elementwise")
# Both passes read the weights, and gradients are written. An optimizer with two slots then reads
# gradient, weight, and slots, and writes weight and slots.
_WEIGHT_PASSES, _UPDATE_PASSES = 3, 6
# Merging received parts of weights reads and writes them.
_MERGE_PASSES = 2
# Exponent of the smooth maximum of host and device time: 4 adds a fifth if both are equal.
_SHARPNESS = 4
# Before Pascal memory was GDDR5, whose error correction takes a fifth of its bandwidth.
_ECC_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class ComputeTerm:
    """One term of the time of a micro-step.

    Attributes:
        name: Kind of layer, `"weights and update"`, `"launching"`, or `"regions"`.
        seconds: Seconds that it adds.
        peak_share: Fraction of the device's peak that its arithmetic reaches; `None` without
            counted arithmetic.
    """

    name: str
    seconds: float
    peak_share: float | None = None


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Time of a micro-step of one device, and its terms.

    `flops` are the floating-point operations of the micro-step, and `efficiency` is the fraction of
    the device's peak in this precision.
    """

    seconds: float
    terms: tuple[ComputeTerm, ...]
    flops: float
    efficiency: float


def compute_seconds(
    workload: Workload,
    gpu: Gpu,
    local_batch: float,
    precision: str,
    xla: bool = False,
    *,
    accumulate: int = 1,
    constants: ComputeConstants | None = None,
    divided: DividedState | None = None,
) -> ComputeTime:
    """Returns the time of one micro-step on one device, without input and exchange.

    The workload is that of the model in float32. The Keras dtype policy float32 is TF32 if the GPU
    has it. A 16-bit policy without tensor cores for it counts as float32. `accumulate` micro-steps
    share an update. If replicas have `divided` their state, the device updates its own part.

    Raises:
        ValueError: If the batch or `accumulate` is not positive, or the GPU's peak or bandwidth is
            unknown.
    """
    constants = constants or known_compute_constants()
    return micro_step_time(
        work_totals(workload), gpu, local_batch, precision, xla, accumulate, constants, divided
    )


def extrapolate_seconds(
    measured_seconds: float,
    workload: Workload,
    from_gpu: Gpu,
    to_gpu: Gpu,
    from_batch: float,
    to_batch: float,
    from_precision: str,
    to_precision: str,
) -> float:
    """Scales a measured micro-step to another GPU, batch, or precision by predicted times.

    Example:

        work, v100, a100 = known_workload("resnet50"), find_gpu("V100"), find_gpu("A100")
        extrapolate_seconds(0.11, work, v100, a100, 64, 128, "float32", "mixed_float16")

    Args:
        measured_seconds: Seconds measured with the arguments `from_…`.
        workload: Workload of the model in float32.
        from_gpu: Measured GPU.
        to_gpu: Target GPU.
        from_batch: Examples of the measured micro-step.
        to_batch: Examples of the target micro-step.
        from_precision: Measured Keras dtype policy.
        to_precision: Target Keras dtype policy.

    Returns:
        Measured seconds × predicted target seconds / predicted seconds of what was measured.

    Raises:
        ValueError: As in `compute_seconds`, or if the measured time is not above 0.
    """
    if not measured_seconds > 0:
        raise ValueError(f"measured_seconds is above 0, not {measured_seconds}")
    target = compute_seconds(workload, to_gpu, to_batch, to_precision)
    source = compute_seconds(workload, from_gpu, from_batch, from_precision)
    return measured_seconds * target.seconds / source.seconds


def micro_step_time(work, gpu, local_batch, precision, xla, accumulate, constants, divided=None):
    """Returns `compute_seconds` for the result of `work_totals`."""
    if not local_batch > 0 or accumulate < 1:
        raise ValueError(
            f"local_batch={local_batch}, accumulate={accumulate}: use a batch above 0 and an "
            "accumulation from 1 on"
        )
    speed = _speed(gpu, precision, constants)
    terms = [_kind_term(total, speed, local_batch, xla, constants) for total in work.kinds]
    passes = _WEIGHT_PASSES + _UPDATE_PASSES / accumulate
    if divided is not None:
        others = (divided.divided - divided.own) * _UPDATE_PASSES / accumulate
        merged = divided.divided * _MERGE_PASSES * divided.merges(accumulate)
        passes -= (others - merged) / work.parameters
    weights = 4 * work.parameters * passes / speed.bandwidth
    terms.append(ComputeTerm("weights and update", weights))
    busy = sum(term.seconds for term in terms)
    launching = constants.launch_ms_per_layer * 1e-3 * work.layers
    slower = (busy**_SHARPNESS + launching**_SHARPNESS) ** (1 / _SHARPNESS)
    terms.append(ComputeTerm("launching", slower - busy))
    if work.proposes_regions:
        terms.append(ComputeTerm("regions", constants.regions_ms * 1e-3))
    seconds = sum(term.seconds for term in terms)
    flops = work.training_flops * local_batch
    return ComputeTime(seconds, tuple(terms), flops, flops / (seconds * speed.peak))


def _kind_term(total, speed, examples, xla, constants):
    """Returns the term of all layers of one kind."""
    c = constants
    share = c.depthwise_moved_share if total.kind == "depthwise" else c.moved_share
    if total.kind == "elementwise" and xla:
        share *= c.xla_share
    seconds = total.moved_bytes * examples * speed.byte_share * share / speed.bandwidth
    if total.kind in ("elementwise", "depthwise"):
        return ComputeTerm(total.kind, seconds)
    flops = total.flops * examples
    lost = total.layers * c.filling_gflop_per_layer * 1e9
    efficiency = speed.convolution if total.kind == "convolution" else speed.matmul
    seconds += (flops + lost) / (speed.peak * efficiency)
    return ComputeTerm(total.kind, seconds, flops / (seconds * speed.peak))


@dataclasses.dataclass(frozen=True)
class _KindTotals:
    """All layers of one kind for one example, with both passes; bytes are those in float32."""

    kind: str
    layers: int
    flops: float
    moved_bytes: float


@dataclasses.dataclass(frozen=True)
class _WorkTotals:
    """Totals of a workload for one example.

    `proposes_regions` marks two-stage detectors, which select regions without counted arithmetic.
    """

    kinds: tuple[_KindTotals, ...]
    parameters: float
    training_flops: float
    proposes_regions: bool

    @property
    def layers(self) -> int:
        return sum(kind.layers for kind in self.kinds)


@functools.lru_cache(maxsize=256)
def work_totals(workload: Workload) -> _WorkTotals:
    """Returns the totals of a workload by kind of layer."""
    totals = []
    for kind in KINDS:
        layers = [layer for layer in workload.layers if layer.kind == kind]
        if layers:
            flops = sum(layer.forward_flops + layer.backward_flops for layer in layers)
            moved = sum(layer.moved_bytes for layer in layers)
            totals.append(_KindTotals(kind, len(layers), flops, moved))
    regions = any(kind.startswith("NonMaxSuppression") for kind in workload.uncounted)
    return _WorkTotals(tuple(totals), workload.parameters, workload.training_flops, regions)


@dataclasses.dataclass(frozen=True)
class _Speed:
    """Speed of a GPU in one precision.

    Attributes:
        peak: FLOP/s.
        bandwidth: Memory bandwidth in bytes/s.
        byte_share: Fraction of the bytes that float32 moves.
        convolution: Fraction of the peak that convolutions reach.
        matmul: Fraction of the peak that matrix products reach.
    """

    peak: float
    bandwidth: float
    byte_share: float
    convolution: float
    matmul: float


def _speed(gpu: Gpu, precision: str, c: ComputeConstants) -> _Speed:
    """Returns the speed of a GPU in one precision.

    If the table lists the same operations per second for 16 and 32 bits although there are tensor
    cores, it lists the ordinary cores; tensor cores that add in float32 compute twice that (RTX
    3090: 71 TFLOP/s; NVIDIA, "Ampere GA102 GPU Architecture", table 2).
    """
    if not gpu.float32_tflops or not gpu.bandwidth_gb_s:
        missing = "peak" if gpu.bandwidth_gb_s else "bandwidth of the memory"
        raise ValueError(
            f"the {missing} of the GPU {gpu.name!r} is not known, so that its time cannot be "
            "predicted; give a measured step, or use another GPU"
        )
    bandwidth = gpu.bandwidth_gb_s * 1e9
    peak_16_bit = gpu.peak_flops(precision) if precision.endswith("float16") else None
    if peak_16_bit and gpu.fp16_tensor_cores:
        fast = peak_16_bit if peak_16_bit > gpu.float32_tflops * 1e12 else 2 * peak_16_bit
        return _Speed(fast, bandwidth, 0.5, c.convolution_16_bit, c.matmul_tensor_cores)
    peak = (gpu.tf32_tflops or gpu.float32_tflops) * 1e12
    if gpu.tf32_tflops:
        return _Speed(peak, bandwidth, 1.0, c.convolution_tf32, c.matmul_tensor_cores)
    before_pascal = gpu.float16_tflops is None
    slower, share = (c.before_pascal, _ECC_SHARE) if before_pascal else (1.0, 1.0)
    convolution, matmul = c.convolution_float32 * slower, c.matmul_float32 * slower
    return _Speed(peak, bandwidth * share, 1.0, convolution, matmul)
