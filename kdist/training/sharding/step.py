"""One replica's part of a step whose optimizer state, gradients, or weights are sharded.

Gradients of large weights are reduce-scattered: each replica receives the sum of its own part. It
updates that part with Keras's optimizer, and the new weights are gathered on all replicas. Each of
them then receives and sends twice (N - 1) / N of the weights' bytes, as in an all-reduce.

Where each of several processes divides the weights among its own replicas, gradients are
reduce-scattered within it, and the parts are then added up over processes.

Replicas meet before and after the optimizer, never in it: Keras updates within conditionals if a
loss scale or `gradient_accumulation_steps` is used, where replicas cannot exchange anything.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from kdist.training.replica.dependence.of_step import is_eager
from kdist.training.replica.dependence.values import FIXED
from kdist.training.replica.gradients import scale_gradient
from kdist.training.replica.reduction import (
    GATHER,
    all_reduce_sum,
    gather_parts,
    of_all_replicas,
    sum_over_workers,
)
from kdist.training.replica.step import ReplicaStep
from kdist.training.sharding.gathers import WeightGathers
from kdist.training.sharding.optimizer_state import shards_of
from kdist.training.sharding.owners import from_owners, to_owners
from kdist.training.sharding.parts import num_parts
from kdist.training.sharding.weights import ShardedVariable, sharded_weights


class ShardedStep(ReplicaStep):
    """One replica's part of one micro-step; the replica updates its own parts of large weights.

    Args:
        trainer: the model.
        others: the arguments of `ReplicaStep`, in order.
    """

    _squares: list | None = None  # of all gradients, as the optimizer clips them
    _own_squares: list | None = None  # of those that this replica's optimizer receives
    _is_finite: tf.Tensor | None = None  # whether a loss scale lets the optimizer update

    def __init__(self, trainer, *others):
        super().__init__(*others)
        self._weights = WeightGathers(sharded_weights(trainer))
        self._values: dict = {}  # id of a gathered tensor -> (the tensor, its weight)
        count = num_parts(trainer.distribute_strategy)
        self._part = self.replica % count
        self._is_within_worker = count < self.replicas

    @contextlib.contextmanager
    def running(self):
        with super().running():
            self._weights.exchange(self.local_replica)
            yield self
            self._weights.repeat_for_gradients()

    def sharded_value(self, variable):
        """Returns the whole value of a weight, which this replica gathers."""
        whole = self._weights.whole(variable)
        # The analysis cannot see it of what other workers send.
        value = variable.recorded(self.dependence.note(whole, FIXED), self)
        self._values[id(value)] = value, variable
        return value

    def assign_sharded(self, variable, value):
        """Assigns this replica's part of a value that is equal on all replicas."""
        value = tf.convert_to_tensor(value, variable.dtype)
        is_here = tf.compat.v1.get_default_graph() is self._graph and self._accumulators is None
        if not is_here or is_eager(value) or not self._is_equal_on_replicas(value):
            super().assign_sharded(variable, value)  # which raises an error
        part = variable.shard.division.part(value, self._part)
        variable.own_part(self).assign(part)
        self._weights.exchange(self.local_replica, [variable])

    def _is_equal_on_replicas(self, value):
        dependence = self.dependence.of(value)
        return dependence.is_fixed or dependence.is_reduced

    def watched(self, tensors):
        """Returns what a tape watches: the part of a weight in place of its value."""
        return keras.tree.map_structure(
            lambda each: each.own_part(self) if isinstance(each, ShardedVariable) else each,
            self._as_weights(tensors),
        )

    def tape_gradient(self, gradient, target, sources):
        """Returns the gradients of a tape, which read the weights that they need once more.

        Keras's `weight.value` is a variable where weights are whole. So the gradient with respect
        to the value of a weight is that of the weight, wherever the weight was read.
        """
        compute = functools.partial(super().tape_gradient, gradient, target)
        weights = self._as_weights(sources)
        return self._weights.gradient(lambda: compute(weights), target)

    def _as_weights(self, tensors):
        """Returns a structure of tensors with the weights whose values they are."""
        return keras.tree.map_structure(
            lambda each: self._values.get(id(each), (each, each))[1], tensors
        )

    def reduced_in_micro_step(self, optimizer, gradients, variables):
        """Returns this replica's parts of large gradients, if micro-steps add these up."""
        shards = shards_of(optimizer)
        if shards is None or not shards.divides_gradients:
            return gradients
        divided = _divided(shards, gradients, variables)
        return _with_parts(gradients, divided, self._reduced_parts(gradients, divided))

    def reduced_for(self, optimizer, gradients, variables):
        """Returns sums over replicas: this replica's part of large dense ones, others whole."""
        shards = shards_of(optimizer)
        if shards is None:
            return self.reduced(gradients)
        divided = _divided(shards, gradients, variables)
        if self._accumulators is not None and shards.divides_gradients:
            parts = [g for g, shard in zip(gradients, divided, strict=True) if shard]
        else:
            parts = self._reduced_parts(gradients, divided)
        parts = sum_over_workers(parts) if self._is_within_worker else parts
        whole = self.reduced(
            [g if shard is None else None for g, shard in zip(gradients, divided, strict=True)]
        )
        return _with_parts(whole, divided, parts)

    def _reduced_parts(self, gradients, divided):
        """Returns this replica's part of sums over those that share state, of large gradients."""
        found = [(g, shard) for g, shard in zip(gradients, divided, strict=True) if shard]
        return self._weights.sums(
            [gradient for gradient, _ in found], [shard.division for _, shard in found]
        )

    def apply(self, update, optimizer, gradients, variables):
        """Updates this replica's parts of the weights, and gathers those of all replicas."""
        shards = shards_of(optimizer)
        if shards is None:
            super().apply(update, optimizer, gradients, variables)
            return
        self._is_finite = None  # of another optimizer
        found = [shards.find(variable) for variable in variables]
        if shards.have_owners:
            self._apply_to_owned(update, optimizer, gradients, variables, found)
            return
        gradients = [
            self._own_slices(shard, gradient)
            for shard, gradient in zip(found, gradients, strict=True)
        ]
        own = [
            variable if shard is None else shard.variable
            for shard, variable in zip(found, variables, strict=True)
        ]
        # Keras averages all weights that the optimizer was built for.
        written = list(shards) if shards.leaf.use_ema else _with_gradient(found, gradients)
        only_copies = [shard for shard in written if shard.is_only_copy]
        with_copies = [shard for shard in written if not shard.is_only_copy]
        with self.update():
            for shard in with_copies:
                part = shard.division.part(self.local(shard.weight.value), self._part)
                self.local(shard.variable.value).assign(part)
            self._note_squares(optimizer, gradients, own, found)
            update(gradients, own)
            self._gather(with_copies)
            self._constrain([s for s in only_copies if s.weight.constraint is not None])
            self._weights.exchange(self.local_replica, [s.weight for s in only_copies])

    def _apply_to_owned(self, update, optimizer, gradients, variables, found):
        """Updates the weights that this replica owns, and sends them to all replicas.

        Args:
            update, optimizer, gradients, variables: those of `apply`.
            found: the shard of each variable, an `OwnedShard`; None for small weights.
        """
        updated = [v if s is None else s.variable for v, s in zip(variables, found, strict=True)]
        is_here = [s is None or s.owner == self._part for s in found]
        each = list(zip(found, gradients, updated, is_here, strict=True))
        written = _with_gradient(found, gradients)
        self._check_each_replica_updates(written, found, gradients)
        dense = {s: g for s, g, *_ in each if s and isinstance(g, tf.Tensor)}
        with self.update():
            self._load_owned(written)
            self._note_squares(optimizer, gradients, updated, found, is_here)
            whole = to_owners(dense, self._part)
            update(
                [whole.get(s, g) for s, g, _, here in each if here],
                [variable for *_, variable, here in each if here],
            )
            self._send_owned(written)

    def _check_each_replica_updates(self, written, found, gradients):
        """Raises ValueError if a replica has nothing to update: Keras would not count its step."""
        has_small = any(s is None and g is not None for s, g in zip(found, gradients, strict=True))
        count = num_parts(tf.distribute.get_strategy())
        owners = {shard.owner for shard in written}
        if not has_small and len(owners) < count:
            raise ValueError(
                f"there are fewer weights with a gradient ({len(written)}) than devices ({count}), "
                "and the optimizer updates each whole. Leave shard (--shard) out, or use Adam"
            )

    def _load_owned(self, shards):
        """Assigns the weights that this replica owns to the variables that it updates."""
        divided = {s: self.local(_flat_copy(s)).read_value() for s in shards if s.is_only_copy}
        whole = to_owners(divided, self._part)
        for shard in shards:
            if shard.owner == self._part:
                value = whole[shard] if shard.is_only_copy else self.local(shard.weight.value)
                self.local(shard.variable.value).assign(value)

    def _send_owned(self, shards):
        """Assigns the updated weights to the copies, or to the parts, of all replicas."""
        values = {
            s: self._constrained(s, self.local(s.variable.value).read_value())
            for s in shards
            if s.owner == self._part
        }
        parts = from_owners(shards, values, self._part)
        with_copies = [shard for shard in shards if not shard.is_only_copy]
        whole = self._merged(with_copies, [parts[shard] for shard in with_copies])
        for shard, value in zip(with_copies, whole, strict=True):
            self.local(shard.weight.value).assign(value)
        only_copies = [shard for shard in shards if shard.is_only_copy]
        for shard in only_copies:
            self.local(_flat_copy(shard)).assign(parts[shard])
        self._weights.exchange(self.local_replica, [s.weight for s in only_copies])

    def _own_slices(self, shard, gradient):
        if shard is None or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not shard.division.is_by_rows:
            weight = shard.weight
            size = weight.value.dtype.size * weight.shape.num_elements()
            raise ValueError(
                f"{weight.path!r} has {weight.shape[0]} rows, which are looked up, and which "
                f"{shard.division.count} devices cannot divide evenly. Keep it whole on each "
                f"device by min_shard_bytes={size + 1}, or leave shard (--shard) out"
            )
        return shard.division.slices_of(gradient, self._part)

    def _gather(self, shards):
        """Assigns the parts of all replicas to this replica's copies of the weights."""
        for shard, value in zip(shards, self._gathered(shards), strict=True):
            self.local(shard.weight.value).assign(self._constrained(shard, value))

    def _gathered(self, shards):
        """Returns the whole value of each weight, from the parts of all replicas."""
        return self._merged(shards, [tf.identity(self.local(s.variable.value)) for s in shards])

    def _merged(self, shards, parts):
        """Returns whole tensors, of which each replica has a part."""
        with tf.name_scope(GATHER):
            exchange = of_all_replicas if self._is_within_worker else gather_parts
            parts = exchange(parts)
            return [shard.division.merge(p) for shard, p in zip(shards, parts, strict=True)]

    def _constrain(self, shards):
        """Applies the constraints of weights, which need whole ones, to this replica's parts."""
        for shard, value in zip(shards, self._gathered(shards), strict=True):
            part = shard.division.part(self._constrained(shard, value), self._part)
            self.local(shard.variable.value).assign(part)

    def _constrained(self, shard, value):
        if shard.weight.constraint is None:
            return value
        constrained = tf.convert_to_tensor(shard.weight.constraint(value))
        is_updated = True if self._is_finite is None else self._is_finite
        return tf.where(is_updated, constrained, value)

    # Clipping and loss scaling, which need the gradients of whole weights.

    def are_finite(self, optimizer, is_finite):
        """Returns whether the gradients of all replicas are finite, given those of this one."""
        if shards_of(optimizer) is None:
            return is_finite
        (failures,) = all_reduce_sum([tf.cast(tf.logical_not(is_finite), tf.float32)])
        self._is_finite = tf.equal(failures, 0)
        return self._is_finite

    def _note_squares(self, optimizer, gradients, own, found, is_here=None):
        """Records the squared norm of each whole gradient as it is clipped; None without clipping.

        Args:
            optimizer: the optimizer, which may wrap another one.
            gradients: gradients of this replica's parts, of small weights, or None.
            own: the variables that they belong to.
            found: the shards of these variables; None for small weights.
            is_here: which of them this replica's optimizer receives. Defaults to all.
        """
        self._squares = self._own_squares = None
        leaf = shards_of(optimizer).leaf
        if not (leaf.clipnorm or leaf.global_clipnorm):
            return
        each = zip(gradients, own, found, is_here or [True] * len(found), strict=True)
        # Scales of float8 are assigned their gradients, and are no part of a norm.
        present = [
            one
            for one in each
            if one[0] is not None and not getattr(one[1], "overwrite_with_gradient", False)
        ]
        squares = [
            keras.ops.sum(keras.ops.square(_as_clipped(optimizer, leaf, gradient, variable)))
            # Each replica has its part of a dense gradient, and all have the same slices.
            if here or isinstance(gradient, tf.Tensor)
            else tf.zeros([], gradient.dtype)
            for gradient, variable, _, here in present
        ]
        is_part = [shard is not None for *_, shard, _ in present]
        of_parts = [s for s, part in zip(squares, is_part, strict=True) if part]
        sums = iter(self._sums_of_parts(of_parts))
        whole = [next(sums) if part else s for s, part in zip(squares, is_part, strict=True)]
        self._squares = whole
        self._own_squares = [s for s, (*_, here) in zip(whole, present, strict=True) if here]

    def _sums_of_parts(self, squares):
        """Returns the sum of each scalar over the replicas that share state, the same bits on each.

        TensorFlow may reorder additions (`tf.add_n`), on each device in another way.
        """
        if not (squares and self._is_within_worker):
            return all_reduce_sum(squares)
        (parts,) = of_all_replicas([tf.stack(squares)])
        return tf.unstack(tf.reduce_sum(tf.stack(parts), 0))

    def clipped(self, keras_function, optimizer, gradients):
        """Returns clipped gradients, by Keras's formulas and the norms of whole gradients."""
        if self._squares is None:
            return keras_function(optimizer, gradients)
        if optimizer.clipnorm:
            limit = optimizer.clipnorm
            norms = [tf.sqrt(square) for square in self._own_squares]
            return [
                scale_gradient(gradient, limit / tf.maximum(norm, limit))
                for gradient, norm in zip(gradients, norms, strict=True)
            ]
        limit = optimizer.global_clipnorm
        norm = tf.sqrt(tf.add_n(self._squares))
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # NaN for infinity
        return [gradient * scale for gradient in gradients]  # Keras also makes slices dense here


