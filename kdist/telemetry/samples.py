"""Sample predictions: a few test examples next to what the model predicts for them.

Imports no TensorFlow.
"""

import base64
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

# Rows of a table; W&B stores them again after every epoch.
MAX_SAMPLES = 100
# Longer vectors cannot be read in a cell of a table.
_MAX_VECTOR = 16
# Larger images are thinned to at most this height and width, so that a table stays small.
_MAX_PIXELS = 256
# Numbers of channels that an image file can have.
_CHANNELS = (1, 3, 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """A few examples whose predictions are recorded after each epoch.

    Args:
        x: images (N, H, W) or (N, H, W, C) with 1, 3, or 4 channels, or vectors (N, D) of up to 16
            numbers; at most 100 examples.
        y: labels: class numbers (N,) or (N, 1), one-hot rows (N, K), or the values of a regression.
        class_names: names of the classes, shown instead of their numbers. Defaults to None.

    Raises:
        ValueError: `x` has another shape, or `x` and `y` differ in length.

    Example:

        samples = kdist.telemetry.Samples(x_test[:16], y_test[:16])
        telemetry = kdist.callbacks.Telemetry("runs/a", wandb_mode="auto", samples=samples)
    """

    x: np.ndarray
    y: np.ndarray
    class_names: Sequence[str] | None = None

    def __post_init__(self):
        for name in ("x", "y"):
            object.__setattr__(self, name, np.asarray(getattr(self, name)))
        if not 0 < len(self.x) == len(self.y) <= MAX_SAMPLES:
            raise ValueError(
                f"Samples: {len(self.x)} examples and {len(self.y)} labels; give the same number "
                f"of both, from 1 to {MAX_SAMPLES}"
            )
        is_image = self.x.ndim == 3 or (self.x.ndim == 4 and self.x.shape[-1] in _CHANNELS)
        if not is_image and not (self.x.ndim == 2 and self.x.shape[1] <= _MAX_VECTOR):
            raise ValueError(
                f"Samples: x has the shape {self.x.shape}; give images (N, H, W, C) with 1, 3, or "
                f"4 channels, or vectors of up to {_MAX_VECTOR} numbers"
            )

    def rows(self, outputs: np.ndarray) -> list[dict[str, Any]]:
        """Returns a row per example: its input, label, prediction, and probability.

        Args:
            outputs: probabilities or logits of classes (N, K), those of one class (N, 1), or the
                values of a regression.

        Returns:
            Dictionaries with `image` (see `decoded`) or `input`, `label`, `prediction`, and
            `probability`, which is None for a regression.

        Raises:
            ValueError: the model has several outputs, or one of another shape.
        """
        count = len(self.x)
        shape = np.shape(outputs)
        if shape[:1] != (count,) or len(shape) > 2:
            raise ValueError(
                f"the model's output has the shape {shape}, instead of ({count}, K) of one output"
            )
        outputs = np.asarray(outputs, np.float64).reshape(count, -1)
        labels, chances = self._classes(outputs.shape[1]), [None] * count
        if labels is None:
            labels, predictions = self._values(self.y), self._values(outputs)
        else:
            probabilities = _probabilities(outputs)
            best = probabilities.argmax(1)
            labels, predictions = self._names(labels), self._names(best)
            chances = probabilities[np.arange(count), best].tolist()
        is_vector = self.x.ndim == 2
        inputs = self.x.tolist() if is_vector else self._images
        names = ("input" if is_vector else "image", "label", "prediction", "probability")
        columns = zip(inputs, labels, predictions, chances, strict=True)
        return [dict(zip(names, row, strict=True)) for row in columns]

    def _classes(self, width):
        """Returns the number of each example's class; None if the labels are no classes."""
        if self.y.shape[1:] == (width,) and width > 1:
            is_one_hot = np.isin(self.y, (0, 1)).all() and (self.y.sum(1) == 1).all()
            return self.y.argmax(1) if is_one_hot else None
        if self.y.size != len(self.y) or not np.isin(self.y, range(max(width, 2))).all():
            return None
        return self.y.reshape(-1).astype(int)

    def _names(self, classes):
        names = self.class_names or ()
        return [str(names[n]) if n < len(names) else str(n) for n in classes.tolist()]

    @staticmethod
    def _values(array):
        return (array[:, 0] if array.shape[1:] == (1,) else array).tolist()

    @functools.cached_property
    def _images(self):
        step = -(-max(self.x.shape[1:3]) // _MAX_PIXELS)
        return [_encoded(image) for image in _as_bytes(self.x[:, ::step, ::step])]


def decoded(image: dict[str, Any]) -> np.ndarray:
    """Returns the uint8 array of an `image` in a row of `Samples`."""
    return np.frombuffer(base64.b64decode(image["bytes"]), np.uint8).reshape(image["shape"])


def _encoded(image):
    return {
        "shape": list(image.shape),
        "bytes": base64.b64encode(np.ascontiguousarray(image)).decode(),
    }


def _as_bytes(images):
    """Returns images as numbers from 0 to 255, with one scale for all of them."""
    if images.dtype == np.uint8:
        return images
    images = np.nan_to_num(images.astype(np.float32))
    low, high = min(images.min(), 0.0), images.max()
    if low == 0 and 1 < high <= 255:
        return images.round().astype(np.uint8)
    # Standardized images use their own range; others start at black.
    return ((images - low) * (255 / max(high - low, 1.0))).round().astype(np.uint8)


def _probabilities(outputs):
    """Returns probabilities (N, K) of outputs that are probabilities or logits, for K > 1."""
    is_probability = (outputs >= 0).all() and (outputs <= 1).all()
    if outputs.shape[1] == 1:
        positive = outputs if is_probability else 1 / (1 + np.exp(-outputs))
        return np.hstack([1 - positive, positive])
    # float16 has three digits.
    if is_probability and np.allclose(outputs.sum(1), 1, atol=1e-2):
        return outputs
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
