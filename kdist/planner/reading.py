"""Reads the workload of a Keras model off the graph of one training step.

read_workload(model).training_flops

The step is traced and never run. What the backward pass needs of the forward pass is what stands in
the graph, whatever the layers are. It is traced for two and for three examples: what the third one
adds is each example's, and the rest is there whatever the batch is. (TensorFlow writes tensors of
ones of up to 1,000 numbers down as constants: where two examples stay below that and three do not,
three and four are compared.)
"""

import collections
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from kdist.planner import operations
from kdist.planner.tracing import Step, path, sublayers
from kdist.planner.workload import LayerWork, Workload

# Of a filter's gradient, what oneDNN's kernel for any size of filters asks for: see _kernel_bytes.
_SUMS_OF_FILTERS = 2 * 4


def read_workload(model: keras.Model, input_shape: Sequence[int] | None = None) -> Workload:
    """What a training step of `model` has to do.

    Gradients of embeddings are taken as dense, the size of the whole table.

    Args:
        model: a built functional or sequential model.
        input_shape: of one example, without the batch, of a model with one input; needed where the
            model leaves an axis but the batch open.

    Raises:
        ValueError: the model does not know its inputs, an input has an axis of unknown size,
            `input_shape` is none that the model takes, the step is another one for another number
            of examples, or this is called in the scope of a strategy.
    """
    if tf.distribute.has_strategy():
        raise ValueError(
            "read a workload outside of strategy.scope(), where a step is one replica's"
        )
    reading = _Reading(model, _input_shapes(model, input_shape))
    return Workload(
        name=model.name,
        input_shape=reading.input_shapes[0],
        layers=tuple(reading.work_of(name) for name in reading.names()),
        input_bytes=float(reading.input_bytes),
        peaks=reading.peaks(),
        peaks_applied=reading.peaks(gradients_stay=False),
        precision=_precision(model),
        uncounted=reading.uncounted(),
        resizable=reading.is_resizable(),
    )


def _two_steps(model, input_shapes):
    """A number of examples, the step for so many, and the same step for one more."""
    for batch in (2, 3):
        step, larger = (Step(model, _specs(model, input_shapes, n)) for n in (batch, batch + 1))
        if [op.type for op in step.everything] == [op.type for op in larger.everything]:
            return batch, step, larger
    raise ValueError(
        f"a training step of the model {model.name!r} is another one for three examples than for "
        "four: what it does for each cannot be told"
    )


