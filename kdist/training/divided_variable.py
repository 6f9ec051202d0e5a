"""A variable whose value is divided over several variables, as files and checkpoints see it."""

import dataclasses
import re
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class DividedVariable:
    """A variable of the plain model, in pieces that are concatenated in order."""

    pieces: Sequence[keras.Variable]
    axis: int | None = None  # of concatenation; None for a single, whole piece
    # Whether other workers have pieces, so that all of them must read the value together.
    is_divided_over_workers = False

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

    def local_value(self) -> np.ndarray:
        """Returns the value of the plain variable, read from the first copies of this process."""
        return self.concatenate([local_copies(piece)[0].numpy() for piece in self.pieces])

    def assign_local(self, value: np.ndarray):
        """Assigns all copies of this process their part of a plain variable's value."""
        for piece, part in zip(self.pieces, self.parts(value), strict=True):
            for copy in local_copies(piece):
                copy.assign(part)

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


def local_copies(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Returns the TensorFlow variables of this process's replicas of a Keras variable."""
    value = variable.value
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
