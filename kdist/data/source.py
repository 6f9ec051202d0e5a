"""Sources of a pipeline: numbered examples, in memory or on disk.

A source returns any example by its number. The order of a pipeline is therefore a sequence of
numbers, and it can start at any position without reading the examples before it.
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf


class DatasetUnavailable(RuntimeError):
    """A dataset is neither on this machine nor downloadable; the message names the remedies.

    Example:

        try:
            train, test = kdist.data.load("mnist", batch=batch, download=False)
        except kdist.data.DatasetUnavailable:
            train, test = kdist.data.load("digits", batch=batch)
    """


class Source(abc.ABC):
    """Numbered examples, each an image with a class label.

    A subclass sets the attributes and implements `example` and `select`; `arrays` as well if it
    holds its examples in memory.

    Attributes:
        num_examples: number of examples.
        num_classes: number of classes; labels are integers from 0 to `num_classes - 1`.
        image_shape: (H, W, C); H and W are None if the images differ in size.
        class_names: one name per class, or None.

    Example:

        class Noise(kdist.data.Source):
            num_examples, num_classes, image_shape = 1000, 10, (8, 8, 1)

            def example(self, index):
                return tf.zeros((8, 8, 1), tf.uint8), tf.cast(index % 10, tf.int32)

            def select(self, indices):
                raise NotImplementedError
    """

    num_examples: int
    num_classes: int
    image_shape: tuple[int | None, int | None, int]
    class_names: tuple[str, ...] | None = None

    _cached_tensors: tuple[tf.Tensor, ...] | None = None

    @abc.abstractmethod
    def example(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the image (H, W, C) and int32 label () of one example, in graph code."""

    def arrays(self) -> tuple[np.ndarray, ...] | None:
        """Returns the arrays that hold all examples, or None if they are read from disk."""
        return None

    def tensors(self) -> tuple[tf.Tensor, ...]:
        """Returns `arrays` as tensors, which are created once."""
        arrays = self.arrays()
        if self._cached_tensors is None and arrays is not None:
            # On the CPU and outside of the calling graph, so that they are not graph constants.
            with tf.init_scope(), tf.device("CPU:0"):
                self._cached_tensors = tuple(map(tf.constant, arrays))
        return self._cached_tensors or ()

    @contextlib.contextmanager
    def using_tensors(self, tensors: Sequence[tf.Tensor]) -> Iterator[None]:
        """Reads the examples from copies of `tensors()` inside this context."""
        own, self._cached_tensors = self._cached_tensors, tuple(tensors)
        try:
            yield
        finally:
            self._cached_tensors = own

    def subset(self, number: int, seed: int) -> "Source":
        """Returns a source of `number` examples, sampled once without replacement.

        Raises:
            ValueError: `number` is not in the range from 1 to `num_examples`.
        """
        if not 1 <= number <= self.num_examples:
            raise ValueError(
                f"cannot select {number} of {self.num_examples} examples. Set --examples to a "
                f"number from 1 to {self.num_examples}, or leave it out to use all of them"
            )
        chosen = np.random.default_rng(check_seed(seed)).permutation(self.num_examples)[:number]
        return self.select(np.sort(chosen))

    @abc.abstractmethod
    def select(self, indices: np.ndarray) -> "Source":
        """Returns a source of only the examples with these numbers."""


def check_seed(seed: int) -> int:
    """Returns the seed; raises a ValueError unless it is an integer from 0 to 2^63 - 1."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r} is not an integer from 0 to 2^63 - 1 (--seed)")
    return int(seed)


def check_labels(labels: np.ndarray, num_classes: int, what: str):
    """Raises a ValueError unless all labels are in the range from 0 to `num_classes - 1`."""
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        raise ValueError(
            f"{what}: example {bad[0]} has the label {labels[bad[0]]}, and labels go from 0 to "
            f"{num_classes - 1} ({num_classes} classes; {len(bad)} labels are out of range). "
            "Correct the labels, or set num_classes"
        )
