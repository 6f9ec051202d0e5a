"""Optimizer state that is divided among replicas (ZeRO, stages 1 and 2).

    strategy = kdist.create_strategy("mirrored", devices=4, shard="optimizer")

Each large weight has a shard: a variable of 1/N of its size, whose copy on replica r holds part r
of the weight. Keras's optimizer is built on the shards instead of the weights, so that its slots
have the size of a part, and the update is Keras's own code. `kdist.training.sharding.step` moves
gradients and weights. Files and checkpoints hold the slots of whole weights.

Whole weights remain the truth: a step copies them to the shards before it updates these. Weights
that are divided themselves (`kdist.training.sharding.weights`) have no other copy than the shard.
Optimizers that need whole weights are built on weights of one replica each
(`kdist.training.sharding.owners`).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020 (arXiv:1910.02054), section 5.
"""

import contextlib
import functools
import math

import keras
import tensorflow as tf

from kdist.compat.keras import unbuild_optimizer
from kdist.training.divided_variable import DividedVariable
from kdist.training.optimizers import (
    NotTriedError,
    inner_optimizers,
    reason_against_parts,
    unwrapped,
)
from kdist.training.sharding.owners import (
    OwnedShard,
    OwnedTensor,
    assign_owners,
    keep_on_owner,
)
from kdist.training.sharding.parts import (
    DividedCopies,
    Shard,
    TensorDivision,
    divides_over_workers,
    is_large,
    num_parts,
    refuse_part_in_checkpoints,
    sharded_state,
)
from kdist.training.sharding.readers import await_readers
from kdist.training.sharding.weights import ShardedVariable, as_divided

_KEY = "_kdist_shards"


