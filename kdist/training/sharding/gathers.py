"""Gathers of divided weights within a replica's step, in the forward and in the backward pass.

A replica gathers a weight where a layer reads it. TensorFlow starts an operation as soon as its
inputs exist, so that all weights would be gathered at the beginning of a step. Therefore each
gather waits for the layers that use the weight before the previous one: a device holds the weight
that it computes with, and the next one.

Gradients read the weights again. `WeightGathers.repeat_for_gradients` lets them read a second
gather, which waits in the same way. Otherwise a device would hold all weights after the forward
pass. Nothing else is computed twice, unlike with `tf.recompute_grad`. A second gather also waits
until the gradients before it have been added up over replicas. Otherwise a replica that is ahead of
the others would hold all its gradients.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import tensorflow as tf

from kdist.compat.tensorflow import repeat_operation, replace_input, unrecorded
from kdist.training.replica.reduction import GATHER, of_all_replicas
from kdist.training.sharding.sizes import HELD, is_kept
from kdist.training.sharding.weights import ShardedVariable

# Operations that only rearrange or convert a weight. What gradients read of them is computed again.
_REARRANGE = {
    *("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice", "Transpose"),
}

# Operations that need the shape of a weight only, and run as soon as it exists.
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}


@dataclasses.dataclass(frozen=True, eq=False)
class _Gather:
    """Gather of a weight from its parts."""

    variable: ShardedVariable
    parts: Sequence[tf.Tensor]

    def whole_after(self, operations: Sequence[tf.Operation]) -> tf.Tensor:
        """Returns the weight, gathered when the operations have ended."""
        with unrecorded(), tf.name_scope(GATHER), tf.control_dependencies(operations):
            received = []
            for part in self.parts:
                # The device that sends waits as well, so that nothing is received early.
                with tf.device(part.device):
                    received.append(tf.identity(part))
            return self.variable.shard.division.merge(received)


@dataclasses.dataclass(frozen=True)
class _BackwardPass:
    """Operations of a gradient: those from number `first` to before `end` of the graph."""

    first: int
    end: int
    targets: Sequence[tf.Operation]


class WeightGathers:
    """Gathers of the divided weights of one replica, while its step is traced.

    Args:
        weights: the divided weights of the model.
    """

    def __init__(self, weights: Iterable[ShardedVariable]):
        self._graph = tf.compat.v1.get_default_graph()
        self._parts: dict[int, list[tf.Tensor]] = {}
        self._gathers: list[tuple[_Gather, tf.Tensor]] = []
        self._backward: list[_BackwardPass] = []
        self._sums: list[tuple[tf.Operation, tf.Operation]] = []  # of gradients and their sums
        self._weights = list(weights)

    def exchange(self, replica: int, weights: Iterable[ShardedVariable] | None = None):
        """Reads the parts of all replicas, which all replicas call together.

        Nothing is copied between devices before a weight is gathered.

        Args:
            replica: this replica's number in its process.
            weights: weights whose parts have changed; all by default.
        """
        weights = self._weights if weights is None else list(weights)
        own = [each.shard.copies[replica].read_value() for each in weights]
        for weight, parts in zip(weights, of_all_replicas(own), strict=True):
            self._parts[id(weight)] = list(parts)

    def whole(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns the gathered weight.

        Raises:
            ValueError: the variable does not belong to the model.
        """
        if id(variable) not in self._parts:
            raise ValueError(
                f'{variable.path!r} is divided over the devices by shard="weights", and the '
                "model does not own it. Make its layer an attribute of the model"
            )
        if self._gathers:
            gather, whole = self._gathers[-1]
            if gather.parts is self._parts[id(variable)] and not whole.consumers():
                return whole  # Keras reads a variable twice for each use
        gather = _Gather(variable, self._parts[id(variable)])
        if tf.executing_eagerly():
            return gather.whole_after(())
        if is_kept(variable.shape):
            with self._graph.as_default():
                return gather.whole_after(())
        # Also for loops and conditions, whose graphs cannot wait for operations of this one.
        with self._graph.as_default():
            whole = gather.whole_after(self._uses_before())
        self._gathers.append((gather, whole))
        return whole

    def gradient(self, compute, target):
        """Returns `compute()`, a gradient, and records the operations that it adds."""
        first = len(self._graph.get_operations()) if self._gathers else 0
        found = compute()
        if self._gathers:
            end = len(self._graph.get_operations())
            targets = [each.op for each in tf.nest.flatten(target)]
            self._backward.append(_BackwardPass(first, end, targets))
        return found

    def note_sums(self, gradients: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]):
        """Records the sums over replicas of gradients."""
        if self._backward:
            self._sums += [
                (gradient.op, total.op)
                for gradient, total in zip(gradients, sums, strict=True)
                if not is_kept(gradient.shape)
            ]

    def repeat_for_gradients(self):
        """Lets gradients read weights that are gathered again."""
        if not self._backward:
            return
        number_of = {o: n for n, o in enumerate(self._graph.get_operations())}
        uses = []
        for gather, whole in self._gathers:
            for backward in self._backward:
                found = _uses_in(whole, backward, number_of)
                if found:
                    first = min(number_of[operation] for operation, _ in found)
                    uses.append((first, gather, whole, backward, found))
        uses.sort(key=lambda use: use[0])
        sums = [(self._last_part(gradient, number_of), total) for gradient, total in self._sums]
        sums.sort(key=lambda each: each[0])
        for place, (first, gather, whole, backward, found) in enumerate(uses):
            after = list(backward.targets)
            if place >= HELD:
                earlier = uses[place - HELD][-1]
                # Later ones may depend on this gather.
                after += [each for each, _ in earlier if number_of[each] < first]
            while place and sums and sums[0][0] < uses[place - 1][0]:
                after.append(sums.pop(0)[1])
            again = {whole.ref(): gather.whole_after(after)}
            for operation, tensor in found:
                replace_input(operation, tensor, _computed_again(tensor, again))

    def _last_part(self, gradient, number_of):
        """Returns the number of the last operation of a tape from which a gradient is computed.

        A program may compute it from several, such as the norm of all gradients.
        """
        first, seen, pending, found = self._backward[0].first, set(), [gradient], [-1]
        while pending:
            operation = pending.pop()
            number = number_of[operation]
            if operation in seen or number < first:
                continue
            seen.add(operation)
            if any(each.first <= number < each.end for each in self._backward):
                found.append(number)
            else:
                pending += [tensor.op for tensor in operation.inputs]
        return max(found)

    def _uses_before(self):
        """Returns the operations that have used the weight before the previous one."""
        if len(self._gathers) < HELD:
            return []
        _, whole = self._gathers[-HELD]
        number_of = (
            {o: n for n, o in enumerate(self._graph.get_operations())} if self._backward else {}
        )
        return [
            operation
            for tensor in _rearranged(whole)
            for operation in tensor.consumers()
            if operation.type not in _REARRANGE
            and not any(b.first <= number_of[operation] < b.end for b in self._backward)
        ]


