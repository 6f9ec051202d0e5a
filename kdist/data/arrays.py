"""Examples in memory: NumPy arrays, and scikit-learn's digits.

source = from_arrays(images, labels)          # uint8 (N, H, W, C), integers (N,)
"""

import numpy as np
import tensorflow as tf

from kdist.data.source import Source, check_labels


class ArraySource(Source):
    """Images (N, H, W, C) and labels (N,) in memory; `from_arrays` checks and makes it."""

    def __init__(self, images, labels, num_classes, class_names=None):
        self.images, self.labels = images, labels
        self.num_examples, self.num_classes = len(labels), num_classes
        self.image_shape = images.shape[1:]
        self.class_names = class_names

    def batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Images (B, H, W, C) and labels (B,) with these numbers, gathered at once."""
        images, labels = self.tensors()
        return tf.gather(images, indices), tf.gather(labels, indices)

    def example(self, index):
        return self.batch(index)

    def select(self, indices):
        return ArraySource(
            self.images[indices], self.labels[indices], self.num_classes, self.class_names
        )

    def arrays(self):
        return self.images, self.labels


def from_arrays(images, labels, num_classes=None, class_names=None) -> ArraySource:
    """A source of arrays.

    Args:
        images: uint8 or float (N, H, W, C), or (N, H, W) for one channel.
        labels: whole numbers (N,) from 0.
        num_classes: by default as many as `class_names`, or the largest label and 1.
        class_names: a name for each class.

    Raises:
        ValueError: shapes or lengths that do not fit, no examples, images of another type, labels
            that are no whole numbers or out of range, or not one name a class.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4:
        raise ValueError(f"images of shape {images.shape}: give (N, H, W, C) or (N, H, W)")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels of shape {labels.shape} and type {labels.dtype}: give whole numbers (N,)"
        )
    if len(images) != len(labels) or not len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels: give one label an image")
    if images.dtype != np.uint8:
        images = _as_float32(images)
    num_classes = num_classes or len(class_names or ()) or int(labels.max()) + 1
    check_labels(labels, num_classes, "from_arrays")
    if class_names and len(class_names) != num_classes:
        raise ValueError(
            f"{len(class_names)} class names for {num_classes} classes: give one name a class"
        )
    names = tuple(class_names) if class_names else None
    return ArraySource(images, labels.astype("int32"), num_classes, names)


def _as_float32(images):
    # Whole numbers of other types are refused: whether 255 or 65,535 is white cannot be known.
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            f"images of type {images.dtype}: give uint8 (0 to 255) or floats, by images.astype(…)"
        )
    return images.astype("float32")


def digits() -> tuple[ArraySource, ArraySource]:
    """Scikit-learn's handwritten digits, 8×8×1: always the same 1,437, and 360 to test with."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype("uint8")
    names = tuple(str(digit) for digit in range(10))
    source = from_arrays(images, bunch.target, class_names=names)
    order = np.random.default_rng(0).permutation(len(images))
    return source.select(np.sort(order[360:])), source.select(np.sort(order[:360]))