class OptimizerShards:
    """The shards on which an optimizer is built, and its slots as those of whole weights.

    Args:
        optimizer: an optimizer that is not built. It may wrap another one.
        strategy: the strategy, whose layout says what is sharded.

    Attributes:
        weights: the weights that the optimizer updates, in the order of its `build`.
        leaf: the optimizer that has the slots: `optimizer`, or the one that it wraps.
        divides_gradients: whether micro-steps add up parts of gradients.
        have_owners: whether the optimizer needs whole weights, so that each has one replica that
            updates it, and the shards are `OwnedShard`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy):
        self._optimizer, self._strategy = optimizer, strategy
        (self.leaf,) = unwrapped(optimizer)
        self.divides_gradients = sharded_state(strategy) in ("gradients", "weights")
        self.have_owners = _needs_whole_weights(self.leaf)
        self._build = optimizer.build
        self._add_slot = self.leaf.add_variable_from_reference
        self.weights: list[keras.Variable] = []
        self._shards: dict[str, Shard] = {}  # by the optimizer's key of a weight
        self._by_variable: dict[int, Shard] = {}
        # How each slot is divided; None if every replica updates it.
        self._slots: dict[int, TensorDivision | None] = {}
        self._shared: dict | None = None  # whole slots by id of the variable of their parts

    def __iter__(self):
        return iter(self._shards.values())

    def find(self, weight: keras.Variable) -> Shard | None:
        """Returns the shard of a weight; None for a small one, which every replica updates."""
        return self._shards.get(self._optimizer._var_key(weight))

    def build(self, variables):
        """Builds the optimizer on shards of the large variables."""
        if self._optimizer.built:
            return
        self.weights = list(variables)
        # Steps that build an optimizer are within replicas, which are in the scope.
        is_in_scope = tf.distribute.has_strategy()
        with contextlib.nullcontext() if is_in_scope else self._strategy.scope():
            large = [weight for weight in self.weights if self._is_divided(weight)]
            for shard in self._shards_of(large):
                self._add(shard)
            self._build([self._updated(weight) for weight in self.weights])
            if self.have_owners:
                self._keep_factors()
                self._check_all_state_has_an_owner()

    def _is_divided(self, weight):
        is_overwritten = getattr(weight, "overwrite_with_gradient", False)
        is_divided = isinstance(weight, ShardedVariable)
        return (
            is_divided or is_large(weight.shape, weight.dtype, self._strategy)
        ) and not is_overwritten

    def _shards_of(self, weights):
        if self.have_owners:
            sizes = [math.prod(weight.shape) for weight in weights]
            owners = assign_owners(sizes, num_parts(self._strategy))
            return [
                OwnedShard.of_owner(weight, self._strategy, owner)
                for weight, owner in zip(weights, owners, strict=True)
            ]
        return [
            w.shard if isinstance(w, ShardedVariable) else Shard.of(w, self._strategy)
            for w in weights
        ]

    def _add(self, shard):
        key = self._optimizer._var_key(shard.weight)
        self._shards[key] = self._by_variable[id(shard.variable)] = shard
        excluded = getattr(self.leaf, "_exclude_from_weight_decay", set())
        if key in excluded:
            excluded.add(self._optimizer._var_key(shard.variable))

    def _updated(self, weight):
        shard = self.find(weight)
        return weight if shard is None else shard.variable

    def add_slot(self, reference_variable, *args, **kwargs):
        """Creates a slot, and records whether it belongs to a shard."""
        slot = self._add_slot(reference_variable, *args, **kwargs)
        self._note_slot(slot, self._by_variable.get(id(reference_variable)))
        return slot

    def _note_slot(self, slot, shard):
        if shard is None:
            self._slots[id(slot)] = None
            return
        if isinstance(shard, OwnedShard):
            self._slots[id(slot)] = OwnedTensor(tuple(slot.shape), shard.owner)
            keep_on_owner(slot, shard.owner, self._strategy)
        else:
            self._slots[id(slot)] = shard.division
        refuse_part_in_checkpoints(slot, "slot")

    def _keep_factors(self):
        """Keeps Adafactor's sums of rows and columns on the owners of the weights, as its slots."""
        if isinstance(self.leaf, keras.optimizers.Adafactor):
            for weight, *factors in zip(self.weights, self.leaf._r, self.leaf._c, strict=True):
                # Those of a vector are placeholders.
                shard = self.find(weight) if len(weight.shape) > 1 else None
                for factor in factors:
                    self._note_slot(factor, shard)

    def _check_all_state_has_an_owner(self):
        known = {id(self.leaf.iterations), id(self.leaf._learning_rate), *self._slots}
        for variable in self.leaf.variables:
            if id(variable) not in known:
                for each in (self._optimizer, *inner_optimizers(self._optimizer)):
                    unbuild_optimizer(each)
                raise ValueError(
                    f"{type(self.leaf).__name__} has a variable {variable.path!r} that belongs to "
                    "no single weight, and each device would update another one. Create it by "
                    "add_variable_from_reference, or leave shard (--shard) out"
                )

    def slot(self, variable: keras.Variable) -> DividedVariable:
        """Returns a variable of the optimizer as that of an optimizer that is not sharded."""
        division = self._slots.get(id(variable))
        if division is None:
            return DividedVariable([variable])
        return DividedCopies.of(variable, division)

    def save(self, optimizer, store):
        """Writes the variables of the optimizer, or of the one that it wraps, to a file.

        Raises:
            ValueError: each worker has some parts of the slots, and not all of them save.
        """
        if divides_over_workers(self._strategy) and self._shared is None:
            await_readers(self._strategy, f"the slots of {optimizer.name!r}")
        shared = self._shared or {}
        for number, variable in enumerate(optimizer.variables):
            is_shared = id(variable) in shared
            store[str(number)] = shared[id(variable)] if is_shared else self.slot(variable).whole()

    def share(self, is_kept: bool):
        """Gathers the slots of all workers, so that one can save the model; a collective call.

        Args:
            is_kept: whether this worker keeps the slots, until `forget_shared`.
        """
        shared = {}
        for each in (self._optimizer, *inner_optimizers(self._optimizer)):
            for variable in each.variables:
                if self._slots.get(id(variable)) and id(variable) not in shared:
                    value = self.slot(variable).whole()
                    shared[id(variable)] = value if is_kept else None
        self._shared = shared if is_kept else None

    def forget_shared(self):
        """Frees the slots that `share` has gathered."""
        self._shared = None

    def load(self, optimizer, store):
        """Reads what `save` has written, or a file of an optimizer that is not sharded."""
        count = len(optimizer.variables)
        if len(store.keys()) != count:  # Keras warns and leaves the optimizer unchanged
            type(optimizer).load_own_variables(optimizer, store)
        else:
            self.set_weights(optimizer, [store[str(number)] for number in range(count)])

    def set_weights(self, optimizer, weights):
        """Assigns the variables of the optimizer, given those of one that is not sharded."""
        for variable, weight in zip(optimizer.variables, weights, strict=True):
            self.slot(variable).assign(weight)

    def swap_averages(self):
        """Exchanges the trainable weights and their moving averages."""
        for weight, average in self._averages():
            if weight.trainable:
                value = as_divided(weight).whole()
                weight.assign(average.whole())
                average.assign(value)

    def reset_averages(self):
        """Sets the moving averages to the weights."""
        for weight, average in self._averages():
            average.assign(as_divided(weight).whole())

    def _averages(self):
        averages = self.leaf._model_variables_moving_average
        for weight, average in zip(self.weights, averages, strict=True):
            if average is not None:
                yield weight, self.slot(average)

    def finalize(self, variables):
        """Assigns the moving averages to the weights, as Keras does at the end of `fit`."""
        if not self.leaf.use_ema:
            type(self.leaf).finalize_variable_values(self.leaf, variables)
            return
        finalized = set(map(id, variables))  # the optimizer may have others as well
        for weight, average in self._averages():
            if id(weight) in finalized:
                weight.assign(average.whole())


