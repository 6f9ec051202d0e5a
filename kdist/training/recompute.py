"""Activations that a step computes again instead of keeping them.

`keras.RematScope`, `keras.remat`, and `tf.recompute_grad` call a function in the forward pass, of
which only the arguments are kept, and once more in the backward pass (Chen et al., "Training Deep
Nets with Sublinear Memory Cost", 2016; https://arxiv.org/abs/1604.06174).

TensorFlow's second call draws other dropout masks than the first, updates moving statistics again,
does not see the masks of sequences, and takes no keyword arguments, so that most layers of Keras
fail. Here the second call repeats the first: seeds and state have the values that they had, and
what it writes is dropped.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from kdist.compat.keras import attach, attached_to, get_keras_mask, in_stateless_scope
from kdist.compat.tensorflow import is_recorded, record_function, unrecorded, variables_read
from kdist.training.replica import step as steps

# Operations that TensorFlow calls stateful, although they return the same again and write nothing.
# Keras calls cuDNN without dropout. Replicas meet again in the second call.
_REPEATABLE = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"),
    *("VarIsInitializedOp", "Assert", "PrintV2", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"),
    *("CollectiveReduceV2", "CollectiveReduceV3", "CollectiveGatherV2", "NcclAllReduce"),
}

_REMEDY = "do not recompute it"

_this_thread = threading.local()

# TensorFlow's own: what kdist's hook finds out about gradients concerns those of a whole loss.
_gradient = tf.GradientTape.gradient


@contextlib.contextmanager
def _noting_changes():
    """Yields {id: (variable, its value before)} of the Keras variables that are written."""
    outer, _this_thread.changes = _changes(), {}
    try:
        yield _this_thread.changes
    finally:
        _this_thread.changes = outer


def _changes():
    return getattr(_this_thread, "changes", None)


def note_change(variable: keras.Variable):
    """Records the value of a variable that is about to be written, for a repetition."""
    changes = _changes()
    if changes is not None and id(variable) not in changes:
        step = steps.current()
        value = variable._value if step is None else step.local(variable._value)
        changes[id(variable)] = variable, tf.identity(value)


def check_adds_no_loss():
    """Raises a ValueError if a function that will be repeated adds a loss."""
    if _changes() is not None:
        raise ValueError(
            "a layer adds a loss in a function that is recomputed (keras.RematScope, keras.remat, "
            "tf.recompute_grad), through which no gradient would pass. Add the loss outside of the "
            "function, or do not recompute this layer"
        )


def recompute_grad(function: Callable) -> Callable:
    """Returns a function like `function`, which the backward pass calls again.

    It takes the place of `tf.recompute_grad`.
    """

    @tf.autograph.experimental.do_not_convert  # as TensorFlow's
    def recomputing(*args, **kwargs):
        step = steps.current()
        # Within another such function, and where no gradient is computed, it is an ordinary call.
        is_one = is_recorded() and not in_stateless_scope()
        if is_one and (step is None or step.can_recompute):
            return _recomputed(function, args, kwargs)
        return function(*args, **kwargs)

    functools.update_wrapper(recomputing, function, updated=())
    return recomputing


def _recomputed(function, args, kwargs):
    arguments = _flat((args, kwargs))
    # Before the call: attention takes the masks off its inputs.
    masks = [get_keras_mask(each) for each in arguments]
    with _noting_changes() as state, variables_read() as read, unrecorded():
        result = function(*args, **kwargs)
    check_written(state.values(), _REMEDY)
    outputs = _with_logits(result)
    copies = list(map(_copy, outputs))
    inputs = list(filter(_is_differentiable, arguments))
    handles = list({id(variable.handle): variable.handle for variable in read()}.values())

    def gradient(*of_outputs):
        zero = _zero_after(of_outputs[0])
        with tf.GradientTape() as tape:
            again = [attach(_copy(each, zero), m) for each, m in zip(arguments, masks, strict=True)]
            inputs_again = list(filter(_is_differentiable, again))
            tape.watch(inputs_again)
            args_again, kwargs_again = tf.nest.pack_sequence_as((args, kwargs), again, True)
            with repetition(state.values(), _REMEDY):
                found = _with_logits(function(*args_again, **kwargs_again))
        targets = list(filter(_is_differentiable, found))
        return _gradient(tape, targets, [*inputs_again, *handles], list(of_outputs))

    record_function(list(filter(_is_differentiable, copies)), [*inputs, *handles], gradient)
    copy_of = {id(each): copy for each, copy in zip(outputs, copies, strict=True)}
    for output in _flat(result):
        attached = attached_to(output)
        if "logits" in attached:
            attached["logits"] = copy_of[id(attached["logits"])]
        attach(copy_of[id(output)], **attached)
    return tf.nest.pack_sequence_as(result, [copy_of[id(each)] for each in _flat(result)], True)


def _with_logits(result):
    """Returns the list of a function's outputs and of the logits that Keras attaches to them."""
    outputs = _flat(result)
    attached = [attached_to(each).get("logits") for each in outputs]
    return [*outputs, *(logits for logits in attached if logits is not None)]


