"""Measures the seconds of a model's operations on a device of this machine."""

import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from kdist.compat.keras import with_call_context
from kdist.parallel.placement.patterns import functional_graph, nodes_of
from kdist.training.scopes import in_new_thread


def measure_costs(model: keras.Model, batch_size: int = 32, repeats: int = 5) -> dict[str, float]:
    """Returns measured seconds of each operation's forward and backward pass, per example.

    Each operation runs on the first device (GPU 0 if there is one). Inputs are the outputs of the
    operations before, for random inputs of the model (zeros for integer inputs). The time of an
    empty call is subtracted. A nested model counts as one operation. The model is left unchanged.

    Args:
        model: built functional or Sequential model with inputs of known shapes.
        batch_size: examples per call. Defaults to 32.
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