class _Reading:
    """A step for two examples, and of each of its tensors what a third one adds."""

    def __init__(self, model, input_shapes):
        self.model = model
        self.input_shapes = input_shapes
        batch, step, larger = _two_steps(model, input_shapes)
        self.step = step
        self._sizes: dict = {}  # bytes for each example, and bytes always
        self._flops: dict = {}  # for one example
        for op, other in zip(step.everything, larger.everything, strict=True):
            given = step.is_given(op)
            for tensor, tensor_of_more in zip(op.outputs, other.outputs, strict=True):
                size, size_of_more = (0, 0) if given else (_bytes(tensor), _bytes(tensor_of_more))
                each = size_of_more - size
                self._sizes[tensor.ref()] = (each, size - batch * each)
            counted, counted_of_more = operations.flops(op), operations.flops(other)
            self._flops[op] = max(counted - (batch - 1) * (counted_of_more - counted), 0.0)
        self.input_bytes = sum(self._sizes[op.outputs[0].ref()][0] for op in step.inputs)
        self._operations = collections.defaultdict(list)  # layer -> those needed
        for op in step.needed:
            self._operations[step.layer(op)].append(op)
        self._weights = self._weights_of_layers()
        self._trained = {id(weight) for weight in model.trainable_variables}

    def _weights_of_layers(self):
        """The weights that each layer holds itself, not by a layer in it."""
        found: dict[str, list] = {}
        seen: set[int] = set()
        for layer in [self.model, *sublayers(self.model)]:
            for weight in layer._trainable_variables + layer._non_trainable_variables:
                if id(weight) not in seen:
                    seen.add(id(weight))
                    found.setdefault(path(layer), []).append(weight)
        return found

    def names(self):
        """Layers that compute or have weights, in the order of the forward pass."""
        wanted = self._operations.keys() | self._weights.keys()
        everyone = [*self.step.layers(), *self._weights, ""]
        return [name for name in dict.fromkeys(everyone) if name in wanted]

    def work_of(self, name):
        """The `LayerWork` of one layer."""
        mine = self._operations.get(name, [])
        by_family: collections.Counter[str] = collections.Counter()
        for op in mine:
            by_family[operations.family(op)] += self._flops[op]
        forward = [op for op in mine if self.step.is_forward(op)]
        counted = sum(self._flops[op] for op in mine)
        of_forward = sum(self._flops[op] for op in forward)
        weights = self._weights.get(name, [])
        return LayerWork(
            name=name,
            kind=by_family.most_common(1)[0][0] if by_family else "elementwise",
            forward_flops=of_forward,
            backward_flops=counted - of_forward,
            parameters=_numbers(weights),
            trainable_parameters=_numbers(w for w in weights if id(w) in self._trained),
            kept_bytes=float(sum(self._kept(op) for op in forward)),
            moved_bytes=float(sum(self._moved(op) for op in mine)),
            spatial=any(_is_spatial(tensor) for op in mine for tensor in op.outputs),
            kernel_bytes=float(max(map(_kernel_bytes, mine), default=0)),
        )

    def _kept(self, op):
        """Bytes for each example of its outputs that the backward pass reads."""
        if op.type in operations.VIEWS:
            return 0
        return sum(
            self._sizes[tensor.ref()][0]
            for tensor in op.outputs
            if self.step.last_use(tensor) >= self.step.forward_end
        )

    def _moved(self, op):
        if op.type in operations.VIEWS or op.type in operations.GIVEN:
            return 0
        return sum(self._sizes[tensor.ref()][0] for tensor in [*op.inputs, *op.outputs])

    def peaks(self, gradients_stay=True):
        """As `Workload.peaks`, by the order in which the graph was written down.

        Two operations run at a time: with what one puts out, there is what the next one does.

        Args:
            gradients_stay: those of weights until the step ends; else each goes once it is there.
        """
        ends = collections.defaultdict(list)  # place -> sizes of what is read there last
        each = always = 0
        seen = set()
        before = (0, 0)  # with the last operation's outputs, and before it gave any memory back
        for op in self.step.needed:
            if op.type in operations.VIEWS or self.step.is_given(op):
                continue
            dying = ends.pop(self.step.place(op), [])
            made = [self._sizes[tensor.ref()] for tensor in op.outputs]
            more = sum(a for a, _ in made), sum(b for _, b in made)
            if operations.writes_in_place(op) and made[0] in dying:
                dying.remove(made[0])
                more = more[0] - made[0][0], more[1] - made[0][1]
            each, always = each + more[0], always + more[1]
            seen.add((float(before[0] + more[0]), float(before[1] + more[1])))
            before = each, always
            for tensor, size in zip(op.outputs, made, strict=True):
                if gradients_stay and tensor.ref() in self.step.results:
                    continue  # lives on until the step's end
                last = self.step.last_use(tensor)
                if last > self.step.place(op):
                    ends[last].append(size)
                else:
                    dying.append(size)
            each, always = each - sum(a for a, _ in dying), always - sum(b for _, b in dying)
        return _largest(seen)

    def uncounted(self):
        """Kinds of operations of which too little stands in the graph."""
        return tuple(
            sorted(
                {
                    op.type
                    for op in self.step.needed
                    if op.type in operations.UNCOUNTED
                    or any(not tensor.shape.is_fully_defined() for tensor in op.outputs)
                }
            )
        )

    def is_resizable(self):
        """Whether other images mean other sizes of the same layers: a network of convolutions."""
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
    """The shapes of one example of all inputs."""
    inputs = getattr(model, "inputs", None)
    if not model.built or not inputs:
        raise ValueError(
            f"the model {model.name!r} does not know its inputs; build it as a functional or "
            "sequential model, such as keras.Model(x, model(x)) with x = keras.Input(shape)"
        )
    shapes = [tuple(tensor.shape[1:]) for tensor in inputs]
    if input_shape is not None:
        given = tuple(input_shape)
        fits = len(inputs) == 1 and len(given) == len(shapes[0])
        if not fits or any(a not in (None, b) for a, b in zip(shapes[0], given, strict=True)):
            raise ValueError(
                f"the model {model.name!r} takes inputs of shape {', '.join(map(str, shapes))}, "
                f"which {given} is none of; leave input_shape out, or build the model for it"
            )
        shapes = [given]
    for tensor, shape in zip(inputs, shapes, strict=True):
        if None in shape:
            remedy = "say which by input_shape" if len(inputs) == 1 else "build the model with it"
            raise ValueError(
                f"the input {tensor.name!r} of the model {model.name!r} has the shape {shape}, "
                f"and a workload is that of one size: {remedy}"
            )
    return shapes


