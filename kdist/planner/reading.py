"""Reads the workload of a Keras model off the graph of one training step.

read_workload(model).training_flops

The step is traced for one example and never run. What the backward pass needs of the forward pass
is what stands in the graph, whatever the layers are.
"""

import collections
import contextlib
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from kdist.planner import operations
from kdist.planner.workload import LayerWork, Workload


def read_workload(model: keras.Model, input_shape: Sequence[int] | None = None) -> Workload:
    """What a training step of `model` has to do.

    Args:
        model: a built model.
        input_shape: of one example, without the batch, of a model with one input; needed where the
            model leaves an axis but the batch open.

    Raises:
        ValueError: the model is not built, an input has an axis of unknown size, or `input_shape`
            is none that the model takes.
    """
    trace = _Trace(model, input_shape)
    layers = [trace.work_of(name) for name in trace.names()]
    return Workload(
        name=model.name,
        input_shape=trace.input_shapes[0],
        layers=tuple(layers),
        input_bytes=float(trace.input_bytes),
        peaks=trace.peaks(),
        precision=_precision(model),
        uncounted=tuple(sorted({op.type for op in trace.needed} & operations.UNCOUNTED)),
        resizable=trace.resizable,
    )


class _Trace:
    """The graph of a step, and which of a model's layers each operation belongs to."""

    def __init__(self, model, input_shape=None):
        self.model = model
        specs = _input_specs(model, input_shape)
        flat = tf.nest.flatten(specs)
        self.input_shapes = [tuple(spec.shape[1:]) for spec in flat]
        self.input_bytes = sum(math.prod(spec.shape) * spec.dtype.size for spec in flat)
        self.resizable = True
        self._calls: list[tuple[int, int, str]] = []  # first, behind the last operation, layer

        def step(inputs):
            graph = tf.compat.v1.get_default_graph()
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(model(inputs, training=True))
                loss = tf.add_n([tf.reduce_sum(tf.cast(y, tf.float32)) for y in outputs])
            self.forward = len(graph.get_operations())
            gradients = tape.gradient(loss, model.trainable_variables)
            return [tf.convert_to_tensor(g) for g in gradients if g is not None] + [loss]

        with self._noting_calls(), _functions_in_line():
            traced = tf.function(step, autograph=False).get_concrete_function(specs)
        self._graph = traced.graph  # operations hold their graph by a weak reference only
        self._results = {_root(tensor).ref() for tensor in traced.graph.outputs}
        everything = traced.graph.get_operations()
        self.order = {op: place for place, op in enumerate(everything)}
        self.needed = _needed(everything, traced.graph.outputs)
        self._layer_of = self._layers(everything)
        self._of_weights = _of_weights(everything)

    @contextlib.contextmanager
    def _noting_calls(self):
        """Notes from which operation to which each layer was called, the innermost first."""
        layers = [x for x in _sublayers(self.model) if not isinstance(x, keras.Model)]

        def noting(layer, call):
            def noted(*args, **kwargs):
                graph = tf.compat.v1.get_default_graph()
                began = len(graph.get_operations())
                outputs = call(*args, **kwargs)
                self._calls.append((began, len(graph.get_operations()), _path(layer)))
                if isinstance(layer, keras.layers.Flatten):
                    self.resizable &= math.prod(args[0].shape[1:-1]) <= 1
                return outputs

            return noted

        for layer in layers:
            object.__setattr__(layer, "call", noting(layer, layer.call))
        try:
            yield
        finally:
            for layer in layers:
                object.__delattr__(layer, "call")

    def _layers(self, everything):
        """The layer of each operation; a gradient's is that of what it is the gradient of.

        TensorFlow names gradients "gradient_tape/" and the scope of the operation. A sum of several
        gradients of one tensor has no such name, and goes to where the first of them came from.
        """
        named: dict[str, str | None] = {}
        for began, ended, layer in self._calls:
            for op in everything[began:ended]:
                named.setdefault(op.name, layer)
        for name, layer in list(named.items()):
            scope = name.rpartition("/")[0]
            while scope:
                named[scope] = layer if named.get(scope, layer) == layer else None
                scope = scope.rpartition("/")[0]
        found: dict[tf.Operation, str] = {}
        for op in everything:
            path = op.name.removeprefix("gradient_tape/")
            while path and path not in named:
                path = path.rpartition("/")[0]
            layer = named.get(path)
            if layer is None and op.type == "AddN":
                layer = found[op.inputs[0].op]
            found[op] = layer or ""
        return found

    def names(self):
        """Layers that compute or have weights, in the order of the forward pass."""
        called = [layer for _, _, layer in sorted(self._calls)]
        owning = [_path(layer) for layer in self._owners().values()]
        computing = {self._layer_of[op] for op in self.needed}
        wanted = computing | set(owning)
        return [name for name in dict.fromkeys([*called, *owning, ""]) if name in wanted]

    def _owners(self):
        """The innermost layer of each weight."""
        owners = {}
        for layer in [self.model, *_sublayers(self.model)]:
            for weight in layer.weights:
                owners[weight.path] = layer
        return owners

    def work_of(self, name):
        """The `LayerWork` of one layer."""
        mine = [op for op in self.needed if self._layer_of[op] == name]
        by_family: collections.Counter[str] = collections.Counter()
        forward = backward = 0.0
        for op in mine:
            count = operations.flops(op)
            by_family[operations.family(op)] += count
            if self.order[op] < self.forward:
                forward += count
            else:
                backward += count
        owners = self._owners()
        weights = [w for w in self.model.weights if _path(owners.get(w.path)) == name]
        return LayerWork(
            name=name,
            kind=by_family.most_common(1)[0][0] if by_family else "elementwise",
            forward_flops=forward,
            backward_flops=backward,
            parameters=float(sum(math.prod(w.shape) for w in weights)),
            trainable_parameters=float(sum(math.prod(w.shape) for w in weights if w.trainable)),
            kept_bytes=float(sum(_bytes(tensor) for tensor in self._kept(mine))),
            moved_bytes=float(sum(self._moved(op) for op in mine)),
            spatial=any(_is_spatial(tensor) for op in mine for tensor in op.outputs),
        )

    def _kept(self, mine):
        """Outputs of these operations that the backward pass reads; of each memory one."""
        kept = {}
        for op in mine:
            if self.order[op] >= self.forward or op.type in operations.VIEWS:
                continue
            for tensor in op.outputs:
                if tensor.ref() not in self._of_weights and self._last_use(tensor) >= self.forward:
                    kept[tensor.ref()] = tensor
        return kept.values()

    def _last_use(self, tensor):
        """Place of the last operation that reads this memory, under whatever name."""
        last = -1
        for reader in tensor.consumers():
            if reader not in self.needed or reader.type in operations.GIVEN:
                continue
            if reader.type in operations.VIEWS:
                last = max([last, *(self._last_use(out) for out in reader.outputs)])
            else:
                last = max(last, self.order[reader])
        return last

    def _moved(self, op):
        if op.type in operations.VIEWS or op.type in operations.GIVEN:
            return 0
        touched = [*op.inputs, *op.outputs]
        return sum(_bytes(tensor) for tensor in touched if tensor.ref() not in self._of_weights)

    def peaks(self):
        """As `Workload.peaks`, by the order in which the graph was written down.

        The gradients of the weights are the same size whatever the batch is, and live on until the
        step's end.
        """
        ends = collections.defaultdict(list)
        alive = always = 0
        seen = set()
        for op in self.needed:
            if op.type in operations.VIEWS or op.type in operations.GIVEN - {"Placeholder"}:
                continue
            place = self.order[op]
            dying = sum(ends.pop(place, []))
            if operations.writes_in_place(op):
                alive -= dying
            for tensor in op.outputs:
                if tensor.ref() in self._of_weights:
                    continue
                if tensor.ref() in self._results:
                    always += _bytes(tensor)
                else:
                    alive += _bytes(tensor)
                    ends[max(place, self._last_use(tensor))].append(_bytes(tensor))
            seen.add((float(alive), float(always)))
            alive -= sum(ends.pop(place, []))
            if not operations.writes_in_place(op):
                alive -= dying
        return _largest(seen)


