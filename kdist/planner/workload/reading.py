"""Reads the workload of a Keras model from the graph of one training step.

    read_workload(model).training_flops

The step is traced and never run. The graph shows what the backward pass needs of the forward pass,
for any layers. It is traced for two and for three examples: the difference is the work per example,
and the rest does not depend on the batch. (TensorFlow stores tensors of ones of up to 1,000 numbers
as constants. If two examples stay below that and three do not, three and four are compared.)
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from kdist.compat.keras import copy_flags, sharing_functions
from kdist.planner.workload import tracing
from kdist.planner.workload.layers import LayerWork, Workload
from kdist.planner.workload.tracing import TracedStep, base_tensor, layer_path, sublayers

# Buffers of oneDNN's kernel for filters of any size, in gradients of the filter, see _kernel_bytes.
_FILTER_BUFFERS = 2 * 4


def read_workload(model: keras.Model, input_shape: Sequence[int] | None = None) -> Workload:
    """Reads the work of a training step from a model.

    Gradients of embeddings are assumed to be dense, with the size of the whole table.

    Example:

        model = keras.applications.ResNet50(weights=None)
        kdist.planner.read_workload(model).training_flops

    Args:
        model: Built functional or sequential model.
        input_shape: Shape of one example, without the batch, for a model with one input. Required
            if the model's input has an axis of unknown size. Defaults to the model's own.

    Returns:
        The `Workload`.

    Raises:
        ValueError: If the model has no known inputs, an input has an axis of unknown size, the
            model does not accept `input_shape`, the step depends on the number of examples, or a
            strategy's scope is active.
    """
    if tf.distribute.has_strategy():
        raise ValueError(
            "read a workload outside of strategy.scope(), where a step belongs to one replica"
        )
    reading = _Reading(model, _input_shapes(model, input_shape))
    return Workload(
        name=model.name,
        input_shape=reading.input_shapes[0],
        layers=reading.layers(),
        input_bytes=float(reading.input_bytes),
        peaks=reading.peaks(),
        peaks_applied=reading.peaks(gradients_stay=False),
        precision=_precision(model),
        uncounted=reading.uncounted(),
        resizable=reading.is_resizable(),
    )


def _two_steps(model, input_shapes):
    """Returns a number of examples, the step for it, and the step for one example more."""
    for batch in (2, 3):
        step, larger = (
            TracedStep(_with_batch(model, n), _specs(model, input_shapes, n))
            for n in (batch, batch + 1)
        )
        if [op.type for op in step.operations] == [op.type for op in larger.operations]:
            return batch, step, larger
    raise ValueError(
        f"a training step of the model {model.name!r} differs between three and four examples, so "
        "that its work per example is unknown"
    )


class _Reading:
    """A traced step, with the size of each tensor per example and for any batch."""

    def __init__(self, model, input_shapes):
        self.input_shapes = input_shapes
        batch, step, larger = _two_steps(model, input_shapes)
        self.step = step
        self.model = model = step.model
        self._sizes: dict = {}  # bytes per example, and bytes for any batch
        self._flops: dict = {}  # per example
        for op, other in zip(step.operations, larger.operations, strict=True):
            constant = step.is_constant(op)
            for tensor, larger_tensor in zip(op.outputs, other.outputs, strict=True):
                sizes = (0, 0) if constant else (_bytes(tensor), _bytes(larger_tensor))
                each = sizes[1] - sizes[0]
                self._sizes[tensor.ref()] = (each, sizes[0] - batch * each)
            flops, larger_flops = tracing.flops(op), tracing.flops(other)
            self._flops[op] = max(flops - (batch - 1) * (larger_flops - flops), 0.0)
        self.input_bytes = sum(self._sizes[op.outputs[0].ref()][0] for op in step.inputs)
        self._operations = collections.defaultdict(list)  # layer -> needed operations
        for op in step.needed:
            self._operations[step.layer(op)].append(op)
        self._weights = self._weights_of_layers()
        self._trained = {id(weight) for weight in model.trainable_variables}

    def _weights_of_layers(self):
        """Returns the weights of each layer, without those of layers in it."""
        found: dict[str, list] = {}
        seen: set[int] = set()
        for layer in [self.model, *sublayers(self.model)]:
            for weight in layer._trainable_variables + layer._non_trainable_variables:
                if id(weight) not in seen:
                    seen.add(id(weight))
                    found.setdefault(layer_path(layer), []).append(weight)
        return found

    def names(self):
        """Returns layers that compute or have weights, in the order of the forward pass."""
        known = self._operations.keys() | self._weights.keys()
        ordered = [*self.step.layers(), *self._weights, ""]
        return [name for name in dict.fromkeys(ordered) if name in known]

    def layers(self):
        """Returns the `LayerWork` of all layers, in the order of the forward pass."""
        return tuple(
            dataclasses.replace(self._work_of(name), crossing_bytes=crossing)
            for name, crossing in zip(self.names(), self._crossing_bytes(), strict=True)
        )

    def _crossing_bytes(self):
        """Returns the bytes per example that cross the cut after each layer, going forward.

        None marks a cut that a tensor crosses backward, as where a layer is called again.
        Operations outside of any layer are where the last of their inputs is.
        """
        names = self.names()
        number_of = {name: number for number, name in enumerate(names) if name}
        where: dict = {}  # operation -> number of its layer
        furthest: dict = {}  # tensor -> number of the last layer that reads it
        crossing: list[float | None] = [0.0] * len(names)
        for op in self.step.needed:
            if not self.step.is_forward(op) or op.type in tracing.INPUTS:
                continue
            bases = [base_tensor(tensor) for tensor in op.inputs]
            bases = [tensor for tensor in bases if tensor.op in where]
            before = max((where[tensor.op] for tensor in bases), default=0)
            where[op] = number_of.get(self.step.layer(op), before)
            for tensor in bases:
                furthest[tensor.ref()] = max(furthest.get(tensor.ref(), 0), where[op])
            if before > where[op]:
                crossing[where[op] : before] = [None] * (before - where[op])
        for tensor, end in furthest.items():
            for cut in range(where[tensor.deref().op], end):
                if crossing[cut] is not None:
                    crossing[cut] += float(self._sizes[tensor][0])
        return crossing

    def _work_of(self, name):
        own = self._operations.get(name, [])
        by_family: collections.Counter[str] = collections.Counter()
        for op in own:
            by_family[tracing.family(op)] += self._flops[op]
        forward = [op for op in own if self.step.is_forward(op)]
        total = sum(self._flops[op] for op in own)
        forward_flops = sum(self._flops[op] for op in forward)
        weights = self._weights.get(name, [])
        trained = [weight for weight in weights if id(weight) in self._trained]
        return LayerWork(
            name=name,
            kind=by_family.most_common(1)[0][0] if by_family else "elementwise",
            forward_flops=forward_flops,
            backward_flops=total - forward_flops,
            parameters=_numbers(weights),
            trainable_parameters=_numbers(trained),
            weight_shapes=tuple(tuple(weight.shape) for weight in trained),
            kept_bytes=float(sum(self._kept(op) for op in forward)),
            moved_bytes=float(sum(self._moved(op) for op in own)),
            spatial=any(_is_spatial(tensor) for op in own for tensor in op.outputs),
            kernel_bytes=float(max(map(_kernel_bytes, own), default=0)),
        )

    def _kept(self, op):
        """Returns the bytes per example of an operation's outputs that the backward pass reads."""
        if op.type in tracing.VIEWS:
            return 0
        return sum(
            self._sizes[tensor.ref()][0]
            for tensor in op.outputs
            if self.step.last_use(tensor) >= self.step.forward_end
        )

    def _moved(self, op):
        if op.type in tracing.VIEWS or op.type in tracing.INPUTS:
            return 0
        return sum(self._sizes[tensor.ref()][0] for tensor in [*op.inputs, *op.outputs])

    def peaks(self, gradients_stay=True):
        """Returns `Workload.peaks` for the order of the graph.

        Two operations run at a time: the outputs of one exist together with those of the next.
        Gradients of weights are kept until the step ends if `gradients_stay`, else freed at once.
        """
        ends = collections.defaultdict(list)  # index -> sizes of tensors that are last read there
        each = always = 0
        seen = set()
        before = (0, 0)  # with the last operation's outputs, before its inputs are freed
        for op in self.step.needed:
            if op.type in tracing.VIEWS or self.step.is_constant(op):
                continue
            freed = ends.pop(self.step.index(op), [])
            made = [self._sizes[tensor.ref()] for tensor in op.outputs]
            more = sum(a for a, _ in made), sum(b for _, b in made)
            if tracing.writes_in_place(op) and made[0] in freed:
                freed.remove(made[0])
                more = more[0] - made[0][0], more[1] - made[0][1]
            each, always = each + more[0], always + more[1]
            seen.add((float(before[0] + more[0]), float(before[1] + more[1])))
            before = each, always
            for tensor, size in zip(op.outputs, made, strict=True):
                if gradients_stay and tensor.ref() in self.step.results:
                    continue  # kept until the step ends
                last = self.step.last_use(tensor)
                if last > self.step.index(op):
                    ends[last].append(size)
                else:
                    freed.append(size)
            each, always = each - sum(a for a, _ in freed), always - sum(b for _, b in freed)
        return _largest(seen)

    def uncounted(self):
        """Returns the kinds of operations that the graph does not fully describe."""
        return tuple(
            sorted(
                {
                    op.type
                    for op in self.step.needed
                    if op.type in tracing.UNCOUNTED
                    or any(not tensor.shape.is_fully_defined() for tensor in op.outputs)
                }
            )
        )

    def is_resizable(self):
        """Returns whether the model is a network of convolutions for images of any size."""
        kinds = {op.type for op in self.step.needed}
        flat = [
            op
            for op in self.step.needed
            if op.type == "Reshape"
            and self.step.is_forward(op)
            and _is_spatial(op.inputs[0])
            and not _is_spatial(op.outputs[0])
        ]
        one_image = len(self.input_shapes) == 1 and len(self.input_shapes[0]) == 3
        return bool(
            one_image
            and self.input_shapes[0][2] <= min(self.input_shapes[0][:2])  # channels last
            and not flat
            and not kinds & {"Einsum", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"}
        )


def _input_shapes(model, input_shape):
    """Returns the shapes of one example of all inputs."""
    inputs = getattr(model, "inputs", None)
    if not model.built or not inputs:
        raise ValueError(
            f"the inputs of the model {model.name!r} are unknown; build it as a functional or "
            "sequential model, such as keras.Model(x, model(x)) with x = keras.Input(shape)"
        )
    shapes = [tuple(tensor.shape[1:]) for tensor in inputs]
    if input_shape is not None:
        given = tuple(input_shape)
        fits = len(inputs) == 1 and len(given) == len(shapes[0])
        if not fits or any(a not in (None, b) for a, b in zip(shapes[0], given, strict=True)):
            raise ValueError(
                f"the model {model.name!r} accepts inputs of shape {', '.join(map(str, shapes))}, "
                f"not {given}; leave input_shape out, or build the model for it"
            )
        shapes = [given]
    for tensor, shape in zip(inputs, shapes, strict=True):
        if None in shape:
            remedy = "give input_shape" if len(inputs) == 1 else "build the model with it"
            raise ValueError(
                f"the input {tensor.name!r} of the model {model.name!r} has the shape {shape}, "
                f"and a workload needs a known size: {remedy}"
            )
    return shapes


@sharing_functions()
def _with_batch(model, batch):
    """Returns the model, or a copy for this number of examples if layers are stateful.

    A stateful layer accepts no other number of examples than its states have.
    """
    if not any(getattr(layer, "stateful", False) for layer in sublayers(model)):
        return model
    inputs = [
        keras.Input(batch_shape=(batch, *tensor.shape[1:]), dtype=tensor.dtype, name=tensor.name)
        for tensor in model.inputs
    ]
    copy = keras.models.clone_model(model, _nested_like_inputs(model, inputs))
    copy_flags(copy._flatten_layers(), model._flatten_layers())
    for weight, original in zip(copy.weights, model.weights, strict=True):
        weight.trainable = original.trainable
    return copy


def _specs(model, shapes, batch):
    """Returns the specs of the model's inputs for a batch, nested like these inputs."""
    specs = [
        tf.TensorSpec([batch, *shape], tensor.dtype, name=tensor.name)
        for tensor, shape in zip(model.inputs, shapes, strict=True)
    ]
    return _nested_like_inputs(model, specs)


def _nested_like_inputs(model, values):
    functional = getattr(model, "_functional", None) or model
    return keras.tree.pack_sequence_as(functional._inputs_struct, values)


def _largest(pairs):
    """Returns pairs (a, b) with the largest a × n + b for some n from 1 on, by descending a."""
    hull: list[tuple[float, float]] = []
    for a, b in sorted(pairs, reverse=True):
        if hull and b <= hull[-1][1]:
            continue  # smaller for any n
        while len(hull) > 1 and _crossing(hull[-2], (a, b)) > _crossing(hull[-2], hull[-1]):
            hull.pop()
        hull.append((a, b))
    return tuple(hull)


def _crossing(first, second):
    """Returns the n below which the second is larger."""
    return (second[1] - first[1]) / (first[0] - second[0])


def _precision(model):
    """Returns the dtype policy of most weights."""
    numbers: collections.Counter[str] = collections.Counter()
    for layer in sublayers(model):
        numbers[layer.dtype_policy.name] += layer.count_params() if layer.built else 0
    return numbers.most_common(1)[0][0] if numbers else "float32"


def _numbers(weights):
    return float(sum(math.prod(weight.shape) for weight in weights))


def _is_spatial(tensor):
    return tensor.shape.rank == 4 and math.prod(axis or 1 for axis in tensor.shape[1:3]) > 1


def _kernel_bytes(operation):
    """Returns oneDNN's buffers for the gradient of filters that are larger than their images.

    Its kernels for AVX2 require filters that fit into the image. In the kernel for other filters
    each thread adds up its own gradient and requests four times that memory: eight gradients for
    two threads (measured: 75.7 MB for 3×3 filters of 9.4 MB on images of 2×2).
    """
    if operation.type != "Conv2DBackpropFilter" or operation.outputs[0].dtype != tf.float32:
        return 0
    shape = operation.inputs[0].shape
    image = shape[1:3] if operation.get_attr("data_format") == b"NHWC" else shape[2:4]
    filters = operation.outputs[0].shape[:2]
    fits = all(a is None or b <= a for a, b in zip(image, filters, strict=True))
    return 0 if fits else _FILTER_BUFFERS * _bytes(operation.outputs[0])


def _bytes(tensor):
    """Returns the bytes of a tensor; an axis of unknown size counts as one."""
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else [0]
    return math.prod(1 if axis is None else axis for axis in shape) * max(tensor.dtype.size, 0)