def _specs(model, shapes, batch):
    """The model's inputs for so many examples, as nested as the model takes them."""
    specs = [
        tf.TensorSpec([batch, *shape], tensor.dtype, name=tensor.name)
        for tensor, shape in zip(model.inputs, shapes, strict=True)
    ]
    functional = getattr(model, "_functional", None) or model
    return keras.tree.pack_sequence_as(functional._inputs_struct, specs)


def _largest(pairs):
    """Of (a, b), those for which a × n + b is the largest for some n from 1 on, by falling a."""
    hull: list[tuple[float, float]] = []
    for a, b in sorted(pairs, reverse=True):
        if hull and b <= hull[-1][1]:
            continue  # less for any n
        while len(hull) > 1 and _crossing(hull[-2], (a, b)) > _crossing(hull[-2], hull[-1]):
            hull.pop()
        hull.append((a, b))
    return tuple(hull)


def _crossing(first, second):
    """The n below which the second is the larger."""
    return (second[1] - first[1]) / (first[0] - second[0])


def _precision(model):
    """The dtype policy of most weights."""
    numbers: collections.Counter[str] = collections.Counter()
    for layer in sublayers(model):
        numbers[layer.dtype_policy.name] += layer.count_params() if layer.built else 0
    return numbers.most_common(1)[0][0] if numbers else "float32"


def _numbers(weights):
    return float(sum(math.prod(weight.shape) for weight in weights))


def _is_spatial(tensor):
    return tensor.shape.rank == 4 and math.prod(axis or 1 for axis in tensor.shape[1:3]) > 1


def _kernel_bytes(operation):
    """Buffers of oneDNN's kernel for the gradient of filters that are larger than their images.

    Its kernels for AVX2 take filters that fit into the image. The one for the others has each of
    its threads add up a gradient of its own, and asks for four times the room that these take: for
    two threads eight gradients (measured: 75.7 MB for 3×3 filters of 9.4 MB on images of 2×2).
    """
    if operation.type != "Conv2DBackpropFilter" or operation.outputs[0].dtype != tf.float32:
        return 0
    shape = operation.inputs[0].shape
    image = shape[1:3] if operation.get_attr("data_format") == b"NHWC" else shape[2:4]
    filters = operation.outputs[0].shape[:2]
    fits = all(a is None or b <= a for a, b in zip(image, filters, strict=True))
    return 0 if fits else _SUMS_OF_FILTERS * _bytes(operation.outputs[0])


def _bytes(tensor):
    """Bytes of a tensor; an axis of unknown size counts as one."""
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else [0]
    return math.prod(1 if axis is None else axis for axis in shape) * max(tensor.dtype.size, 0)
