"""Costs of a split model: seconds and bytes of operations, devices and steps.

    work = ModelWork(model)
    work.operation_costs()                                   # each operation whole
    work.operation_costs(choose_divisions(model, degree=4))  # some divided over four devices

Work per operation comes from `kdist.planner.read_workload`, transfer times and launch times from
the planner's cost functions, and the rates of the device, a V100 with NVLink, from its tables. Only
the proportions of these rates matter. Seconds of operations can also be measured, on a device of
this machine (`measure_costs`).

These costs compare placements, which needs seconds per operation. The planner's `compute_seconds`
is not additive over operations: its efficiency depends on the whole model and batch. `kdist.plan`
predicts the actual time of a step.
"""

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from kdist.compat.keras import with_call_context
from kdist.layout import Layout
from kdist.parallel.pipeline.schedule import peak_live, simulated_timeline, stage_order
from kdist.parallel.placement import functional_graph, nodes_of
from kdist.parallel.search.divide import STATE_BYTES, Divisions, is_within, tensor_bytes
from kdist.planner.cost.constants import known_compute_constants
from kdist.planner.cost.update import all_reduce_seconds, pipeline_transfer_seconds
from kdist.planner.tables.gpus import find_gpu
from kdist.planner.workload.reading import read_workload
from kdist.training.scopes import in_new_thread

LINK_BYTES_PER_SECOND = 25e9  # one NVLink of a V100, one way
# Latency of a message between devices of one machine.
_HOP_SECONDS = 5e-6
# Passes over the weights in a step: two passes read them, one writes gradients, and an optimizer
# with two slots reads gradient, weight and slots, and writes weight and slots.
_WEIGHT_PASSES = 9


@functools.cache
def _device_rates():
    """Returns (FLOP/s in float32, bytes/s of the memory) of a V100, from the planner's table."""
    gpu = find_gpu("V100")
    return gpu.float32_tflops * 1e12, gpu.bandwidth_gb_s * 1e9


@dataclasses.dataclass(frozen=True)
class OperationCost:
    """Costs of one operation. For divided weights, those of the (busiest) first device."""

    name: str
    seconds: float  # forward and backward pass of one example
    state_bytes: float  # weights, their gradients and two slots
    kept_bytes: float  # activations of one example, kept for the backward pass
    out_bytes: float  # outputs for one example
    # Indices of the operations that inputs come from; also later ones if the operation is called
    # again.
    sources: tuple[int, ...]


class ModelWork:
    """The work of a built model per operation. A nested model counts as one operation.

    `costs` are the seconds of each operation's forward and backward pass, per example; None to
    compute them. Raises ValueError if they lack an operation of the model.
    """

    def __init__(self, model: keras.Model, costs: Mapping[str, float] | None = None):
        self.model = model
        # Outside of any strategy, whose scope would count the work of several replicas.
        workload = in_new_thread(functools.partial(read_workload, model))
        prefix = f"{model.name}/" if isinstance(model, keras.Sequential) else ""
        self._works = collections.defaultdict(list)  # operation -> its work and that nested in it
        for layer in workload.layers:
            name = layer.name.removeprefix(prefix)
            self._works[name.partition("/")[0]].append(dataclasses.replace(layer, name=name))
        self._costs = costs
        self._check_costs()

    def _check_costs(self):
        names = [node.operation.name for node in nodes_of(functional_graph(self.model))]
        missing = [] if self._costs is None else [n for n in names if n not in self._costs]
        if missing:
            raise ValueError(
                f"costs has no entry for {', '.join(missing[:3])}. Pass the seconds of each "
                "operation of the model, as kdist.parallel.measure_costs(model) returns"
            )

    def operation_costs(self, divisions: Divisions | None = None) -> list[OperationCost]:
        """Returns the costs of the operations, in the order of computation; whole by default."""
        divisions = divisions or Divisions()
        numbers: dict[int, int] = {}
        producers: dict[int, int] = {}  # tensor -> number of its operation
        costs: list[OperationCost] = []
        for node in nodes_of(functional_graph(self.model)):
            inputs = (id(tensor) for tensor in node.input_tensors)
            sources = {producers[tensor] for tensor in inputs if tensor in producers}
            number = numbers.setdefault(id(node.operation), len(costs))
            if number == len(costs):
                costs.append(self._operation_cost(node, tuple(sorted(sources)), divisions))
            else:
                both = tuple(sorted({*costs[number].sources, *sources}))
                costs[number] = dataclasses.replace(costs[number], sources=both)
            producers.update({id(tensor): number for tensor in node.outputs})
        return costs

    def _operation_cost(self, node, sources, divisions):
        name = node.operation.name
        works = self._works[name]
        state = sum(4 * work.parameters + 12 * work.trainable_parameters for work in works)
        exchanged = 2 * _sum_within(divisions.exchanged_bytes, name)  # forward and backward
        return OperationCost(
            name,
            self._seconds(name, divisions) + exchanged / LINK_BYTES_PER_SECOND,
            state - _sum_within(divisions.saved_bytes, name),
            sum(work.kept_bytes * divisions.kept_fraction(work.name) for work in works),
            sum(map(tensor_bytes, node.outputs)),
            sources,
        )

    def _seconds(self, name, divisions):
        """Returns the seconds of computation on one device."""
        whole = [_work_seconds(work) for work in self._works[name]]
        fractions = [divisions.computed_fraction(work.name) for work in self._works[name]]
        seconds = sum(each * fraction for each, fraction in zip(whole, fractions, strict=True))
        if self._costs is None:
            return seconds
        # Only the sum over a nested model is measured.
        return self._costs[name] * (seconds / sum(whole) if sum(whole) else 1.0)


