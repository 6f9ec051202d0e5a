"""Peak memory of one device in a training step.

    >>> from kdist.planner.workload.layers import LayerWork, Workload
    >>> fc = LayerWork("fc", "matmul", 20e6, 40e6, 1e6, 1e6, 4096, 9e4, False)
    >>> work = Workload("one", (3,), (fc,), 12, peaks=((9000, 0),))
    >>> needed = estimate_memory(work, local_batch=100, optimizer="momentum")
    >>> needed.weights, needed.slots, needed.step
    (4000000.0, 4000000.0, 936000.0)

All sizes are in bytes and count what is requested. An allocator that rounds blocks up, such as
TensorFlow's for GPUs, needs a few per cent more.
"""

import dataclasses

from kdist.planner.cost.sharding import DividedState
from kdist.planner.workload.layers import Workload

# TensorFlow chooses the order of operations: a margin over the order of the graph.
STEP_MARGIN = 1.04
# A CUDA context with the code of cuDNN and cuBLAS: an allowance.
CUDA_BYTES = 0.8e9
# Batches on the device in addition to that of the running step: the next one, and on a GPU another
# one in transfer (tf.data's multi-device iterator buffers one on each side). Prefetching with
# AUTOTUNE queues more if they are produced faster than consumed: up to six were seen.
BATCHES_AHEAD = {"cpu": 1, "gpu": 2}
# TensorFlow's limit of cuDNN's workspace for one convolution (TF_CUDNN_WORKSPACE_LIMIT_IN_MB).
_CUDNN_LIMIT_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class OptimizerMemory:
    """Memory of a Keras optimizer, in numbers per trained number.

    Counted in `update_step` in keras/src/optimizers.

    Attributes:
        slots: Numbers kept from step to step.
        early: Products of slots and weights alone. They do not depend on gradients, so that
            TensorFlow computes them as a step begins and holds all of them until gradients arrive.
        late: Temporaries of the update itself, of one variable after the other. At least one:
            weights that are still to be read are not written in place.
        is_elementwise: Whether it updates each number separately, so that replicas can divide its
            slots.
    """

    slots: int
    early: int
    late: int
    is_elementwise: bool = True


