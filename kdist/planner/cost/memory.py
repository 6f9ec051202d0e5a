"""What one device holds at the fullest moment of a training step.

    >>> from kdist.planner.workload import LayerWork, Workload
    >>> fc = LayerWork("fc", "matmul", 20e6, 40e6, 1e6, 1e6, 4096, 9e4, False)
    >>> work = Workload("one", (3,), (fc,), 12, peaks=((9000, 0),))
    >>> needed = memory(work, local_batch=100, optimizer="momentum")
    >>> needed.weights, needed.slots, needed.step
    (4000000.0, 4000000.0, 936000.0)

All sizes are in bytes. What is counted is what is asked for: an allocator that hands out larger
blocks than that, as TensorFlow's for GPUs does, needs some per cent more.
"""

import dataclasses

from kdist.planner.workload import Workload

# The order of operations is TensorFlow's to choose; a step holds a little more than one that keeps
# to the order of the graph: a margin.
STEP_MARGIN = 1.04
# A CUDA context with the code of cuDNN and cuBLAS: an allowance.
CUDA_BYTES = 0.8e9
# Batches on the device beside the one that a step takes: the next one; on a GPU one more is on its
# way there (tf.data's multi-device iterator buffers one on each side). Prefetching with AUTOTUNE
# has more of them wait where they are made faster than they are taken: up to six were seen.
BATCHES_AHEAD = {"cpu": 1, "gpu": 2}
# What TensorFlow gives cuDNN at most for one convolution (TF_CUDNN_WORKSPACE_LIMIT_IN_MB).
_CUDNN_LIMIT_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer of Keras holds for each trained number, counted in such numbers.

    Read off `update_step` in keras/src/optimizers.

    Attributes:
        slots: numbers kept from step to step.
        early: products of slots and weights alone. They wait for no gradient, so that TensorFlow
            computes them as a step begins, and holds all of them until the gradients come.
        late: temporaries of the update itself, of one variable after the other. One at least:
            weights that are still to be read are not written in place.
    """

    slots: int
    early: int
    late: int


OPTIMIZERS = {
    "sgd": OptimizerMemory(0, 0, 1),
    "momentum": OptimizerMemory(1, 1, 1),  # m × momentum
    "nesterov": OptimizerMemory(1, 1, 2),
    "adam": OptimizerMemory(2, 0, 2),  # g − m beside g² − v
    "adamw": OptimizerMemory(2, 1, 2),  # the weights after their decay
    "adamax": OptimizerMemory(2, 1, 2),
    "nadam": OptimizerMemory(2, 0, 3),
    "lamb": OptimizerMemory(2, 0, 3),
    "rmsprop": OptimizerMemory(1, 1, 2),  # v × rho
    "adagrad": OptimizerMemory(1, 0, 2),
    "adadelta": OptimizerMemory(2, 3, 3),
    "ftrl": OptimizerMemory(2, 2, 3),
    "lion": OptimizerMemory(1, 2, 2),
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one device holds, in bytes.

    Attributes:
        weights: of all layers.
        slots: what the optimizer keeps.
        accumulated: gradients of micro-steps, added up.
        input: batches that wait for their step.
        step: activations and gradients.
        update: what the optimizer computes ahead of the gradients.
        workspace: buffers of single kernels.
        reduce_buffers: copies of gradients on their way to other replicas.
        framework: what the runtime takes for itself.
        how: for each of these, how it came about.
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
    how: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def total(self) -> float:
        """The sum."""
        return sum(size for _, size, _ in self.lines())

    def lines(self) -> list[tuple[str, float, str]]:
        """What there is more than 0 bytes of: name, bytes, and how it came about."""
        how = dict(self.how)
        names = [field.name for field in dataclasses.fields(self) if field.name != "how"]
        return [
            (name.replace("_", " "), getattr(self, name), how.get(name, ""))
            for name in names
            if getattr(self, name)
        ]


def memory(
    workload: Workload,
    local_batch: int,
    precision: str | None = None,
    optimizer: str = "adam",
    accumulate: int = 1,
    devices: int = 1,
    update: str = "all_reduce",
    framework_bytes: float | None = None,
    device: str = "cpu",
) -> Memory:
    """The most that training needs on each device.

    Replicas on several logical CPU devices share the host's memory: there, each needs as much.

    Args:
        workload: of the model.
        local_batch: examples of one replica in one step, or micro-step.
        precision: a Keras dtype policy; that of the workload if None. Another one than that is a
            bound, see `_step_bytes`.
        optimizer: one of `OPTIMIZERS`.
        accumulate: micro-steps before an update.
        devices: replicas, over all machines.
        update: "all_reduce", or "parameter_servers", where slots are the servers' and the update is
            computed there.
        framework_bytes: what the runtime takes; by default `CUDA_BYTES` on a GPU, on a CPU 0.
        device: "cpu" or "gpu".

    Raises:
        ValueError: a number below 1, or a name that is not known.
    """
    _check(local_batch, accumulate, devices, update, device)
    of_optimizer = _optimizer(optimizer)
    precision = precision or workload.precision
    width = 4 if precision.startswith("mixed_") else _bits(precision) // 8
    trained = workload.trainable_parameters * width
    served = update == "parameter_servers"
    together = accumulate > 1 or devices > 1
    # Keras applies gradients of float16 only after it has looked at all of them.
    checked = precision == "mixed_float16"
    gradients_stay = together or checked
    step, step_how = _step_bytes(workload, local_batch, precision, gradients_stay)
    workspace, workspace_how = _workspace(
        workload, local_batch, width, _bits(precision) // 8, of_optimizer, device, gradients_stay
    )
    early = 0 if served or checked else of_optimizer.early
    if framework_bytes is None:
        framework_bytes = CUDA_BYTES if device == "gpu" else 0.0
    how = {
        "weights": f"{workload.parameters:,.0f} numbers of {width} bytes",
        "slots": f"{of_optimizer.slots} for each trained number under {optimizer}",
        "accumulated": f"the sum of the gradients of {accumulate} micro-steps",
        "input": f"{BATCHES_AHEAD[device]} x {local_batch} examples that wait for their step",
        "step": step_how,
        "update": f"{early} for each trained number, computed before the gradients are there",
        "workspace": workspace_how,
        "reduce_buffers": "a copy of the gradients, packed for their way to other replicas",
        "framework": "the CUDA context: an allowance" if device == "gpu" else "as given",
    }
    return Memory(
        weights=workload.parameters * width,
        slots=0.0 if served else of_optimizer.slots * trained,
        accumulated=trained if accumulate > 1 else 0.0,
        input=BATCHES_AHEAD[device] * workload.input_bytes * local_batch,
        step=step,
        update=early * trained,
        workspace=workspace,
        reduce_buffers=trained if devices > 1 and not served else 0.0,
        framework=float(framework_bytes),
        how=tuple(how.items()),
    )


def _step_bytes(workload, local_batch, precision, gradients_stay):
    """Activations and gradients, with the margin; and how.

    Read under float32, a step in 16 bits is taken to need as much as it does in float32, and what
    the weights and their gradients are cast to besides. It is less, by how much depends on the
    layers: BatchNorm keeps float32 copies of what it is given. The other way round, twice what was
    read is enough: no number takes more than twice the bytes.
    """
    read = workload.step_bytes(local_batch, gradients_stay) * STEP_MARGIN
    how = f"activations and gradients of {local_batch} examples, and {STEP_MARGIN - 1:.0%}"
    if precision == workload.precision or _bits(precision) == _bits(workload.precision):
        return read, how
    if _bits(precision) == 16:
        casts = 2 * (workload.parameters + workload.trainable_parameters)
        return read + casts, f"{how}, at most: as in {workload.precision}, and 16-bit weights"
    return 2 * read, f"{how}, at most: twice that in {workload.precision}"


def _workspace(workload, local_batch, width, kernel_width, of_optimizer, device, gradients_stay):
    """Buffers of the kernels and updates that run beside the one that is counted; and how.

    A gradient of a convolution's filters is computed in blocks and copied (oneDNN, and likewise
    cuDNN): two kernels at a time hold two copies and one gradient more than is counted in the step,
    and on a CPU the buffers of either (those for AVX2; for AVX-512 oneDNN has others). Or the
    optimizer's temporaries of the largest layer, if they are more. Two large matrices are applied
    at a time.
    """
    sizes = {layer: layer.trainable_parameters * width for layer in workload.layers}
    filters = max((sizes[x] for x in workload.layers if x.kind == "convolution"), default=0.0)
    largest = max(sizes.values(), default=0.0)
    by_kernels = 3 * filters * kernel_width / width  # a mixed policy computes with casts
    if device == "cpu":
        by_kernels += sum(sorted(layer.kernel_bytes for layer in workload.layers)[-2:])
    by_update = of_optimizer.late * largest
    size = max(by_kernels, by_update)
    how = "kernels of convolutions" if by_kernels > by_update else "temporaries of the update"
    beside = _next_update(workload, local_batch, width, of_optimizer, gradients_stay)
    if beside:
        size += beside
        how += ", and the next matrix's gradient and update"
    if device == "gpu" and filters:
        kept = max(x.kept_bytes for x in workload.layers if x.kind == "convolution")
        size += min(2 * kept * local_batch, _CUDNN_LIMIT_BYTES)
        how += ", and cuDNN's: an allowance of the largest convolution's input and output"
    return size, how


def _next_update(workload, local_batch, width, of_optimizer, gradients_stay):
    """What the update of a second matrix adds to the fullest moment of the step.

    While one thread applies the gradient of the largest matrix, another one gets to the next
    matrix's gradient and applies that, as in the two large layers of VGG16. Nothing is added where
    activations need more at a time at which that gradient is not there.
    """
    sizes = sorted(x.trainable_parameters * width for x in workload.layers if x.kind == "matmul")
    if len(sizes) < 2:
        return 0.0
    second, first = sizes[-2:]
    peaks = workload.peaks if gradients_stay else workload.peaks_applied or workload.peaks
    added = (of_optimizer.late + (not gradients_stay)) * second
    its_matrix = 0.9 * first  # without the bias
    moments = [(each * local_batch + always, always >= its_matrix) for each, always in peaks]
    return max(size + added * there for size, there in moments) - max(moments)[0]


def _optimizer(name):
    if name not in OPTIMIZERS:
        raise ValueError(
            f"the memory of the optimizer {name!r} is not known; known are {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]


def _bits(precision):
    return 16 if precision.endswith("float16") else 64 if precision == "float64" else 32


def _check(local_batch, accumulate, devices, update, device):
    for name, value in (
        ("local_batch", local_batch),
        ("accumulate", accumulate),
        ("devices", devices),
    ):
        if not value >= 1:
            raise ValueError(f"{name} has to be 1 or more, not {value}")
    if update not in ("all_reduce", "parameter_servers"):
        raise ValueError(f"update is 'all_reduce' or 'parameter_servers', not {update!r}")
    if device not in BATCHES_AHEAD:
        raise ValueError(f"device is 'cpu' or 'gpu', not {device!r}")
