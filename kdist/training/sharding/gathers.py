"""Gathers of divided weights within a replica's step, in the forward and in the backward pass.

A replica gathers a weight where a layer reads it. TensorFlow starts an operation as soon as its
inputs exist, so that all weights would be gathered at the beginning of a step. Therefore each
gather waits for the layers that use the weight before the previous one: a device holds the weight
that it computes with, and the next one.

Processes gather small weights that follow each other together, as a message takes half a
millisecond, whatever its size. "Weight" below also means such a group. It is at most as large as
the second largest weight, or 1 MiB.

Gradients read the weights again. `WeightGathers.repeat_for_gradients` lets them read a second
gather, which waits in the same way. Otherwise a device would hold all weights after the forward
pass. Nothing else is computed twice, unlike with `tf.recompute_grad`. A second gather also waits
until the gradients before it have been added up over replicas. Otherwise a replica that is ahead of
the others would hold all its gradients.

Several processes with one device each gather by collectives. On GPUs these have to run in the same
order in all processes, or they wait for each other forever. TensorFlow orders them as they were
created. Gathers that are repeated are created last, and sums of gradients after all gradients. Both
are needed earlier, so that `kdist.training.sharding.collective_order` orders them. CPUs need no
order, and with one, a step takes 1.2 times as long (`benchmarks/sharding.py`).
"""

import dataclasses
from collections.abc import Iterable, Sequence

import tensorflow as tf

from kdist.compat.tensorflow import repeat_operation, replace_input, unrecorded
from kdist.training.replica.reduction import (
    GATHER,
    buckets_of,
    gather_own_parts,
    of_all_replicas,
    reduce_scatter_sum,
)
from kdist.training.scopes import computes_on_gpus
from kdist.training.sharding.collective_order import (
    CollectiveOrder,
    collectives_since,
    is_collective,
)
from kdist.training.sharding.parts import EqualParts
from kdist.training.sharding.sizes import HELD, is_kept
from kdist.training.sharding.weights import ShardedVariable

# Operations that only rearrange or convert a weight. What gradients read of them is computed again.
_REARRANGE = {
    *("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice", "Transpose"),
}

# Size of a group of weights, if the second largest weight is smaller.
_GROUP_BYTES = 1 << 20

# Operations that need the shape of a weight only, and run as soon as it exists.
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}


@dataclasses.dataclass(frozen=True, eq=False)
class _Gather:
    """Gather of weights from their parts, which are sent together.

    Attributes:
        parts: weights, with the part of each replica of this process.
    """

    parts: Sequence[tuple[ShardedVariable, Sequence[tf.Tensor]]]

    def whole_after(
        self, operations: Sequence[tf.Operation], is_ordered: bool = True
    ) -> list[tf.Tensor]:
        """Returns the weights, gathered when the operations have ended.

        Args:
            operations: the operations.
            is_ordered: as in `gather_own_parts`, by which workers gather.
        """
        with unrecorded(), tf.name_scope(GATHER), tf.control_dependencies(operations):
            received = [[_sent(part) for part in parts] for _, parts in self.parts]
            shards = [variable.shard for variable, _ in self.parts]
            if shards[0].is_divided_over_workers:
                wholes = gather_own_parts([part for (part,) in received], is_ordered)
                received = [[whole] for whole in wholes]
            return [s.division.merge(each) for s, each in zip(shards, received, strict=True)]


def _sent(part):
    # The device that sends waits as well, so that nothing is received early.
    with tf.device(part.device):
        return tf.identity(part)


@dataclasses.dataclass(frozen=True)
class _BackwardPass:
    """Operations of a gradient: those from number `first` to before `end` of the graph."""

    first: int
    end: int
    targets: Sequence[tf.Operation]

    def __contains__(self, number):
        return self.first <= number < self.end


@dataclasses.dataclass(frozen=True)
class _Use:
    """Reads of gathered weights by a backward pass.

    Attributes:
        gather, wholes: the gather in the forward pass, and its results.
        backward: the backward pass.
        read: operations of the backward pass, with the tensor that each reads.
        first: number of the first of these operations.
    """

    gather: _Gather
    wholes: Sequence[tf.Tensor]
    backward: _BackwardPass
    read: Sequence[tuple[tf.Operation, tf.Tensor]]
    first: int


