"""Metrics of one's own, whose state replicas add up.

A replica adds to its own copy of a metric's state, and TensorFlow adds up the copies when the state
is read. An increment that is a sum over rows is therefore right as it is. One that is a mean over
rows must be weighted by the replica's rows, and a constant, such as a count of batches, counts once
per step. Keras's metrics need no correction: they count rows.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from kdist.training.replica.dependence.tensors import rounds
from kdist.training.replica.reduction import all_reduce_sum

_ADDITIONS = ("Add", "AddN", "AddV2", "Sub")


def own_metric_variables(metrics) -> dict[int, keras.metrics.Metric]:
    """Returns {id of a variable: metric} of all metrics whose class is not Keras's own.

    Raises:
        ValueError: such a metric has a `tf.Variable`, which replicas do not add up.
    """
    found, waiting = {}, list(metrics)
    while waiting:
        metric = waiting.pop()
        waiting.extend(getattr(metric, "_metrics", []))
        waiting.extend(m for m in getattr(metric, "metrics", []) if m is not metric)
        if type(metric).__module__.split(".")[0] == "keras":
            continue
        for name, value in vars(metric).items():
            if isinstance(value, tf.Variable) and not isinstance(value, keras.Variable):
                raise ValueError(
                    f"the metric {metric.name!r} keeps its state in a tf.Variable ({name}), which "
                    "replicas would not add up; create it with self.add_weight(...)"
                )
        found.update({id(variable): metric for variable in getattr(metric, "_variables", [])})
    return found


@contextlib.contextmanager
def recorded_results(trainer):
    """Yields {id of a result: (result, function that reads it)} of the model's metrics.

    On a replica `metric.result()` is that of the replica's own rows. A step's logs that are results
    of metrics are therefore read again after the step, from the state of all replicas.
    """
    metrics = (*trainer.metrics, *trainer._metrics)
    found, patched = {}, {id(metric): metric for metric in metrics}.values()
    for metric in patched:
        metric.__dict__["result"] = functools.partial(_recorded, metric, found)
    try:
        yield found
    finally:
        for metric in patched:
            metric.__dict__.pop("result", None)


def _recorded(metric, found):
    result = type(metric).result(metric)
    items = result.items() if isinstance(result, dict) else [(None, result)]
    found.update({id(v): (v, functools.partial(_result, metric, key)) for key, v in items})
    found[id(result)] = result, functools.partial(_result, metric, None)
    return result


def _result(metric, key):
    result = metric.result()
    return result if key is None else result[key]


def _reads_state(step, metric, tensors):
    """Returns True if tensors are computed from variables of a metric that replicas add up."""
    state = [v for v in metric.variables if v.synchronization == "on_read"]
    waiting, seen = list(tensors), set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor.op) in seen:
            continue
        seen.add(id(tensor.op))
        if any(step.is_read_of(variable, tensor) for variable in state):
            return True
        waiting.extend(tensor.op.inputs)
    return False


def corrected(step, metric, variable, value):
    """Returns what a replica assigns to a metric's variable, such that the copies add up.

    Args:
        step: the replica's step.
        metric: the metric.
        variable: the `keras.Variable`.
        value: what the metric assigns: the variable plus increments.

    Raises:
        ValueError: `value` is not the variable plus increments, or these depend on the state.
    """
    value = tf.convert_to_tensor(value)
    if not hasattr(value, "graph"):
        return value
    before, increments = [], []
    waiting = [(1, value)]
    while waiting:
        sign, term = waiting.pop()
        operands = list(term.op.inputs)
        if step.is_read_of(variable, term):
            before.append((sign, term))
        elif term.op.type in _ADDITIONS:
            signs = [1, -1] if term.op.type == "Sub" else [1] * len(operands)
            waiting += [(sign * s, part) for s, part in zip(signs, operands, strict=True)]
        elif term.op.type in ("Cast", "Identity") and not rounds(term.op):
            waiting.append((sign, operands[0]))
        else:
            increments.append((sign, term))
    if [sign for sign, _ in before] != [1]:
        raise ValueError(
            f"the metric {metric.name!r} assigns {variable.name!r} a value that is not "
            f"{variable.name!r} plus an increment. Each replica would assign its own, and they "
            "would be added up. Use assign_add with a sum or a mean over rows, or evaluate the "
            "metric on one device"
        )
    if step.replicas > 1 and _reads_state(step, metric, [term for _, term in increments]):
        raise ValueError(
            f"the metric {metric.name!r} adds to {variable.name!r} what it computes from its own "
            "state, such as a mean that it corrects. Each replica has a part of that state, and "
            "they are added up. Use assign_add with a sum or a mean over rows, as of values and "
            "of their squares, or evaluate the metric on one device"
        )
    own = [sign * step.as_increment(tf.cast(term, value.dtype), term) for sign, term in increments]
    if not own:
        return value
    total = tf.add_n([tf.broadcast_to(part, tf.shape(value)) for part in own])
    if step.has_copies and step.replicas > 1 and variable.aggregation != "sum":
        (total,) = all_reduce_sum([total])  # all copies are equal, and one of them is read
    return tf.cast(before[0][1], value.dtype) + total
