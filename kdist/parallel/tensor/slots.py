"""An optimizer's variables as the plain model's optimizer has them: slots of parts are joined."""

import collections
import functools
from collections.abc import Iterable, Iterator

import keras

from kdist.parallel.tensor.optimizers import inner_optimizers
from kdist.parallel.tensor.shards import DividedVariable
from kdist.parallel.tensor.weights import plain_weights


def keep_plain_slots_in_files(model: keras.Model, optimizers: Iterable):
    """From now on, files hold the slots of a model's optimizers as for the plain model.

    Args:
        model: split, with divided weights.
        optimizers: what a file of the model holds of optimizers.
    """
    for optimizer in optimizers:
        optimizer.save_own_variables = functools.partial(_save, model, optimizer)
        optimizer.load_own_variables = functools.partial(_load, model, optimizer)
        keep_plain_slots_in_files(model, inner_optimizers(optimizer))


def _save(model, optimizer, store):
    for number, division in enumerate(plain_slots(model, optimizer)):
        store[str(number)] = division.whole()


def _load(model, optimizer, store):
    divisions = plain_slots(model, optimizer)
    if len(store.keys()) != len(divisions):  # Keras warns, and leaves the optimizer as it is
        type(optimizer).load_own_variables(optimizer, store)
        return
    for number, division in enumerate(divisions):
        division.assign(store[str(number)])


def plain_slots(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[DividedVariable]:
    """The variables of the plain model's optimizer, in its order: its own, then wrapped ones'."""
    inner = inner_optimizers(optimizer)
    slots = [slot for each in inner for slot in plain_slots(model, each)]
    return [*_in_pieces(model, optimizer), *slots]


def owners_of(
    optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]
) -> Iterator[tuple[int | None, str]]:
    """For each variable of an optimizer (id of the one that it is a slot of, its name as a slot).

    A slot's path begins with that of its variable: `up/shard_0/kernel` has the slot
    `adam/up_shard_0_kernel_momentum`. Variables may have one path, as of layers of equal names in
    two nested models; then so have their slots, which are made in the order of the variables. What
    is no slot has None and its path.

    Args:
        optimizer: whose they are.
        variables: its own, without those of optimizers that it wraps.
    """
    owners: dict[str, list[int]] = {}
    for variable in optimizer._trainable_variables or ():
        owners.setdefault(variable.path.replace("/", "_") + "_", []).append(id(variable))
    taken: collections.Counter[tuple[str, str]] = collections.Counter()
    for slot in variables:
        path = slot.path.partition("/")[2]
        beginning = max((each for each in owners if path.startswith(each)), key=len, default=None)
        if beginning is None:
            yield None, slot.path
            continue
        name = path[len(beginning) :]
        yield owners[beginning][taken[beginning, name]], name
        taken[beginning, name] += 1


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Those of an optimizer, without those of optimizers that it wraps."""
    theirs = {id(v) for inner in inner_optimizers(optimizer) for v in inner.variables}
    return [variable for variable in optimizer.variables if id(variable) not in theirs]


def _in_pieces(model, optimizer):
    """The plain model's slots, and what else an optimizer has of its own."""
    weights = list(plain_weights(model))
    numbers = {id(piece): n for n, division in enumerate(weights) for piece in division.pieces}
    variables = own_variables(optimizer)
    joined: dict[tuple, list] = {}
    for variable, (owner, name) in zip(variables, owners_of(optimizer, variables), strict=True):
        key = (-1, variable.path) if owner is None else (numbers[owner], name)
        joined.setdefault(key, []).append(variable)
    return [
        DividedVariable(joined[key], weights[key[0]].axis if len(joined[key]) > 1 else None)
        for key in _in_plain_order(list(joined))
    ]


def _in_plain_order(keys):
    """The order in which an optimizer makes these slots for the plain variables.

    Slots of two names are made variable by variable if they alternate, else name by name. Parts
    and whole variables of a layer follow each other in another order than the plain layer's.
    """
    names = list(dict.fromkeys(name for _, name in keys))
    block_of, block, end = {}, -1, -1
    for name in names:
        numbers = [number for number, key in enumerate(keys) if key[1] == name]
        if numbers[0] > end:
            block += 1
        end = max(end, numbers[-1])
        block_of[name] = block
    return sorted(keys, key=lambda key: (block_of[key[1]], key[0], names.index(key[1])))
