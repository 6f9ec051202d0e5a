"""Requests made before the clock starts, each with the answer that is right for it."""

import os
import pathlib

import numpy as np

from benchmarks.serving.dialects import Dialect

# Predictions of one row differ by 1e-6 or so with the batch that it is computed in.
TOLERANCE = 1e-4


class Examples:
    """Inputs (N, …) as whole numbers, and the right predictions (N, outputs).

    Raises:
        ValueError: two examples are answered so much alike that they cannot be told apart.
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
        """To a file of NumPy's, for a process of clients."""
        np.savez(pathlib.Path(path), inputs=self.inputs, predictions=self.predictions)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Examples":
        """From such a file."""
        with np.load(path) as file:
            return cls(file["inputs"], file["predictions"])


class Requests:
    """Examples in one server's dialect; a request is one example.

    Attributes:
        bodies: of the requests, in order.
    """

    def __init__(self, examples: Examples, dialect: Dialect):
        self.bodies = [dialect.body(row[None]) for row in examples.inputs]
        self._right = examples.predictions
        self._dialect = dialect

    def __len__(self) -> int:
        return len(self.bodies)

    def is_right(self, index: int, answer: bytes) -> bool:
        """Whether a body is the right answer to the request `index`."""
        try:
            found = self._dialect.predictions(answer)
        except Exception:  # whatever a server may send that is no answer
            return False
        right = self._right[index]
        if found.shape != (1, *right.shape):
            return False
        return bool(np.abs(found[0] - right).max() <= TOLERANCE)


def _nearest(predictions):
    """The largest difference in any output, between the two examples where it is smallest."""
    return min(
        (
            np.abs(predictions[index + 1 :] - row).max(axis=1).min()
            for index, row in enumerate(predictions[:-1])
        ),
        default=np.inf,
    )