class WeightGathers:
    """Gathers of the divided weights of one replica, while its step is traced.

    Args:
        weights: the divided weights of the model.
    """

    def __init__(self, weights: Iterable[ShardedVariable]):
        self._graph = tf.compat.v1.get_default_graph()
        self._parts: dict[int, list[tf.Tensor]] = {}
        self._gathers: list[tuple[_Gather, list[tf.Tensor]]] = []
        self._backward: list[_BackwardPass] = []
        self._sums: list[tuple[tf.Operation, tf.Operation]] = []  # of gradients and their sums
        self._order = CollectiveOrder(self._graph)
        self._needs_order = computes_on_gpus(tf.distribute.get_strategy())
        self._weights = list(weights)
        self._are_divided_over_workers = any(
            weight.shard.is_divided_over_workers for weight in self._weights
        )
        self._group_of = {}
        if self._are_divided_over_workers and not tf.executing_eagerly():
            self._group_of = {id(w): group for group in _groups(self._weights) for w in group}

    def exchange(self, replica: int, weights: Iterable[ShardedVariable] | None = None):
        """Reads the parts of all replicas of this process, which these call together.

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
        if (whole := self._unused(variable)) is not None:
            return whole
        group = self._group_of.get(id(variable), [variable])
        gather = _Gather([(each, self._parts[id(each)]) for each in group])
        if tf.executing_eagerly():
            return gather.whole_after(())[0]
        if is_kept(variable.shape):
            with self._graph.as_default():
                return gather.whole_after((), self._needs_order)[0]
        # Also for loops and conditions, whose graphs cannot wait for operations of this one.
        with self._graph.as_default():
            wholes = gather.whole_after(self._uses_before(), self._needs_order)
        self._gathers.append((gather, wholes))
        return self._unused(variable)

    def _unused(self, variable):
        """Returns a gathered weight that is still held and that nothing has used yet, or None.

        Keras reads a variable twice for each use.
        """
        for gather, wholes in self._gathers[-HELD:]:
            for (other, parts), whole in zip(gather.parts, wholes, strict=True):
                is_current = other is variable and parts is self._parts[id(variable)]
                if is_current and not whole.consumers():
                    return whole
        return None

    def gradient(self, compute, target):
        """Returns `compute()`, a gradient, and records the operations that it adds."""
        first = len(self._graph.get_operations()) if self._gathers else 0
        found = compute()
        if self._gathers:
            end = len(self._graph.get_operations())
            targets = [each.op for each in tf.nest.flatten(target)]
            self._backward.append(_BackwardPass(first, end, targets))
        return found

    def sums(
        self, gradients: Sequence[tf.Tensor], divisions: Sequence[EqualParts]
    ) -> list[tf.Tensor]:
        """Returns this replica's parts of the sums of gradients over the replicas that divide them.

        Args:
            gradients: this replica's gradients of large weights.
            divisions: divisions of these.
        """
        if not self._backward:
            return reduce_scatter_sum(gradients, divisions)
        if self._are_divided_over_workers:
            return self._sums_over_workers(gradients, divisions)
        sums = reduce_scatter_sum(gradients, divisions)
        self._sums += [
            (gradient.op, total.op)
            for gradient, total in zip(gradients, sums, strict=True)
            if not is_kept(gradient.shape)
        ]
        return sums

    def _sums_over_workers(self, gradients, divisions):
        """Returns the same for workers, which first send the gradients that are computed first."""
        number_of = self._numbers()
        places = [self._last_part([gradient.op], number_of) for gradient in gradients]
        order = sorted(range(len(gradients)), key=places.__getitem__)
        sums: list = [None] * len(gradients)
        for are_kept in (False, True):
            some = [n for n in order if is_kept(gradients[n].shape) == are_kept]
            found = self._sums_in_order(
                [gradients[n] for n in some], [divisions[n] for n in some], are_kept
            )
            for number, total in zip(some, found, strict=True):
                sums[number] = total
        return sums

    def _sums_in_order(self, gradients, divisions, are_kept):
        first = len(self._graph.get_operations())
        sums = reduce_scatter_sum(gradients, divisions, is_ordered=are_kept)
        if not are_kept:
            number_of = self._numbers()
            for collective in collectives_since(self._graph, first):
                inputs = [tensor.op for tensor in collective.inputs]
                self._order.add(collective, after=self._last_part(inputs, number_of))
            # A sum waits for all gradients that are sent together.
            self._sums += [(total.op, total.op) for total in sums]
        return sums

    def repeat_for_gradients(self):
        """Lets gradients read weights that are gathered again."""
        if not self._backward:
            return
        number_of = self._numbers()
        uses = self._uses_in_gradients(number_of)
        sums = [(self._last_part([gradient], number_of), total) for gradient, total in self._sums]
        sums.sort(key=lambda each: each[0])
        for place, use in enumerate(uses):
            after = list(use.backward.targets)
            if place >= HELD:
                earlier = uses[place - HELD].read
                # Later ones may depend on this gather.
                after += [each for each, _ in earlier if number_of[each] < use.first]
            while place and sums and sums[0][0] < uses[place - 1].first:
                after.append(sums.pop(0)[1])
            self._gather_again(use, after)
        if self._needs_order:
            self._order.establish()

    def _uses_in_gradients(self, number_of):
        """Returns what each backward pass reads of each gather, in the order of the first read."""
        uses = []
        for gather, wholes in self._gathers:
            for backward in self._backward:
                read = _read_in(wholes, backward, number_of)
                if read:
                    first = min(number_of[operation] for operation, _ in read)
                    uses.append(_Use(gather, wholes, backward, read, first))
        return sorted(uses, key=lambda use: use.first)

    def _gather_again(self, use, after):
        created = len(self._graph.get_operations())
        gathered = use.gather.whole_after(after, is_ordered=False)
        for collective in collectives_since(self._graph, created):
            self._order.add(collective, after=use.first - 1)
        again = {old.ref(): new for old, new in zip(use.wholes, gathered, strict=True)}
        for operation, tensor in use.read:
            replace_input(operation, tensor, _computed_again(tensor, again))

    def _numbers(self):
        """Returns {operation: number} of the graph, in the order in which they were created."""
        return {o: n for n, o in enumerate(self._graph.get_operations())}

    def _last_part(self, operations, number_of):
        """Returns the number of the last operation of a tape from which some are computed.

        A program may compute gradients from several, such as the norm of all gradients, also of
        those of other workers, or add them to variables that it reads.
        """
        first, seen, pending, found = self._backward[0].first, set(), list(operations), [-1]
        while pending:
            operation = pending.pop()
            number = number_of[operation]
            if operation in seen or number < first:
                continue
            seen.add(operation)
            is_last = is_collective(operation) and operation not in self._order
            if is_last or any(number in each for each in self._backward):
                found.append(number)
            else:
                pending += _operations_before(operation, number_of)
        return max(found)

    def _uses_before(self):
        """Returns the operations that have used the weight before the previous one."""
        if len(self._gathers) < HELD:
            return []
        _, wholes = self._gathers[-HELD]
        number_of = self._numbers() if self._backward else {}
        return [
            operation
            for tensor in _rearranged(wholes)
            for operation in tensor.consumers()
            if operation.type not in _REARRANGE
            and not any(number_of[operation] in each for each in self._backward)
        ]


def _operations_before(operation, number_of):
    """Returns operations that run before one: for its inputs, or earlier on the same variables.

    TensorFlow adds the control dependencies between those when the whole function is traced.
    """
    earlier = [
        other
        for tensor in operation.inputs
        if tensor.dtype == tf.resource
        for other in tensor.consumers()
        if number_of[other] < number_of[operation]
    ]
    return [tensor.op for tensor in operation.inputs] + operation.control_inputs + earlier


def _groups(weights):
    """Returns lists of the weights that are gathered together, which follow each other."""
    large = [weight for weight in weights if not is_kept(weight.shape)]
    own = [weight.shard.copies[0] for weight in large]
    sizes = sorted(each.shape.num_elements() * each.dtype.size for each in own)
    if not sizes:
        return []
    second_largest = sizes[-HELD:][0]
    most_bytes = max(_GROUP_BYTES // large[0].shard.division.count, second_largest)
    buckets, successive = buckets_of(own, most_bytes), iter(large)
    return [[next(successive) for _ in bucket] for bucket in buckets]


def _rearranged(wholes):
    """Returns tensors and those that are computed from them alone by rearranging them."""
    found = {whole.ref(): whole for whole in wholes}
    pending = list(wholes)
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


def _read_in(wholes, backward, number_of):
    """Returns (operation, tensor) for what a backward pass reads of gathered weights."""
    forward = [t for t in _rearranged(wholes) if number_of[t.op] not in backward]
    return [
        (operation, tensor)
        for tensor in forward
        for operation in dict.fromkeys(tensor.consumers())
        if operation.type not in _SHAPES and number_of[operation] in backward
    ]


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
