"""How long one device computes: forward and backward pass and the update, from its data sheet.

    time = compute_seconds(known_workload("resnet50"), find_gpu("V100"), 64, "float32")
    time.seconds, [(term.name, term.seconds) for term in time.terms]

Kind by kind, arithmetic takes

    (examples × operations + layers × operations lost while a device fills) / (peak × efficiency)

and memory takes (examples × bytes moved × share really moved) / bandwidth; half as many bytes where
tensor cores compute in 16 bits. Layers are small where the device is large: what is lost in each of
them is what makes efficiency grow with the batch. Operations are launched one by one by the host
while the device computes, so that the slower of the two counts. This is the roofline model
(Williams et al. 2009, doi:10.1145/1498765.1498785) with efficiencies fitted to published rates.
"""

import dataclasses
import functools

from kdist.planner.cost.compute_constants import ComputeConstants, known_compute_constants
from kdist.planner.cost.speed import speed_of
from kdist.planner.cost.work_totals import work_totals
from kdist.planner.gpus import Gpu, find_gpu
from kdist.planner.known import known_workload
from kdist.planner.workload import Workload

# Weights are read by both passes and their gradients written; an optimizer with two slots then
# reads gradient, weight and slots, and writes weight and slots.
_WEIGHT_PASSES, _UPDATE_PASSES = 3, 6
# How sharply the slower of host and device counts: 4 adds a fifth where both take as long.
_SHARPNESS = 4
_POLICIES = {
    "fp32": "float32",
    "tf32": "float32",
    "amp": "mixed_float16",
    "fp16": "mixed_float16",
    "bf16": "mixed_bfloat16",
}
# What published rates name by a model alone: NVIDIA trains EfficientNetV2-S on smaller images than
# it evaluates.
_TRAINED_ON = {"EfficientNetV2-S": "EfficientNetV2-S 300px"}


@dataclasses.dataclass(frozen=True)
class ComputeTerm:
    """A part of the time of a micro-step.

    Attributes:
        name: the kind of layer, "weights and update", "launching" or "regions".
        seconds: that it adds.
        peak_share: of the device's peak that its arithmetic reaches; None where it has none that
            counts.
    """

    name: str
    seconds: float
    peak_share: float | None = None


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """A micro-step of one device.

    Attributes:
        seconds: in all.
        terms: that add up to `seconds`.
        flops: floating-point operations of the micro-step.
        efficiency: share of the device's peak in this precision.
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
) -> ComputeTime:
    """The time of one micro-step on one device, input and exchange left out.

    Args:
        workload: of the model in float32.
        gpu: the device.
        local_batch: examples of the micro-step.
        precision: a Keras dtype policy. float32 is TF32 where the GPU has it; a policy of 16 bits
            for which it has no tensor cores is taken to be as fast as float32.
        xla: whether XLA compiles the step. Defaults to False.
        accumulate: micro-steps that share an update. Defaults to 1.
        constants: by default those fitted to published rates.

    Raises:
        ValueError: the batch or `accumulate` is not positive, or the GPU's peak or bandwidth is
            not known.
    """
    constants = constants or known_compute_constants()
    return _time(work_totals(workload), gpu, local_batch, precision, xla, accumulate, constants)


def scaled_seconds(
    measured_seconds: float,
    workload: Workload,
    from_gpu: Gpu,
    to_gpu: Gpu,
    from_batch: float,
    to_batch: float,
    from_precision: str,
    to_precision: str,
) -> float:
    """What a micro-step would take elsewhere: measured × predicted there / predicted here.

    Args:
        measured_seconds: with all that is called `from_…`.
        workload: of the model in float32.
        from_gpu: where it was measured.
        to_gpu: where it shall run.
        from_batch: examples of the micro-step that was measured.
        to_batch: examples of the other.
        from_precision: a Keras dtype policy, as of `compute_seconds`.
        to_precision: that of the other.

    Raises:
        ValueError: as of `compute_seconds`, or the measured time is not above 0.
    """
    if not measured_seconds > 0:
        raise ValueError(f"measured_seconds is above 0, not {measured_seconds}")
    there = compute_seconds(workload, to_gpu, to_batch, to_precision)
    here = compute_seconds(workload, from_gpu, from_batch, from_precision)
    return measured_seconds * there.seconds / here.seconds


def micro_step_seconds(
    model: str,
    gpu: str,
    precision: str,
    local_batch: float,
    framework: str,
    *,
    accumulate: int = 1,
    constants: ComputeConstants | None = None,
) -> float | None:
    """`compute_seconds` by the names that tables of published rates use.

    Args:
        model: such as "ResNet-50 v1.5", as `known_workload` takes it.
        gpu: such as "V100 SXM2 32GB", as `find_gpu` takes it.
        precision: "fp32" and "tf32", both TF32 where the GPU has it; "amp", "fp16", "bf16".
        local_batch: examples of the micro-step.
        framework: such as "TF2 Keras Horovod XLA"; of it only XLA counts.
        accumulate: micro-steps that share an update. Defaults to 1.
        constants: by default those fitted to published rates.

    Returns:
        Seconds; None where the model, the GPU or its bandwidth, or the precision is not known.
    """
    policy = _POLICIES.get(precision.lower())
    named = _named(model, gpu)
    if policy is None or named is None:
        return None
    constants = constants or known_compute_constants()
    xla = "xla" in framework.lower()
    work, found = named
    return _time(work, found, local_batch, policy, xla, accumulate, constants).seconds


@functools.lru_cache(maxsize=1024)
def _named(model, gpu):
    """The work of a model and the GPU of these names; None where too little is known of them."""
    found = find_gpu(gpu)
    if found is None or not found.bandwidth_gb_s or not found.float32_tflops:
        return None
    try:
        workload = known_workload(_TRAINED_ON.get(model, model))
    except ValueError:
        return None
    return work_totals(workload), found


def _time(work, gpu, local_batch, precision, xla, accumulate, constants):
    if not local_batch > 0 or accumulate < 1:
        raise ValueError(
            f"local_batch={local_batch}, accumulate={accumulate}: take a batch above 0 and an "
            "accumulation from 1 on"
        )
    speed = speed_of(gpu, precision, constants)
    terms = [_kind(total, speed, local_batch, xla, constants) for total in work.kinds]
    passes = _WEIGHT_PASSES + _UPDATE_PASSES / accumulate
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


def _kind(total, speed, examples, xla, c):
    """The time of all layers of one kind."""
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