def shard_optimizer(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy):
    """Makes an optimizer build its slots on shards if the strategy's layout says so.

    One that has been built is built again, with the values that its slots have.

    Raises:
        ValueError: the optimizer needs whole weights.
    """
    if not sharded_state(strategy) or shards_of(optimizer) is not None:
        return
    where = f"shard={strategy.layout.shard} divides the state of each weight over the devices"
    leaves = list(unwrapped(optimizer))
    if any(isinstance(leaf, keras.optimizers.ScheduleFreeAdamW) for leaf in leaves):
        raise ValueError(
            f"{where}, and ScheduleFreeAdamW begins with a copy of the whole weights. Use AdamW, "
            "or leave shard (--shard) out"
        )
    if len(leaves) > 1:
        raise ValueError(
            f"{where}, and {type(optimizer).__name__} has several optimizers. Compile with one "
            "optimizer, or leave shard (--shard) out"
        )
    shards = OptimizerShards(optimizer, strategy)
    if shards.have_owners:
        _check_options(shards.leaf, where)
    weights, values = [], []
    if optimizer.built:
        weights = list(optimizer._trainable_variables)
        values = [variable.numpy() for variable in optimizer.variables]
        for each in (optimizer, *inner_optimizers(optimizer)):
            unbuild_optimizer(each)
    optimizer.build = shards.build
    shards.leaf.add_variable_from_reference = shards.add_slot
    shards.leaf.finalize_variable_values = shards.finalize
    for each in (optimizer, *inner_optimizers(optimizer)):
        each.__dict__[_KEY] = shards  # not an attribute that Keras would track
        each.save_own_variables = functools.partial(shards.save, each)
        each.load_own_variables = functools.partial(shards.load, each)
        each.set_weights = functools.partial(shards.set_weights, each)
    if weights:
        optimizer.build(weights)
        optimizer.set_weights(values)


def _needs_whole_weights(optimizer):
    try:
        return reason_against_parts(optimizer) is not None
    except NotTriedError:
        return True


def _check_options(optimizer, where):
    """Raises ValueError if Keras would read or write slots that another replica has."""
    for name, instead in {
        "use_ema": "use AdamW",
        "gradient_accumulation_steps": "give accumulate to compile",
    }.items():
        if getattr(optimizer, name):
            raise ValueError(
                f"{where}, and {type(optimizer).__name__} updates each weight on one, which {name} "
                f"does not allow. Leave it out, {instead}, or leave shard (--shard) out"
            )


def shards_of(optimizer: keras.optimizers.Optimizer) -> OptimizerShards | None:
    """Returns the shards of an optimizer; None if it is not sharded."""
    return optimizer.__dict__.get(_KEY)


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights that an optimizer was built to update."""
    shards = shards_of(optimizer)
    return optimizer._trainable_variables if shards is None else shards.weights


def summed_gradients(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, tuple]]:
    """Returns (weight, shape of its gradient that a replica adds up in micro-steps) per weight."""
    weights, shards = weights_of(optimizer), shards_of(optimizer)
    if shards is None or not shards.divides_gradients:
        return [(weight, weight.shape) for weight in weights]
    found = [(weight, shards.find(weight)) for weight in weights]
    return [(w, w.shape if shard is None else shard.division.part_shape) for w, shard in found]


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[DividedVariable]:
    """Returns the variables of an optimizer as those of an optimizer that is not sharded."""
    shards = shards_of(optimizer)
    as_slot = (lambda v: DividedVariable([v])) if shards is None else shards.slot
    return [as_slot(variable) for variable in optimizer.variables]
