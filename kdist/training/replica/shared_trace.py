"""One trace of the forward and backward passes for all replicas of a process.

TensorFlow traces a step once per replica, and optimizes and starts the operations of all replicas,
which takes minutes for deep models on many devices. Without collectives, the passes of two replicas
differ only in their rows, variables, and random seeds. `SharedTrace` therefore traces those of the
first replica as a function of these, and each replica calls it.
"""

import collections
import dataclasses
import logging

import tensorflow as tf

from kdist.compat.tensorflow import call_with_captures, function_of_its_own, is_recorded
from kdist.training.replica.row_shares import leaves_of, tensors_of

_logger = logging.getLogger(__name__)

# Numbers of a `RowShare`, each of which may be a tensor.
_NUMBERS = ("rows", "micro_rows", "batch_rows")


class NotSharedError(Exception):
    """The passes cannot be shared, so each replica has to trace its own."""


class SharedTrace:
    """Forward and backward passes that several replicas call, in one trace of a step.

    Replicas whose rows differ in shape, or in what is known about their number, have traces of
    their own.
    """

    def __init__(self):
        self._passes = {}
        self._functions = {}
        self._refused = set()
        self._calls = collections.Counter()

    def call(self, step, part, function, *args):
        """Returns the outputs of `function(*args)` on a replica.

        Replicas make the same calls in the same order.

        Args:
            step: the replica's `ReplicaStep`.
            part: the name of this part of the step.
            function: the part, in which replicas do not meet.
            *args: structures of tensors and None.

        Raises:
            NotSharedError: the replica has to trace `function` itself.
        """
        self._calls[step.replica] += 1
        key = self._calls[step.replica], part
        if key in self._refused or is_recorded():
            raise NotSharedError
        try:
            passes, tensors = self._found(step, key, function, args)
        except Exception as error:  # if it is one of the program, its own trace raises it, too
            _logger.debug("replicas share no trace of %s: %s", part, error)
            self._refused.add(key)
            raise NotSharedError from error
        return passes(step, tensors)

    def map(self, function, tensors, key):
        """Returns `function(tensors)`, of a function that knows of no replica and no variable.

        Args:
            function: function of a list of tensors.
            tensors: the tensors.
            key: what the function depends on besides them.
        """
        if is_recorded():
            return function(tensors)
        specs = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
        if (key, specs) not in self._functions:
            self._functions[key, specs] = _not_inlined(function).get_concrete_function([*specs])
        # Where the call is, the function runs.
        return call_with_captures(self._functions[key, specs], tensors, [])

    def _found(self, step, key, function, args):
        """Returns the `_Passes` of a call, and the tensors that it takes."""
        numbers = {name: getattr(step.share, name) for name in _NUMBERS}
        inputs = [args, {name: n for name, n in numbers.items() if tf.is_tensor(n)}]
        tensors = tensors_of(inputs)
        are_tensors = tuple(map(tf.is_tensor, tf.nest.flatten(args, expand_composites=True)))
        known = tuple(n for n in numbers.values() if not tf.is_tensor(n))
        specs = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        key = key, are_tensors, specs, known, step.share.may_be_empty, step.share.is_repeated
        if key not in self._passes:
            self._passes[key] = _Passes(step, function, inputs, tensors)
        return self._passes[key], tensors


class _Passes:
    """The passes of one replica, as a function of what differs between replicas."""

    def __init__(self, step, function, inputs, tensors):
        def passes(replica, tensors):
            # Where the call is, the function runs.
            with tf.device(None):
                args, numbers = _with_tensors(inputs, tensors)
                share = dataclasses.replace(step.share, tensors=leaves_of(args), **numbers)
                self._step = step.in_function(share, replica)
                with self._step.running():
                    outputs = function(*args)
                _check_are_tensors(outputs)
                if any(self._step.added.values()):
                    raise NotSharedError("layers add losses, which the step may read")
                if self._step.has_repeated_changes:
                    raise NotSharedError("a micro-step undoes changes of state after the passes")
                self._found = self._step.dependence.found(outputs)
            return outputs

        self._function = _not_inlined(passes).get_concrete_function(
            tf.TensorSpec([], tf.int32), list(tensors)
        )
        graph = self._function.graph
        for operation in graph.get_operations():
            _check_is_shared(operation)
        value_of = tf.distribute.get_strategy().extended.value_container
        self._variables = {id(v.handle): value_of(v) for v in graph.variables}
        for captured in self._function.captured_inputs:
            self._check_is_found(captured)

    def _check_is_found(self, captured):
        """Raises an error for a captured tensor that may differ between replicas."""
        is_constant = not hasattr(captured, "graph") and captured.dtype != tf.resource
        if not is_constant and id(captured) not in self._variables:
            raise NotSharedError(f"the passes use {captured}")

    def __call__(self, step, tensors):
        captures = [
            step.local(self._variables[id(c)]).handle if id(c) in self._variables else c
            for c in self._function.captured_inputs
        ]
        # TensorFlow would make a copy of the function for each constant.
        replica = tf.compat.v1.placeholder_with_default(step.replica, [])
        outputs = call_with_captures(self._function, [replica, *tensors], captures)
        step.take_over(self._step, self._found, outputs)
        return outputs


def _not_inlined(function):
    return function_of_its_own(function, experimental_attributes={"_noinline": True})


def _with_tensors(structure, tensors):
    """Returns a structure with other tensors, in the order of `tensors_of`."""
    others = iter(tensors)
    leaves = tf.nest.flatten(structure, expand_composites=True)
    leaves = [next(others) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)


def _check_are_tensors(outputs):
    """Raises an error if a call would return less than the function that it calls."""
    for leaf in tf.nest.flatten(outputs, expand_composites=True):
        if leaf is not None and not tf.is_tensor(leaf):
            raise NotSharedError(f"an output is {leaf!r}")
        if getattr(leaf, "_keras_mask", None) is not None:
            raise NotSharedError("predictions have a mask")


def _check_is_shared(operation):
    """Raises an error for an operation whose results would be wrong on another replica."""
    if operation.name.rpartition("/")[-1].startswith("replica_id_in_sync_group"):
        raise NotSharedError(f"{operation.name} is the index of a replica")
    if operation.op_def.is_stateful and "seed2" in {a.name for a in operation.op_def.attr}:
        raise NotSharedError(f"{operation.name} would draw the same numbers on all replicas")
    if operation.device:
        raise NotSharedError(f"{operation.name} is on {operation.device}")
