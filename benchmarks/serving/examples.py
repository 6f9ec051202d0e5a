"""Requests that are prepared before a measurement, each with its correct response."""

import os
import pathlib

import numpy as np

from benchmarks.serving.dialects import Dialect

# Predictions of one row differ by 1e-6 or so with the batch that it is computed in.
TOLERANCE = 1e-4


class Examples:
    """Integer inputs `(N, …)` and the correct predictions `(N, outputs)`.

    Raises:
        ValueError: the predictions of two examples are too similar to distinguish.
    """

    def __init__(self, inputs: np.ndarray, predictions: np.ndarray):
        self.inputs, self.predictions = inputs, predictions
        nearest = _nearest(predictions)
        if nearest < 4 * TOLERANCE:
            raise ValueError(
                f"the right answers to two examples differ by {nearest:.1g} at most, and a wrong "
                f"one would not be seen; take a model that tells them apart by {4 * TOLERANCE}"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def save(self, path: str | os.PathLike):
        """Writes a NumPy file for a process of clients."""
        np.savez(pathlib.Path(path), inputs=self.inputs, predictions=self.predictions)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Examples":
        """Reads a file that `save` wrote."""
        with np.load(path) as file:
            return cls(file["inputs"], file["predictions"])


class Requests:
    """Examples in the format of one server; a request holds one example.

    Attributes:
        bodies: bodies of the requests, in order.
    """

    def __init__(self, examples: Examples, dialect: Dialect):
        self.bodies = [dialect.body(row[None]) for row in examples.inputs]
        self._right = examples.predictions
        self._dialect = dialect

    def __len__(self) -> int:
        return len(self.bodies)

    def is_right(self, index: int, answer: bytes) -> bool:
        """Returns whether a body is the correct response to the request `index`."""
        try:
            found = self._dialect.predictions(answer)
        except Exception:  # whatever a server may send that is no answer
            return False
        right = self._right[index]
        if found.shape != (1, *right.shape):
            return False
        return bool(np.abs(found[0] - right).max() <= TOLERANCE)


def _nearest(predictions):
    """Returns the smallest distance (maximum norm) between predictions of two examples."""
    return min(
        (
            np.abs(predictions[index + 1 :] - row).max(axis=1).min()
            for index, row in enumerate(predictions[:-1])
        ),
        default=np.inf,
    )