def _work_seconds(work):
    flops_per_second, bytes_per_second = _device_rates()
    flops = work.forward_flops + work.backward_flops
    return flops / flops_per_second + work.moved_bytes / bytes_per_second


def _sum_within(by_layer, name):
    return sum(size for layer, size in by_layer.items() if is_within(layer, name))


def device_bytes(
    operations: Sequence[OperationCost], numbers: Sequence[int], layout: Layout, rows: int
) -> list[float]:
    """Returns the maximum bytes on the (first) device of each stage, or on each branch device.

    Counts weights, gradients, two slots, and the activations of the micro-batches in flight. With
    several micro-batches it adds the sum of their gradients. A stage that recomputes holds its
    inputs of each micro-batch, and all activations of one. Temporaries are not counted.

    `numbers` are the stages or devices of the operations, and `rows` those of a replica per step.
    """
    held = [0.0] * (layout.pipeline * layout.branch)
    kept = list(held)
    sums = 1 / 4 if layout.micro_batches > 1 else 0.0
    for operation, number in zip(operations, numbers, strict=True):
        held[number] += operation.state_bytes * (1 + sums)
        kept[number] += operation.kept_bytes
    inputs = (
        [0.0, *_boundary_bytes(operations, numbers, layout.pipeline)] if layout.recompute else []
    )
    for number in range(len(held)):
        fraction = _live_fraction(layout, number)
        if layout.recompute:
            held[number] += inputs[number] * rows * fraction
            fraction = 1 / layout.micro_batches
        held[number] += kept[number] * rows * fraction
    return held


def _live_fraction(layout, number):
    """Returns the maximum fraction of a replica's rows whose activations a stage holds at once."""
    if layout.pipeline == 1:
        return 1.0
    order = stage_order(layout.schedule, layout.pipeline, layout.micro_batches, number)
    return peak_live(order) / layout.micro_batches


def step_seconds(
    operations: Sequence[OperationCost], numbers: Sequence[int], layout: Layout, rows: int
) -> float:
    """Returns the seconds of a step: forward, backward, exchange of gradients, and update.

    The arguments are those of `device_bytes`.
    """
    state = [0.0] * (layout.pipeline * layout.branch)
    for operation, number in zip(operations, numbers, strict=True):
        state[number] += operation.state_bytes
    weights = max(state) / STATE_BYTES * 4
    _, bytes_per_second = _device_rates()
    update = weights * _WEIGHT_PASSES / bytes_per_second
    exchange = 0.0
    if layout.data > 1:
        exchange = float(
            all_reduce_seconds(weights, layout.data, LINK_BYTES_PER_SECOND, _HOP_SECONDS)
        )
    passes = _stages_seconds if layout.pipeline > 1 else _devices_seconds
    return passes(operations, numbers, layout, rows) + exchange + update


def _stages_seconds(operations, numbers, layout, rows):
    micro_rows = rows / layout.micro_batches
    seconds = [
        _passes_seconds(operations, numbers, stage, micro_rows) for stage in range(layout.pipeline)
    ]
    # A backward pass takes about twice as long as the forward pass.
    timeline = simulated_timeline(
        layout.schedule,
        layout.micro_batches,
        [each / 3 for each in seconds],
        [2 * each / 3 for each in seconds],
        layout.recompute,
    )
    transfers = pipeline_transfer_seconds(
        max(_boundary_bytes(operations, numbers, layout.pipeline)) * micro_rows,
        layout.pipeline,
        layout.micro_batches,
        LINK_BYTES_PER_SECOND,
        _HOP_SECONDS,
    )
    return max(timed.end for timed in timeline) + transfers


def _passes_seconds(operations, numbers, here, rows):
    """Returns the seconds of both passes on one device; kernel launches are a lower bound."""
    own = [each for each, number in zip(operations, numbers, strict=True) if number == here]
    launching = known_compute_constants().launch_ms_per_layer * 1e-3 * len(own)
    return max(sum(operation.seconds for operation in own) * rows, launching)


