"""Base of all divided layers: a plain layer on each device as a part."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.keras import save_as, saved_name


@dataclasses.dataclass(frozen=True)
class DividedVariable:
    """A variable of the plain layer, in pieces that are concatenated in order."""

    pieces: Sequence[keras.Variable]
    axis: int | None = None  # of concatenation; None for a single, whole piece

    def __post_init__(self):
        if self.axis is None and len(self.pieces) > 1 and type(self) is DividedVariable:
            paths = ", ".join(piece.path for piece in self.pieces)
            raise ValueError(f"{paths}: several pieces of a variable that is not divided")

    def whole(self) -> np.ndarray:
        """Returns the value of the plain variable."""
        return self.concatenate([piece.numpy() for piece in self.pieces])

    def concatenate(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the plain variable's value, as a copy, from the values of the pieces."""
        return np.array(values[0]) if self.axis is None else np.concatenate(values, self.axis)

    def parts(self, value: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the part of a plain variable's value that each piece holds."""
        return [value] if self.axis is None else np.split(value, len(self.pieces), self.axis)

    def assign(self, value):
        """Assigns each piece its part of a plain variable's value, which must have its shape."""
        value, shape = np.asarray(value), self.shape
        if value.shape != shape:
            raise ValueError(
                f"{self.pieces[0].path} is a part of a variable of shape {shape}, and the value "
                f"has the shape {value.shape}"
            )
        for piece, part in zip(self.pieces, self.parts(value), strict=True):
            piece.assign(part)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the plain variable."""
        shape = list(self.pieces[0].shape)
        if self.axis is not None:
            shape[self.axis] *= len(self.pieces)
        return tuple(shape)

    @property
    def path(self) -> str:
        """Path of the plain variable, for messages."""
        return re.sub("shard_0[/_]", "", self.pieces[0].path)


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
    stays_divided: bool  # whether the output is a tuple with one part per device
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
        return save_as(plain, saved_name(plain))(kind)

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
        return tuple(outputs) if self.shards.stays_divided else tf.concat(outputs, axis)

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