@contextlib.contextmanager
def _functions_in_line():
    """Has functions that layers call written into the graph itself, where they can be read."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _input_specs(model, input_shape):
    """One example of the model's inputs, as nested as the model takes them."""
    inputs = getattr(model, "inputs", None)
    if not model.built or not inputs:
        raise ValueError(
            f"the model {model.name!r} does not know its inputs; build it as a functional model, "
            "or call it once on a keras.Input"
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
            raise ValueError(
                f"the input {tensor.name!r} of the model {model.name!r} has the shape {shape}: "
                "say the size that it will be trained on by input_shape, or build the model with it"
            )
    specs = [
        tf.TensorSpec([1, *shape], tensor.dtype, name=tensor.name)
        for tensor, shape in zip(inputs, shapes, strict=True)
    ]
    return tf.nest.pack_sequence_as(model._inputs_struct, specs)


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
    """The policy of most of the model: mixed where any layer computes in 16 bits."""
    policies = [layer.dtype_policy for layer in _sublayers(model)]
    short = [p.name for p in policies if p.compute_dtype in ("float16", "bfloat16")]
    return short[0] if short else "float32"


def _sublayers(model):
    """All layers in a model, the outer ones before those in them."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def _path(layer):
    return "" if layer is None or isinstance(layer, keras.Model) else layer.path or layer.name


def _root(tensor):
    """The tensor whose memory this one is."""
    while tensor.op.type in operations.VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def _needed(everything, outputs):
    """Operations without which a step would give something else, as TensorFlow prunes it."""
    wanted = [tensor.op for tensor in outputs] + [
        op for op in everything if op.type.startswith("Assign")
    ]
    seen = set()
    while wanted:
        op = wanted.pop()
        if op not in seen:
            seen.add(op)
            wanted.extend(tensor.op for tensor in op.inputs)
    return dict.fromkeys(op for op in everything if op in seen)


def _of_weights(everything):
    """Tensors that depend on weights and constants alone: there whatever the batch is."""
    found = set()
    for op in everything:
        if op.type in operations.GIVEN:
            alone = op.type != "Placeholder" or op.outputs[0].dtype == tf.resource
        else:
            alone = all(tensor.ref() in found for tensor in op.inputs)
        if alone:
            found.update(tensor.ref() for tensor in op.outputs)
    return found


def _is_spatial(tensor):
    return tensor.shape.rank == 4 and math.prod(tensor.shape.as_list()[1:3]) > 1


def _bytes(tensor):
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else [0]
    return math.prod(1 if axis is None else axis for axis in shape) * max(tensor.dtype.size, 0)