def _rearranged(whole):
    """Returns a tensor and those that are computed from it alone by rearranging it."""
    found = {whole.ref(): whole}
    pending = [whole]
    while pending:
        for operation in pending.pop().consumers():
            others = [t for t in operation.inputs if t.ref() not in found]
            is_alone = all(tensor.op.type == "Const" for tensor in others)
            if (
                operation.type in _REARRANGE
                and is_alone
                and operation.outputs[0].ref() not in found
            ):
                found[operation.outputs[0].ref()] = operation.outputs[0]
                pending.append(operation.outputs[0])
    return list(found.values())


def _uses_in(whole, backward, number_of):
    """Returns (operation, tensor) for what a backward pass reads of a gathered weight."""
    forward = [t for t in _rearranged(whole) if not _is_in(t.op, backward, number_of)]
    return [
        (operation, tensor)
        for tensor in forward
        for operation in dict.fromkeys(tensor.consumers())
        if operation.type not in _SHAPES and _is_in(operation, backward, number_of)
    ]


def _is_in(operation, backward, number_of):
    return backward.first <= number_of[operation] < backward.end


def _computed_again(tensor, again):
    """Returns a rearranged weight, computed from the weight that was gathered again.

    `again` is {reference to a tensor: the same, computed again}, to which the result is added.
    """
    if tensor.ref() not in again:
        inputs = [
            each if each.op.type == "Const" else _computed_again(each, again)
            for each in tensor.op.inputs
        ]
        with tf.device(tensor.device):
            again[tensor.ref()] = repeat_operation(tensor.op, inputs)
    return again[tensor.ref()]
