"""A model's variables as the plain model has them, though some are divided."""

from collections.abc import Iterator, Sequence

import keras
import numpy as np

from kdist.parallel.tensor.shards import DividedVariable, ShardedLayer


def get_plain_weights(model: keras.Model) -> list[np.ndarray]:
    """What the plain model's `get_weights()` gives."""
    return [division.whole() for division in plain_weights(model)]


def set_plain_weights(model: keras.Model, weights: Sequence[np.ndarray]):
    """Gives a model the weights of a plain one.

    Raises:
        ValueError: another number of arrays, or other shapes.
    """
    divisions = list(plain_weights(model))
    if len(divisions) != len(weights):
        raise ValueError(
            f"{model.name!r} has {len(divisions)} weights, and {len(weights)} were given: give "
            "those of the model that it was split from"
        )
    for division, value in zip(divisions, weights, strict=True):
        division.assign(value)


def plain_weights(model: keras.Model) -> Iterator[DividedVariable]:
    """The plain model's weights, in the order of its `get_weights()`."""
    return _once(_all(model, lambda layer: layer.divisions(), lambda layer: layer.weights))


def plain_variables(model: keras.Model) -> Iterator[DividedVariable]:
    """The plain model's weights and its generators of random numbers, as in its `variables`."""
    return _once(_all(model, lambda layer: layer.all_divisions(), lambda layer: layer.variables))


def _once(divisions):
    seen = set()
    for division in divisions:
        if id(division.pieces[0]) not in seen:
            seen.add(id(division.pieces[0]))
            yield division


def _all(layer, of_divided, of_whole):
    if isinstance(layer, ShardedLayer):
        yield from of_divided(layer)
    elif isinstance(layer, keras.Model):
        for inner in layer.layers:
            yield from _all(inner, of_divided, of_whole)
    else:
        yield from (DividedVariable([variable]) for variable in of_whole(layer))
