"""An optimizer's variables as the plain model's optimizer has them: slots of parts are joined.

A slot belongs to the variable whose path its own begins with: `up/shard_0/kernel` has the slot
`adam/up_shard_0_kernel_momentum`.
"""

import functools
from collections.abc import Iterable

import keras

from kdist.parallel.tensor.optimizers import inner_optimizers
from kdist.parallel.tensor.shards import Division
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


def plain_slots(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[Division]:
    """The variables of the plain model's optimizer, in its order: its own, then wrapped ones'."""
    inner = inner_optimizers(optimizer)
    theirs = {id(variable) for each in inner for variable in each.variables}
    own = [variable for variable in optimizer.variables if id(variable) not in theirs]
    slots = [slot for each in inner for slot in plain_slots(model, each)]
    return [*_in_pieces(model, own), *slots]


def _in_pieces(model, variables):
    """The plain model's slots, of which these are one optimizer's."""
    owners = _owners(model)
    joined: dict[tuple, list] = {}
    for variable in variables:
        joined.setdefault(_key(variable, owners), []).append(variable)
    axes = [division.axis for division in plain_weights(model)]
    return [
        Division(joined[key], axes[key[0]] if len(joined[key]) > 1 else None)
        for key in _in_plain_order(list(joined))
    ]


def _owners(model):
    """How the paths of a variable's slots begin -> number of the plain variable."""
    return {
        piece.path.replace("/", "_") + "_": number
        for number, division in enumerate(plain_weights(model))
        for piece in division.pieces
    }


def _key(variable, owners):
    """(number of the plain variable, name of the slot); what is no slot has -1 and its path."""
    slot = variable.path.partition("/")[2]
    beginnings = [beginning for beginning in owners if slot.startswith(beginning)]
    if not beginnings:
        return -1, variable.path
    longest = max(beginnings, key=len)
    return owners[longest], slot[len(longest) :]


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
