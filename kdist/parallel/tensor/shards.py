"""What all divided layers have in common: plain layers as parts, each on a device."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.training.keras_internals import save_as, saved_name


@dataclasses.dataclass(frozen=True)
class DividedVariable:
    """A variable of the plain layer, in pieces.

    Attributes:
        pieces: in order.
        axis: along which they follow each other; None for one piece, which is the whole.
    """

    pieces: Sequence[keras.Variable]
    axis: int | None = None

    def __post_init__(self):
        if self.axis is None and len(self.pieces) > 1 and type(self) is DividedVariable:
            paths = ", ".join(piece.path for piece in self.pieces)
            raise ValueError(f"{paths}: taken for parts of one variable, and it is not divided")

    def whole(self) -> np.ndarray:
        """The value of the plain variable."""
        return self.joined([piece.numpy() for piece in self.pieces])

    def joined(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The plain variable's value where the pieces have these; a copy."""
        return np.array(values[0]) if self.axis is None else np.concatenate(values, self.axis)

    def parts(self, value: np.ndarray) -> Sequence[np.ndarray]:
        """What of a plain variable's value each piece has."""
        return [value] if self.axis is None else np.split(value, len(self.pieces), self.axis)

    def assign(self, value):
        """Gives each piece its part of a plain variable's value.

        Raises:
            ValueError: the value has another shape.
        """
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
        """The plain variable's."""
        shape = list(self.pieces[0].shape)
        if self.axis is not None:
            shape[self.axis] *= len(self.pieces)
        return tuple(shape)

    @property
    def path(self) -> str:
        """What the plain variable is called, within messages."""
        return re.sub("shard_0[/_]", "", self.pieces[0].path)


@dataclasses.dataclass(frozen=True)
class Generators(DividedVariable):
    """The state (seed, count of draws) of the parts' generators of random numbers.

    The first part's is the plain layer's. The seed of each further one is larger by one, so that
    no two parts draw the same.
    """

    def parts(self, value):
        return [value + np.array([number, 0], value.dtype) for number in range(len(self.pieces))]


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where a layer's parts are.

    It hides them from Keras's files, which look through a layer's attributes: the files hold the
    plain layer's variables.

    Attributes:
        strategy: a GroupStrategy.
        first: the number, within a group, of the first one's device.
        how: "column", "row" or "heads".
        stays_divided: whether the output is a tuple, a part a device.
        parts: plain layers, once they are made.
    """

    strategy: Any
    first: int
    how: str
    stays_divided: bool
    parts: list[keras.layers.Layer] = dataclasses.field(default_factory=list)

    def __len__(self):
        return self.strategy.layout.tensor

    def on(self, number: int) -> contextlib.AbstractContextManager:
        """Places operations and variables on the device of the part of that number."""
        return self.strategy.on(self.first + number)

    def call_on(self, number: int, function: Callable, *arguments):
        """`function(…)` on the device of the part of that number."""
        with self.on(number):
            return function(*arguments)

    def each(self, function: Callable, *arguments: Sequence) -> tuple:
        """`function(part, …)` on each part's device, with an element of each of `arguments`."""
        calls = enumerate(zip(self.parts, *arguments, strict=True))
        return tuple(self.call_on(number, function, *each) for number, each in calls)


def stands_for(plain: type[keras.layers.Layer]):
    """Class decorator: in files and in names of operations, a divided layer is a plain one."""

    def named(kind):
        kind.plain = plain
        kind.__name__, kind.__qualname__ = plain.__name__, plain.__qualname__
        return save_as(plain, saved_name(plain))(kind)

    return named


class ShardedLayer:
    """Mixin before a Keras layer: the weights are those of parts, which are plain layers.

    Deriving classes make the parts in `build`, compute with them in `call`, and say in `divisions`
    how the plain layer's variables are divided among them.

    Attributes:
        plain: the Keras class.
        shards: the parts and where they are.
    """

    plain: type[keras.layers.Layer]
    shards: Shards

    def divisions(self) -> list[DividedVariable]:
        """The plain layer's weights, in its order."""
        raise NotImplementedError

    def all_divisions(self) -> list[DividedVariable]:
        """The plain layer's variables, in its order: also those that are no weights."""
        return self.divisions()

    @property
    def is_by_row(self) -> bool:
        """Whether each part has some of the input features, and gives a partial sum."""
        return self.shards.how == "row"

    def make_parts(self, plain: type[keras.layers.Layer], changes: dict, *shapes):
        """Makes a plain layer on each device: with this one's configuration, but for `changes`.

        They begin with zeros: their values are set afterwards.
        """
        own = {**self.get_config(), **changes}  # type: ignore[attr-defined]
        own.pop("activity_regularizer", None)  # it is for the output as a whole
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
        # A tuple of parts may come in, of which each has another size.
        self.input_spec = None

    def divided(self, inputs, axis: int = -1) -> Sequence:
        """The features of a tensor, an equal part a device; a tuple of parts stays as it is."""
        if isinstance(inputs, tuple | list):
            return inputs
        return tf.split(inputs, len(self.shards), axis)

    def copied(self, inputs) -> Sequence:
        """The same for each part."""
        return [inputs] * len(self.shards)

    def joined(self, outputs: Sequence, axis: int = -1):
        """The features of all parts: a tensor, or the tuple itself, where it is to stay so."""
        return tuple(outputs) if self.shards.stays_divided else tf.concat(outputs, axis)

    def get_weights(self):
        return [division.whole() for division in self.divisions()]

    def set_weights(self, weights):
        for division, value in _pairs(self, self.divisions(), weights):
            division.assign(value)

    def save_own_variables(self, store):
        for number, division in enumerate(self.divisions()):
            store[str(number)] = division.whole()

    def load_own_variables(self, store):
        divisions = self.divisions()
        values = [store[str(number)] for number in range(len(store.keys()))]
        for division, value in _pairs(self, divisions, values):
            division.assign(value)


def call_part(part, inputs):
    """A part's output, for `Shards.each`."""
    return part(inputs)


def sum_of(parts: Sequence):
    """The sum of partial sums, on the device where it is asked for."""
    return tf.add_n(list(parts))


def _pairs(layer, divisions, values) -> Iterator:
    if len(divisions) != len(values):
        raise ValueError(
            f"layer {layer.name!r} has {len(divisions)} variables, and {len(values)} were given"
        )
    return zip(divisions, values, strict=True)
