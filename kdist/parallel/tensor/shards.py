"""Base of all divided layers, and the variables of their model as the plain model has them.

A divided layer has a plain layer on each device as a part.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.keras import save_as
from kdist.parallel.placement import is_nested
from kdist.parallel.tensor.activations import keeps_parts
from kdist.training.divided_variable import DividedVariable
from kdist.training.optimizers import inner_optimizers


@dataclasses.dataclass(frozen=True)
class SeedStates(DividedVariable):
    """States (seed, number of draws) of the parts' seed generators.

    The first state is the plain layer's. The seed of each further part is larger by one, so that
    no two parts draw the same numbers.
    """

    def parts(self, value):
        return [value + np.array([number, 0], value.dtype) for number in range(len(self.pieces))]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parts of a layer and their devices.

    Keras's saving looks through a layer's attributes. This object hides the parts from it, since
    files hold the plain layer's variables.
    """

    strategy: Any  # a `GroupStrategy`
    first: int  # number, within a group, of the first part's device
    how: str  # "column", "row" or "heads"
    # plain layers, once they are created
    parts: list[keras.layers.Layer] = dataclasses.field(default_factory=list)

    def __len__(self):
        return self.strategy.layout.tensor

    def on(self, number: int) -> contextlib.AbstractContextManager:
        """Returns a context that places operations and variables on the device of a part."""
        return self.strategy.on(self.first + number)

    def call_on(self, number: int, function: Callable, *arguments):
        """Returns `function(…)`, computed on the device of part `number`."""
        with self.on(number):
            return function(*arguments)

    def map(self, function: Callable, *arguments: Sequence) -> tuple:
        """Returns `function(part, …)` per part, with one element of each of `arguments`."""
        calls = enumerate(zip(self.parts, *arguments, strict=True))
        return tuple(self.call_on(number, function, *each) for number, each in calls)


def saved_as(plain: type[keras.layers.Layer]):
    """Returns a class decorator that makes files and operations use the plain layer's name."""

    def decorate(kind):
        kind.plain = plain
        kind.__name__, kind.__qualname__ = plain.__name__, plain.__qualname__
        return save_as(plain)(kind)

    return decorate


class ShardedLayer:
    """Mixin for a Keras layer whose weights belong to parts, which are plain layers.

    Subclasses create the parts in `build`, compute with them in `call`, and implement
    `weight_divisions`, which maps the parts' variables to the plain layer's.
    """

    plain: type[keras.layers.Layer]  # the Keras class
    shards: Shards

    def weight_divisions(self) -> list[DividedVariable]:
        """Returns the plain layer's weights, in its order."""
        raise NotImplementedError

    def variable_divisions(self) -> list[DividedVariable]:
        """Returns the plain layer's variables, including seed states, in its order."""
        return self.weight_divisions()

    @property
    def is_by_row(self) -> bool:
        """True if each part has some of the input features and computes a partial sum."""
        return self.shards.how == "row"

    def make_parts(self, plain: type[keras.layers.Layer], changes: dict, *shapes):
        """Creates a layer of class `plain` on each device, with zeros for weights.

        The parts have this layer's configuration with `changes`, and are built with `shapes`.
        """
        own = {**self.get_config(), **changes}  # type: ignore[attr-defined]
        own.pop("activity_regularizer", None)  # it applies to the whole output
        initial = {name: "zeros" for name in own if name.endswith("_initializer")}
        for number in range(len(self.shards)):
            config = {**own, **initial, "name": f"shard_{number}"}
            with self.shards.on(number):
                part = plain.from_config(config)
                part.build(*shapes)
            for variable in part.weights:
                if variable.regularizer is not None:
                    own_device = functools.partial(self.shards.call_on, number)
                    variable.regularizer = functools.partial(own_device, variable.regularizer)
            self.shards.parts.append(part)
            self._tracker.add_to_store("layers", part)  # type: ignore[attr-defined]
        # The input may be a tuple of parts, each of another size than the whole input.
        self.input_spec = None

    def split_features(self, inputs, axis: int = -1) -> Sequence:
        """Returns an equal part of the features per device; a tuple of parts is returned as is."""
        if isinstance(inputs, tuple | list):
            return inputs
        return tf.split(inputs, len(self.shards), axis)

    def replicate(self, inputs) -> Sequence:
        """Returns the same inputs for each part."""
        return [inputs] * len(self.shards)

    def concat_features(self, outputs: Sequence, axis: int = -1):
        """Returns the features of all parts as one tensor, or as a tuple if they stay divided."""
        return tuple(outputs) if keeps_parts() else tf.concat(outputs, axis)

    def get_weights(self):
        return [division.whole() for division in self.weight_divisions()]

    def set_weights(self, weights):
        for division, value in _pairs(self, self.weight_divisions(), weights):
            division.assign(value)

    def save_own_variables(self, store):
        for number, division in enumerate(self.weight_divisions()):
            store[str(number)] = division.whole()

    def load_own_variables(self, store):
        divisions = self.weight_divisions()
        values = [store[str(number)] for number in range(len(store.keys()))]
        for division, value in _pairs(self, divisions, values):
            division.assign(value)


def _pairs(layer, divisions, values) -> Iterator:
    if len(divisions) != len(values):
        raise ValueError(
            f"layer {layer.name!r} has {len(divisions)} variables, and {len(values)} were given"
        )
    return zip(divisions, values, strict=True)


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
    elif is_nested(layer):
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
