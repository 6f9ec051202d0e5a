"""One training step of a Keras model as a graph that is traced and never run."""

import contextlib

import keras
import tensorflow as tf

from kdist.planner import operations


class Step:
    """Forward and backward pass on a batch of known size.

    The loss is the sum of the squares of all outputs and of the model's own losses: not a plain
    sum, whose gradient would be a constant that takes no memory.

    Attributes:
        everything: all operations, in the order in which they were written down.
        needed: those without which the step would give something else, as TensorFlow prunes it.
        results: the tensors that a step leaves: gradients of weights, and the loss.
        inputs: operations that stand for the model's inputs.
        forward_end: the place behind the last operation of the forward pass.
    """

    def __init__(self, model, specs):
        self.model = model
        self._calls: list[tuple[int, int, str]] = []  # first, behind the last operation, layer
        self._outer = None

        def step(inputs):
            self._outer = tf.compat.v1.get_default_graph()
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(model(inputs, training=True))
                squares = [tf.reduce_sum(tf.square(tf.cast(y, tf.float32))) for y in outputs]
                loss = tf.add_n(squares + [tf.cast(x, tf.float32) for x in model.losses])
            self.forward_end = len(self._outer.get_operations())
            gradients = tape.gradient(loss, model.trainable_variables)
            return [tf.convert_to_tensor(g) for g in gradients if g is not None] + [loss]

        with self._noting_calls(), _functions_in_line():
            try:
                traced = tf.function(step, autograph=False).get_concrete_function(specs)
            finally:
                model._clear_losses()  # those of the trace are no numbers
        self._graph = traced.graph  # operations hold their graph by a weak reference only
        self.everything = traced.graph.get_operations()
        captured = {placeholder.op for _, placeholder in traced.graph.captures}
        self.inputs = {
            op for op in self.everything if op.type == "Placeholder" and op not in captured
        }
        self.results = {root(tensor).ref() for tensor in traced.graph.outputs}
        self.needed = _needed(self.everything, traced.graph.outputs)
        self._place = {op: place for place, op in enumerate(self.everything)}
        self._layer_of = self._layers()

    def is_forward(self, operation):
        """Whether it belongs to the forward pass."""
        return self._place[operation] < self.forward_end

    def is_given(self, operation):
        """Whether it stands for weights, constants and the like, but not for an example."""
        return operation.type in operations.GIVEN and operation not in self.inputs

    def place(self, operation):
        """Where in the order it stands."""
        return self._place[operation]

    def layer(self, operation):
        """The path of the innermost layer that it belongs to; "" where there is none."""
        return self._layer_of[operation]

    def layers(self):
        """Paths of all layers that were called, in the order of their first operations."""
        return list(dict.fromkeys(layer for _, _, layer in sorted(self._calls)))

    def last_use(self, tensor):
        """Place of the last operation that reads this memory, under whatever name; -1 if none."""
        last = -1
        for reader in tensor.consumers():
            if reader not in self.needed or reader.type in operations.GIVEN:
                continue
            if reader.type in operations.VIEWS:
                last = max([last, *(self.last_use(out) for out in reader.outputs)])
            else:
                last = max(last, self._place[reader])
        return last

    @contextlib.contextmanager
    def _noting_calls(self):
        """Notes from which operation to which each layer was called, the innermost first."""
        layers = [x for x in sublayers(self.model) if not isinstance(x, keras.Model)]
        before = [(layer, vars(layer).get("call")) for layer in layers]
        try:
            for layer in layers:
                object.__setattr__(layer, "call", self._noting(layer, layer.call))
            yield
        finally:
            for layer, own in before:
                if own is not None:
                    object.__setattr__(layer, "call", own)
                elif "call" in vars(layer):
                    object.__delattr__(layer, "call")

    def _noting(self, layer, call):
        def noted(*args, **kwargs):
            graph = tf.compat.v1.get_default_graph()
            began = len(graph.get_operations())
            outputs = call(*args, **kwargs)
            if graph is self._outer:  # not the body of a loop, whose operations are its own
                self._calls.append((began, len(graph.get_operations()), path(layer)))
            return outputs

        return noted

    def _layers(self):
        """The layer of each operation; a gradient's is that of what it is the gradient of.

        TensorFlow names gradients "gradient_tape/" and the scope of the operation. A sum of several
        gradients of one tensor has no such name, and goes to where the first of them came from.
        """
        forward = dict.fromkeys((op.name for op in self.everything[: self.forward_end]), "")
        noted: set[str] = set()
        for began, ended, layer in self._calls:
            names = {op.name for op in self.everything[began:ended]} - noted
            forward.update(dict.fromkeys(names, layer))
            noted |= names
        scopes: dict[str, str] = {}
        for name, layer in forward.items():
            scope = name.rpartition("/")[0]
            while scope:
                scopes[scope] = layer if scopes.get(scope, layer) == layer else ""
                scope = scope.rpartition("/")[0]
        found = {op: forward[op.name] for op in self.everything[: self.forward_end]}
        for op in self.everything[self.forward_end :]:
            name = op.name.removeprefix("gradient_tape/")
            while name and name not in forward and name not in scopes:
                name = name.rpartition("/")[0]
            found[op] = forward.get(name) or scopes.get(name, "")
            if not found[op] and op.type == "AddN":
                found[op] = found[op.inputs[0].op]
        return found


def sublayers(model):
    """All layers in a model, the outer ones before those in them."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def path(layer):
    """A layer's name within its model; "" for the model itself."""
    return "" if isinstance(layer, keras.Model) else layer.path or layer.name


def root(tensor):
    """The tensor whose memory this one is."""
    while tensor.op.type in operations.VIEWS:
        several = tensor.op.type == "IdentityN"
        tensor = tensor.op.inputs[tensor.value_index if several else 0]
    return tensor


@contextlib.contextmanager
def _functions_in_line():
    """Has functions that layers call written into the graph itself, where they can be read."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _needed(everything, outputs):
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
