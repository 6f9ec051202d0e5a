"""Weights and optimizer slots of a model with divided layers, as the plain model has them."""

import collections
import functools
from collections.abc import Iterable, Iterator, Sequence

import keras
import numpy as np

from kdist.parallel.tensor.divisibility import inner_optimizers
from kdist.parallel.tensor.shards import DividedVariable, ShardedLayer


def get_plain_weights(model: keras.Model) -> list[np.ndarray]:
    """Returns what `get_weights()` of the plain model returns."""
    return [division.whole() for division in plain_weights(model)]


def set_plain_weights(model: keras.Model, weights: Sequence[np.ndarray]):
    """Sets the weights of a model to those of a plain model, as many and of the same shapes."""
    divisions = list(plain_weights(model))
    if len(divisions) != len(weights):
        raise ValueError(
            f"{model.name!r} has {len(divisions)} weights, and {len(weights)} were given. Pass the "
            "weights of the model that it was split from"
        )
    for division, value in zip(divisions, weights, strict=True):
        division.assign(value)


def plain_weights(model: keras.Model) -> Iterator[DividedVariable]:
    """Yields the plain model's weights, in the order of its `get_weights()`."""
    return _unique(
        _divisions(model, lambda layer: layer.weight_divisions(), lambda layer: layer.weights)
    )


def plain_variables(model: keras.Model) -> Iterator[DividedVariable]:
    """Yields the plain model's weights and seed states, in the order of its `variables`."""
    return _unique(
        _divisions(model, lambda layer: layer.variable_divisions(), lambda layer: layer.variables)
    )


def _unique(divisions):
    seen = set()
    for division in divisions:
        if id(division.pieces[0]) not in seen:
            seen.add(id(division.pieces[0]))
            yield division


def _divisions(layer, of_divided, of_whole):
    if isinstance(layer, ShardedLayer):
        yield from of_divided(layer)
    elif isinstance(layer, keras.Model):
        for inner in layer.layers:
            yield from _divisions(inner, of_divided, of_whole)
    else:
        yield from (DividedVariable([variable]) for variable in of_whole(layer))


def keep_plain_slots_in_files(model: keras.Model, optimizers: Iterable):
    """Makes files hold the slots of a split model's optimizers as those of the plain model."""
    for optimizer in optimizers:
        optimizer.save_own_variables = functools.partial(_save, model, optimizer)
        optimizer.load_own_variables = functools.partial(_load, model, optimizer)
        keep_plain_slots_in_files(model, inner_optimizers(optimizer))


def _save(model, optimizer, store):
    for number, division in enumerate(plain_slots(model, optimizer)):
        store[str(number)] = division.whole()


def _load(model, optimizer, store):
    divisions = plain_slots(model, optimizer)
    if len(store.keys()) != len(divisions):  # Keras warns and leaves the optimizer unchanged
        type(optimizer).load_own_variables(optimizer, store)
        return
    for number, division in enumerate(divisions):
        division.assign(store[str(number)])


def plain_slots(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[DividedVariable]:
    """Returns the variables of the plain model's optimizer: its own, then those it wraps."""
    inner = inner_optimizers(optimizer)
    slots = [slot for each in inner for slot in plain_slots(model, each)]
    return [*_own_slots(model, optimizer), *slots]


def owners_of(
    optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]
) -> Iterator[tuple[int | None, str]]:
    """Yields (id of the variable that owns the slot, name of the slot) per optimizer variable.

    The path of a slot begins with the path of its variable: `up/shard_0/kernel` has the slot
    `adam/up_shard_0_kernel_momentum`. Several variables may share a path, for example those of
    layers with equal names in two nested models. Their slots then share paths too, and are created
    in the order of the variables. Variables that are not slots yield None and their path.

    The variables are the optimizer's own, without those of optimizers that it wraps.
    """
    owners: dict[str, list[int]] = {}
    for variable in optimizer._trainable_variables or ():
        owners.setdefault(variable.path.replace("/", "_") + "_", []).append(id(variable))
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for slot in variables:
        path = slot.path.partition("/")[2]
        prefix = max((each for each in owners if path.startswith(each)), key=len, default=None)
        if prefix is None:
            yield None, slot.path
            continue
        name = path[len(prefix) :]
        yield owners[prefix][counts[prefix, name]], name
        counts[prefix, name] += 1


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of an optimizer without those of optimizers that it wraps."""
    wrapped = {id(v) for inner in inner_optimizers(optimizer) for v in inner.variables}
    return [variable for variable in optimizer.variables if id(variable) not in wrapped]


def _own_slots(model, optimizer):
    """Returns the plain model's slots and the optimizer's other variables."""
    weights = list(plain_weights(model))
    numbers = {id(piece): n for n, division in enumerate(weights) for piece in division.pieces}
    variables = own_variables(optimizer)
    pieces: dict[tuple, list] = {}
    for variable, (owner, name) in zip(variables, owners_of(optimizer, variables), strict=True):
        key = (-1, variable.path) if owner is None else (numbers[owner], name)
        pieces.setdefault(key, []).append(variable)
    return [
        DividedVariable(pieces[key], weights[key[0]].axis if len(pieces[key]) > 1 else None)
        for key in _in_plain_order(list(pieces))
    ]


def _in_plain_order(keys):
    """Returns the order in which an optimizer creates these slots for the plain variables.

    If two slot names alternate, slots were created variable by variable, else name by name. The
    parts and whole variables of a divided layer are in another order than the plain layer's.
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
