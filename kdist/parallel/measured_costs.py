"""What a model's operations take on a device of this machine, each measured by itself.

costs = measure_costs(model, batch_size=64)      # {"stem": 3.1e-05, …}
plan = suggest(model, Layout(pipeline=2), costs=costs)
"""

import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from kdist.parallel.split_plan import functional_graph, nodes_of
from kdist.training.keras_internals import with_call_context
from kdist.training.together import in_another_thread


def measure_costs(model: keras.Model, batch_size: int = 32, repeats: int = 5) -> dict[str, float]:
    """Seconds of each operation, forward and backward, for one example; nested models are one.

    Each runs on the first device (GPU 0, where there is one), on what the operations before it give
    for random inputs (zeros, where inputs are whole numbers). What a call that computes nothing
    takes is subtracted. Afterwards the model is as it was.

    Args:
        model: functional or Sequential, built, with inputs of known sizes.
        batch_size: examples at a time. Defaults to 32.
        repeats: calls that are timed; their median counts. Defaults to 5.

    Raises:
        ValueError: a number below 1, or an input has an axis of unknown size.
    """
    for name, value in (("batch_size", batch_size), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}={value}: take 1 or more")
    graph = functional_graph(model)
    before = [(variable, variable.numpy()) for variable in model.variables]
    try:
        # Outside of a strategy's scope: a copy of a variable is as good as another.
        return in_another_thread(lambda: _measured(graph, batch_size, repeats))
    finally:
        for variable, value in before:
            variable.assign(value)


def _measured(graph, batch_size, repeats):
    values = {id(tensor): _example(tensor, batch_size) for tensor in graph.inputs}
    costs: dict[str, float] = {}
    for node in nodes_of(graph):
        inputs = [values[id(tensor)] for tensor in node.input_tensors]
        outputs, seconds = _forward_and_backward(node, inputs, repeats)
        values.update({id(x): y for x, y in zip(node.outputs, outputs, strict=True)})
        name = node.operation.name  # one that is called twice has both calls' seconds
        costs[name] = costs.get(name, 0.0) + seconds / batch_size
    return costs


def _example(tensor, batch_size):
    shape = [batch_size, *tensor.shape[1:]]
    if None in shape:
        raise ValueError(
            f"the input {tensor.name!r} has the shape {tuple(tensor.shape)}, and costs are those "
            "of one size: build the model with it"
        )
    dtype = tf.as_dtype(tensor.dtype)
    if dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(shape, seed=(0, 0)), dtype)
    return tf.zeros(shape, dtype)


def _forward_and_backward(node, inputs, repeats):
    """(outputs, seconds) of a call of an operation."""
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
    taken = []
    for _ in range(repeats + 1):  # the first call may have something to make ready
        start = time.perf_counter()
        function(*inputs)
        tf.test.experimental.sync_devices()  # GPUs are still computing when a call returns
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