def _divided(shards, gradients, variables):
    """Returns the shard of each large variable with a dense gradient; None for others."""
    return [
        shards.find(variable) if isinstance(gradient, tf.Tensor) else None
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _with_parts(gradients, divided, parts):
    """Returns gradients with this replica's parts of those of divided weights, in their order."""
    rest = iter(parts)
    return [g if shard is None else next(rest) for g, shard in zip(gradients, divided, strict=True)]


def _with_gradient(shards, gradients):
    return [
        shard
        for shard, gradient in zip(shards, gradients, strict=True)
        if shard is not None and gradient is not None
    ]


def _flat_copy(shard):
    """Returns the variable of the parts of a weight of which no device holds all."""
    return shard.weight.shard.variable.value


def _as_clipped(optimizer, leaf, gradient, variable):
    """Returns the gradient that Keras's optimizer clips, computed by Keras's operations.

    Before, it has divided the gradient by a loss scale, and added those of its micro-steps.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        gradient = keras.ops.divide(gradient, optimizer.dynamic_scale)
    if leaf.loss_scale_factor is not None:
        gradient = gradient / leaf.loss_scale_factor
    if leaf.gradient_accumulation_steps:
        accumulated = leaf._accumulated_gradients[leaf._get_variable_index(variable)]
        gradient = (gradient + accumulated.value) / leaf.gradient_accumulation_steps
    return gradient