def _boundary_bytes(operations, numbers, stages):
    """Returns the bytes per example that enter each stage except the first."""
    crossing = [0.0] * stages
    for number, operation in enumerate(operations):
        later = [numbers[n] for n, each in enumerate(operations) if number in each.sources]
        for stage in range(numbers[number] + 1, max(later, default=0) + 1):
            crossing[stage] += operation.out_bytes
    return crossing[1:]


def _devices_seconds(operations, numbers, layout, rows):
    """Returns the seconds if each operation starts when its device and its inputs are ready."""
    free, done = [0.0] * layout.branch, []
    for operation, here in zip(operations, numbers, strict=True):
        arrivals = [
            done[source]
            + (2 * operations[source].out_bytes * rows / LINK_BYTES_PER_SECOND + 2 * _HOP_SECONDS)
            * (numbers[source] != here)
            for source in operation.sources
            if source < len(done)  # only the first call of a layer that is called again
        ]
        free[here] = max([free[here], *arrivals]) + operation.seconds * rows
        done.append(free[here])
    return max(*free, *(_passes_seconds(operations, numbers, n, rows) for n in set(numbers)))


def measure_costs(model: keras.Model, batch_size: int = 32, repeats: int = 5) -> dict[str, float]:
    """Returns measured seconds of each operation's forward and backward pass, per example.

    Each operation runs on the first device (GPU 0 if there is one). Inputs are the outputs of the
    operations before, for random inputs of the model (zeros for integer inputs). The time of an
    empty call is subtracted. A nested model counts as one operation. The model is left unchanged.

    Args:
        model: built functional or Sequential model with inputs of known shapes.
        batch_size: examples per call. Defaults to 32. A batch size of the model's inputs, such as
            `keras.Input(batch_shape=(8, 4))`, replaces it.
        repeats: timed calls, of which the median counts. Defaults to 5.

    Returns:
        Name of the operation -> seconds.

    Raises:
        ValueError: if a number is below 1, or an input has an axis of unknown size.

    Example:
        costs = kdist.parallel.measure_costs(model, batch_size=64)      # {"stem": 3.1e-05, …}
        placement = kdist.parallel.suggest(model, kdist.Layout(pipeline=2), costs=costs)
    """
    for name, value in (("batch_size", batch_size), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    graph = functional_graph(model)
    before = [(variable, variable.numpy()) for variable in model.variables]
    try:
        # Outside of a strategy's scope, since any copy of a variable will do.
        return in_new_thread(lambda: _measure(graph, batch_size, repeats))
    finally:
        for variable, value in before:
            variable.assign(value)


def _measure(graph, batch_size, repeats):
    own_sizes = (tensor.shape[0] for tensor in graph.inputs)
    batch_size = next(filter(None, own_sizes), batch_size)
    values = {id(tensor): _example(tensor, batch_size) for tensor in graph.inputs}
    costs: dict[str, float] = {}
    for node in nodes_of(graph):
        inputs = [values[id(tensor)] for tensor in node.input_tensors]
        outputs, seconds = _forward_and_backward(node, inputs, repeats)
        values.update({id(x): y for x, y in zip(node.outputs, outputs, strict=True)})
        name = node.operation.name  # several calls of an operation are added
        costs[name] = costs.get(name, 0.0) + seconds / batch_size
    return costs


def _example(tensor, batch_size):
    shape = [batch_size, *tensor.shape[1:]]
    if None in shape:
        raise ValueError(
            f"the input {tensor.name!r} has the shape {tuple(tensor.shape)}, and costs are "
            "measured for one size. Build the model with that size"
        )
    dtype = tf.as_dtype(tensor.dtype)
    if dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(shape, seed=(0, 0)), dtype)
    return tf.zeros(shape, dtype)


def _forward_and_backward(node, inputs, repeats):
    """Returns (outputs, seconds) of a call of an operation."""
    operation = with_call_context(node.operation, training=True)
    weights = [weight.value for weight in getattr(node.operation, "trainable_variables", ())]

    @tf.function(autograph=False)
    def both(*inputs):
        given = {id(tensor): x for tensor, x in zip(node.input_tensors, inputs, strict=True)}
        args, kwargs = node.arguments.fill_in(given)
        sources = [x for x in inputs if x.dtype.is_floating] + weights
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = keras.tree.flatten(operation(*args, **kwargs))
        ends = [x for x in outputs if x.dtype.is_floating]
        gradients = tape.gradient(ends, sources) if ends and sources else []
        return outputs, [x for x in gradients if x is not None]

    @tf.function(autograph=False)
    def nothing(*inputs):
        return [tf.identity(x) for x in inputs]

    outputs, _ = both(*inputs)
    seconds = _median_seconds(both, inputs, repeats) - _median_seconds(nothing, inputs, repeats)
    return outputs, max(seconds, 0.0)


def _median_seconds(function: Callable, inputs, repeats) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first call warms up
        start = time.perf_counter()
        function(*inputs)
        tf.test.experimental.sync_devices()  # GPUs still compute when a call returns
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