@contextlib.contextmanager
def repetition(state: Iterable[tuple], remedy: str) -> Iterator[None]:
    """Returns a context manager for a second call of a function, which writes nothing.

    Args:
        state: pairs of each variable that the first call has written, and its value before.
        remedy: what a program can do, for the message.

    Raises:
        ValueError: an operation could return something else than in the first call, or writes.
    """
    graph = tf.compat.v1.get_default_graph()
    is_in_graph = not tf.executing_eagerly()
    before = len(graph.get_operations()) if is_in_graph else 0
    with keras.StatelessScope(state, collect_losses=True, initialize_variables=False):
        yield
    if is_in_graph:
        _check_repeatable(graph, graph.get_operations()[before:], remedy)


def check_written(state: Iterable[tuple], remedy: str):
    """Raises a ValueError if trained weights were written: their gradient would be ambiguous.

    Args:
        state: pairs of what a forward pass has written, and its value before.
        remedy: what a program can do, for the message.
    """
    for variable, _ in state:
        if variable.trainable:
            raise ValueError(
                f"{variable.path!r} is trained and written in the forward pass, which cannot be "
                f"repeated. Remove the layer that writes it (such as SpectralNormalization), or "
                f"{remedy}"
            )


def _check_repeatable(graph, operations, remedy):
    """Raises a ValueError if an operation could return something else, or writes again.

    Keras's seeds and variables are not affected: a step does not access them by such operations.
    """
    for operation in operations:
        for kind in _stateful_types(operation.op_def, operation.node_def, graph):
            if kind not in _REPEATABLE:
                raise ValueError(
                    f"{operation.name!r} ({kind}) draws from TensorFlow's own random numbers, or "
                    "writes state, and cannot be repeated. Draw from a keras.random.SeedGenerator "
                    f"of the layer, keep state in its weights, or {remedy}"
                )


def _stateful_types(op_def, node_def, graph):
    """Yields the types of stateful operations: of this one, or of those in its functions."""
    names = [value.func.name for value in node_def.attr.values() if value.HasField("func")]
    functions = [graph._get_function(name) for name in names]
    if not any(functions):
        if op_def.is_stateful:
            yield op_def.name
        return
    for function in filter(None, functions):
        for inner in function.graph.get_operations():
            yield from _stateful_types(inner.op_def, inner.node_def, function.graph)


def _flat(structure):
    return tf.nest.flatten(structure, expand_composites=True)


def _is_differentiable(leaf):
    # Not a variable, which the function reads.
    is_tensor = isinstance(leaf, tf.Tensor)
    return is_tensor and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _copy(leaf, zero=None):
    """Returns a tensor of the same value, or `leaf` if that is none.

    Args:
        leaf: a tensor, or anything else.
        zero: a scalar that is added to floats. TensorFlow's optimizer would otherwise find that two
            calls of a function compute the same, and keep the results of the first.
    """
    if zero is not None and _is_differentiable(leaf):
        return leaf + tf.cast(zero, leaf.dtype)
    return tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf


def _zero_after(tensor):
    """Returns a zero that depends on a tensor, which neither TensorFlow nor XLA finds out.

    XLA ignores control dependencies.
    """
    first = tf.reduce_max(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32))
    return tf.cast(first > float("inf"), tf.float32)