OPTIMIZERS = {
    "sgd": OptimizerMemory(0, 0, 1),
    "momentum": OptimizerMemory(1, 1, 1),  # m × momentum
    "nesterov": OptimizerMemory(1, 1, 2),
    "adam": OptimizerMemory(2, 0, 2),  # g − m and g² − v
    "adamw": OptimizerMemory(2, 1, 2),  # the weights after their decay
    "adamax": OptimizerMemory(2, 1, 2),
    "nadam": OptimizerMemory(2, 0, 3),
    "lamb": OptimizerMemory(2, 0, 3, is_elementwise=False),
    "rmsprop": OptimizerMemory(1, 1, 2),  # v × rho
    "adagrad": OptimizerMemory(1, 0, 2),
    "adadelta": OptimizerMemory(2, 3, 3),
    "ftrl": OptimizerMemory(2, 2, 3),
    "lion": OptimizerMemory(1, 2, 2),
}


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Buffers of the kernels and updates that run at the same time, in bytes.

    Attributes:
        kernels: Copies and buffers of convolutions' gradients.
        temporaries: Temporaries of the largest layer's update. The larger of both counts.
        next_update: Gradient and update of the next matrix.
        cudnn: cuDNN's workspace: an allowance.
    """

    kernels: float
    temporaries: float
    next_update: float
    cudnn: float

    @property
    def total(self) -> float:
        """Bytes of all buffers at the same time."""
        size = max(self.kernels, self.temporaries)
        if self.next_update:
            size += self.next_update
        return size + self.cudnn


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes.

    Attributes:
        weights: Weights of all layers.
        slots: Slots of the optimizer, and copies of the parts of weights that a device updates if
            replicas divide the optimizer's state.
        accumulated: Sum of the gradients of micro-steps.
        input: Batches queued for their step.
        step: Activations and gradients.
        update: Values that the optimizer computes before the gradients.
        workspace: Buffers of single kernels.
        reduce_buffers: Copies of gradients that are sent to other replicas.
        framework: Memory of the runtime itself.
        gathered: Divided weights that a step gathers and holds at a time.
        buffers: Parts of `workspace`.
    """

    weights: float
    slots: float
    accumulated: float
    input: float
    step: float
    update: float
    workspace: float
    reduce_buffers: float
    framework: float
    gathered: float = 0.0
    buffers: Workspace | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(size for _, size in self.parts())

    def parts(self) -> list[tuple[str, float]]:
        """Returns names and bytes of the parts that are not empty."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "buffers"]
        return [(name, getattr(self, name)) for name in names if getattr(self, name)]


def estimate_memory(
    workload: Workload,
    local_batch: int,
    precision: str | None = None,
    optimizer: str = "adam",
    accumulate: int = 1,
    devices: int = 1,
    update: str = "all_reduce",
    framework_bytes: float | None = None,
    device: str = "cpu",
    divided: DividedState | None = None,
) -> Memory:
    """Returns the peak memory of a training step on each device.

    Replicas on several logical CPU devices share the host's memory; each needs this much. For a
    precision other than the workload's the result is an upper bound, see `_step_bytes`. With the
    update `"parameter_servers"`, servers have the slots and compute the update. The runtime needs
    `framework_bytes`, by default `CUDA_BYTES` on a GPU and 0 on a CPU. If replicas have `divided`
    their state, each device holds its own part of it.

    Raises:
        ValueError: If a number is below 1, or a name is unknown.
    """
    _check(local_batch, accumulate, devices, update, device, optimizer)
    of_optimizer = OPTIMIZERS[optimizer]
    precision = precision or workload.precision
    width = variable_bytes(precision)
    trained = workload.trainable_parameters * width
    updated = trained if divided is None else divided.updated * width
    served = update == "parameter_servers"
    divides_weights = divided is not None and divided.divides_weights
    divides_gradients = divided is not None and divided.divides_gradients
    # Keras checks all gradients of float16 before it applies any of them.
    checked = precision == "mixed_float16"
    # Replicas that divide weights keep their parts of the gradients, which are added up one by one.
    gradients_stay = (accumulate > 1 or devices > 1 or checked) and not divides_weights
    early = 0 if served or checked else of_optimizer.early
    if framework_bytes is None:
        framework_bytes = CUDA_BYTES if device == "gpu" else 0.0
    buffers = _workspace(
        workload,
        local_batch,
        width,
        bits(precision) // 8,
        of_optimizer,
        device,
        gradients_stay,
        divided,
    )
    slots = 0.0 if served else of_optimizer.slots * updated
    if divided is not None and not divides_weights:
        slots += divided.own * width  # the part of the weights that the optimizer updates
    return Memory(
        weights=workload.parameters * width - (trained - updated if divides_weights else 0.0),
        slots=slots,
        accumulated=(updated if divides_gradients else trained) if accumulate > 1 else 0.0,
        input=BATCHES_AHEAD[device] * workload.input_bytes * local_batch,
        step=_step_bytes(workload, local_batch, precision, gradients_stay, divided),
        update=early * updated,
        workspace=buffers.total,
        reduce_buffers=_reduce_buffers(trained, devices, served, divided, width),
        framework=float(framework_bytes),
        gathered=divided.gathered * width if divided is not None and divides_weights else 0.0,
        buffers=buffers,
    )


def _reduce_buffers(trained, devices, served, divided, width):
    """Returns the bytes of gradients on their way between replicas.

    Replicas that divide weights add up the gradients of a weight as soon as these exist.
    """
    if divided is not None and divided.divides_weights:
        return (divided.gathered + divided.small) * width
    return trained if devices > 1 and not served else 0.0


def checkpoint_bytes(workload: Workload, optimizer: str, precision: str | None = None) -> float:
    """Returns the size of a checkpoint: all weights, and the slots of the optimizer.

    Raises:
        ValueError: If the optimizer is unknown.
    """
    _check_optimizer(optimizer)
    trained = OPTIMIZERS[optimizer].slots * workload.trainable_parameters
    return (workload.parameters + trained) * variable_bytes(precision or workload.precision)


def variable_bytes(precision: str) -> int:
    """Returns the bytes of one weight under a Keras dtype policy."""
    return 4 if precision.startswith("mixed_") else bits(precision) // 8


def bits(precision: str) -> int:
    """Returns the bits of one activation under a Keras dtype policy."""
    return 16 if precision.endswith("float16") else 64 if precision == "float64" else 32


def _step_bytes(workload, local_batch, precision, gradients_stay, divided):
    """Returns the bytes of activations and gradients, with the margin.

    A workload read under float32 is assumed to need the same in 16 bits, plus the 16-bit copies of
    weights and their gradients. The true value is lower, depending on the layers: BatchNorm keeps
    float32 copies of its inputs. In the other direction twice the bytes are enough for any number.
    Replicas that divide weights hold 16-bit copies of gathered ones only.
    """
    copied = workload.parameters + workload.trainable_parameters
    added_up = 0.0
    if divided is not None and divided.divides_weights:
        copied -= 2 * (divided.divided - divided.gathered)
        added_up = divided.updated * variable_bytes(precision)
    read = workload.step_bytes(local_batch, gradients_stay) * STEP_MARGIN + added_up
    if precision == workload.precision or bits(precision) == bits(workload.precision):
        return read
    if bits(precision) == 16:
        return read + 2 * copied
    return 2 * read


def _workspace(
    workload, local_batch, width, kernel_width, of_optimizer, device, gradients_stay, divided
):
    """Returns the buffers of kernels and updates that run concurrently with the counted one.

    The gradient of a convolution's filters is computed in blocks and copied (by oneDNN, and by
    cuDNN in a similar way). Two concurrent kernels hold two copies and one gradient more than the
    step counts, and on a CPU the buffers of both (those for AVX2; oneDNN has others for AVX-512).
    The optimizer's temporaries of the largest layer count if they are larger. Two large matrices
    are updated at a time.
    """
    sizes = [layer.trainable_parameters * width for layer in workload.layers]
    updated = sizes if divided is None else [own * width for own in divided.own_of_layers]
    kinds = [layer.kind for layer in workload.layers]
    filters = max(
        (size for size, kind in zip(sizes, kinds, strict=True) if kind == "convolution"),
        default=0.0,
    )
    kernels = 3 * filters * kernel_width / width  # a mixed policy computes with casts
    if device == "cpu":
        kernels += sum(sorted(layer.kernel_bytes for layer in workload.layers)[-2:])
    cudnn = 0.0
    if device == "gpu" and filters:
        kept = max(x.kept_bytes for x in workload.layers if x.kind == "convolution")
        cudnn = min(2 * kept * local_batch, _CUDNN_LIMIT_BYTES)
    matrices = [each for *each, kind in zip(sizes, updated, kinds, strict=True) if kind == "matmul"]
    return Workspace(
        kernels=kernels,
        temporaries=of_optimizer.late * max(updated, default=0.0),
        next_update=_next_update(workload, local_batch, matrices, of_optimizer, gradients_stay),
        cudnn=cudnn,
    )


def _next_update(workload, local_batch, matrices, of_optimizer, gradients_stay):
    """Returns the bytes that the update of a second matrix adds to the peak of the step.

    While one thread applies the gradient of the largest matrix, another thread computes and applies
    that of the next matrix, as in the two large layers of VGG16. Nothing is added if activations
    need more at a moment without that gradient. `matrices` are pairs: the bytes of a matrix, and
    those that a device updates.
    """
    if len(matrices) < 2:
        return 0.0
    (second, updated), (first, _) = sorted(matrices)[-2:]
    peaks = workload.peaks if gradients_stay else workload.peaks_applied or workload.peaks
    added = of_optimizer.late * updated + (not gradients_stay) * second
    matrix = 0.9 * first  # without the bias
    moments = [(each * local_batch + always, always >= matrix) for each, always in peaks]
    return max(size + added * there for size, there in moments) - max(moments)[0]


def _check(local_batch, accumulate, devices, update, device, optimizer):
    numbers = {"local_batch": local_batch, "accumulate": accumulate, "devices": devices}
    for name, value in numbers.items():
        if not value >= 1:
            raise ValueError(f"{name} has to be 1 or more, not {value}")
    _check_optimizer(optimizer)
    if update not in ("all_reduce", "parameter_servers"):
        raise ValueError(f"update is 'all_reduce' or 'parameter_servers', not {update!r}")
    if device not in BATCHES_AHEAD:
        raise ValueError(f"device is 'cpu' or 'gpu', not {device!r}")


def _check_optimizer(optimizer):
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"the memory of the optimizer {optimizer!r} is not known; known are "
            f"{', '.join(OPTIMIZERS)}"
        )
