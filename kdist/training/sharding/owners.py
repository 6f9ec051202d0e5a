"""Large weights each of which one replica updates, for optimizers that need whole weights.

    strategy = kdist.create_strategy("mirrored", devices=4, shard="optimizer")
    with strategy.scope():
        model.compile(keras.optimizers.Muon(0.02), "mse")

Muon orthogonalizes a whole matrix, so that it cannot update parts of one. Each large weight has an
owner instead: the replica on whose device its slots are. A step sends all parts of a gradient to
the owner of the weight, which updates the weight, and sends each replica its part of it.

Source: Liu et al., "Muon is Scalable for LLM Training", 2025 (arXiv:2502.16982), section 2.3.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from kdist.compat.tensorflow import with_copies
from kdist.training.replica.reduction import GATHER, SCOPE, exchange_rows, sums_over_replicas
from kdist.training.scopes import outside_any_scope, this_local_replica, variable_like
from kdist.training.sharding.parts import (
    EqualParts,
    Shard,
    TensorDivision,
    copies_of,
    first_part,
    num_parts,
)
from kdist.training.sharding.weights import ShardedVariable


@dataclasses.dataclass(frozen=True)
class OwnedTensor(TensorDivision):
    """A tensor that replica `owner` holds. The parts of the other replicas are empty.

    Args:
        shape: shape of the tensor.
        owner: number of the replica.
    """

    shape: tuple[int, ...]
    owner: int

    def part(self, value, number):
        value = tf.convert_to_tensor(value)
        return value if number == self.owner else tf.zeros(_empty(self.shape), value.dtype)

    def merge(self, parts):
        return tf.convert_to_tensor(parts[self.owner])

    def merge_over_workers(self, strategy, parts):
        own = self.owner - first_part(strategy)

        def whole():
            here = this_local_replica()
            part = tf.convert_to_tensor(parts[here])
            return [part if here == own else tf.zeros(self.shape, part.dtype)]

        (total,) = sums_over_replicas(strategy, whole)
        return total


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedShard(Shard):
    """A weight that one replica updates. On the others, `variable` is empty.

    The division is that of the gradient, and of the weight where no device holds all of it.

    Attributes:
        owner: number of the replica.
    """

    owner: int = 0

    @classmethod
    def of_owner(cls, weight: keras.Variable, strategy: tf.distribute.Strategy, owner: int):
        """Returns the shard of a weight that `owner` updates, whose variable is zero."""
        division = EqualParts(tuple(weight.shape), num_parts(strategy))
        variable = variable_like(weight, weight.shape)
        keep_on_owner(variable, owner, strategy)
        return cls(weight, variable, division, isinstance(weight, ShardedVariable), owner)


def keep_on_owner(variable: keras.Variable, owner: int, strategy: tf.distribute.Strategy):
    """Replaces the copies of a variable on other replicas than the owner by empty ones."""
    first, shape, copies = first_part(strategy), _empty(variable.shape), copies_of(variable)

    def replaced():
        return [
            copy if first + number == owner else _zeros_like(copy, shape)
            for number, copy in enumerate(copies)
        ]

    variable._value = with_copies(variable._value, outside_any_scope(replaced))


def _zeros_like(copy, shape):
    with tf.device(copy.device):
        name = copy.name.partition(":")[0]
        return tf.Variable(tf.zeros(shape, copy.dtype), trainable=False, name=name)


def _empty(shape):
    """Returns a shape without elements, with as many axes."""
    return (0, *shape[1:]) if len(shape) else (0,)


def assign_owners(sizes: Sequence[int], count: int) -> list[int]:
    """Returns an owner of each weight, such that all of them have about as much.

    Args:
        sizes: size of each weight.
        count: number of replicas.
    """
    totals, owners = [0] * count, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = totals.index(min(totals))
        totals[owners[number]] += sizes[number]
    return owners


def to_owners(parts: Mapping[OwnedShard, tf.Tensor], replica: int) -> dict[OwnedShard, tf.Tensor]:
    """Returns the tensors of those weights that this replica owns, whose parts replicas have.

    Called in replica context, by all replicas.

    Args:
        parts: this replica's part of the tensor of each weight, the same weights on all replicas.
        replica: number of this replica among those that divide state.
    """
    rounds = list(_rounds(parts))
    with tf.name_scope(SCOPE):
        sent = [
            tf.stack([_as_row(parts.get(shard), size, kind) for shard in shards])
            for shards, size, kind in rounds
        ]
        received = exchange_rows(sent)
        found = {}
        for (shards, *_), rows in zip(rounds, received, strict=True):
            shard = shards[replica]
            if shard is not None:
                found[shard] = shard.division.merge([_part_in(r, shard) for r in tf.unstack(rows)])
        return found


def from_owners(
    shards: Sequence[OwnedShard], values: Mapping[OwnedShard, tf.Tensor], replica: int
) -> dict[OwnedShard, tf.Tensor]:
    """Returns this replica's part of the tensor of each weight, which its owner has.

    Called in replica context, by all replicas.

    Args:
        shards: the weights, the same ones on all replicas.
        values: the tensors of those that this replica owns.
        replica: number of this replica among those that divide state.
    """
    rounds = list(_rounds({shard: shard.variable for shard in shards}))
    with tf.name_scope(GATHER):
        sent = []
        for owned, size, kind in rounds:
            shard, parts = owned[replica], [None] * len(owned)
            if shard is not None:
                parts = tf.unstack(shard.division.stacked(values[shard]))
            sent.append(tf.stack([_as_row(part, size, kind) for part in parts]))
        found = {}
        for (owned, *_), rows in zip(rounds, exchange_rows(sent), strict=True):
            for shard, row in zip(owned, tf.unstack(rows), strict=True):
                if shard is not None:
                    found[shard] = _part_in(row, shard)
        return found


def _rounds(parts):
    """Yields (a weight of each replica or None, largest size of a part, type) of each exchange.

    Args:
        parts: {weight: a tensor or variable of its type}.
    """
    waiting = defaultdict(lambda: defaultdict(list))  # type -> owner -> weights
    for shard, part in parts.items():
        waiting[tf.as_dtype(part.dtype)][shard.owner].append(shard)
    count = next(iter(parts)).division.count if parts else 0
    for kind, of_owner in waiting.items():
        of_each = [of_owner[owner] for owner in range(count)]
        for shards in itertools.zip_longest(*of_each):
            sizes = [math.prod(shard.division.part_shape) for shard in shards if shard]
            yield shards, max(sizes), kind


def _as_row(part, size, kind):
    """Returns a part as a vector of this size, with zeros at its end; zeros for None."""
    if part is None:
        return tf.zeros([size], kind)
    flat = tf.reshape(part, [-1])
    return tf.pad(flat, [[0, size - flat.shape[0]]])


def _part_in(row, shard):
    """Returns the part of a weight of which `_as_row` has made a row."""
    shape = shard.division.part_shape
    return tf.reshape(row[: math.prod(shape)], shape)
