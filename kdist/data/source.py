"""What a pipeline draws from: numbered examples, in memory or on disk.

A source gives any example by its number, so that an order is a matter of numbers alone and a
position in the data is found without reading what came before.
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf


class DatasetUnavailable(RuntimeError):
    """A data set is not on this machine and cannot be brought here; the message says what to do."""


class Source(abc.ABC):
    """Numbered examples: an image and a label each.

    Attributes:
        num_examples: how many.
        num_classes: labels are whole numbers from 0 to this, exclusive.
        image_shape: (H, W, C); None where sizes differ.
        class_names: a name for each class, or None.
    """

    num_examples: int
    num_classes: int
    image_shape: tuple[int | None, int | None, int]
    class_names: tuple[str, ...] | None = None

    # What holds all examples, for a source that has them in memory.
    _cached_tensors: tuple[tf.Tensor, ...] | None = None

    @abc.abstractmethod
    def example(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Image (H, W, C) and int32 label () of the example with this number; in graph code."""

    def arrays(self) -> tuple[np.ndarray, ...] | None:
        """What holds all examples, if they are in memory; None if they are read from disk."""
        return None

    def tensors(self) -> tuple[tf.Tensor, ...]:
        """`arrays` as tensors, made once."""
        arrays = self.arrays()
        if self._cached_tensors is None and arrays is not None:
            # On the CPU, and outside of the graph that asks: the data are no constants of a graph.
            with tf.init_scope(), tf.device("CPU:0"):
                self._cached_tensors = tuple(map(tf.constant, arrays))
        return self._cached_tensors or ()

    @contextlib.contextmanager
    def held_in(self, tensors: Sequence[tf.Tensor]) -> Iterator[None]:
        """Meanwhile the source draws from these tensors, which hold what its own hold."""
        own, self._cached_tensors = self._cached_tensors, tuple(tensors)
        try:
            yield
        finally:
            self._cached_tensors = own

    def subset(self, number: int, seed: int) -> "Source":
        """`number` examples drawn once, by `seed`.

        Raises:
            ValueError: there are not so many, or `number` is smaller than 1.
        """
        if not 1 <= number <= self.num_examples:
            raise ValueError(
                f"{number} examples asked for; there are {self.num_examples}. Set --examples to a "
                f"number from 1 to {self.num_examples}, or leave it out for all"
            )
        chosen = np.random.default_rng(check_seed(seed)).permutation(self.num_examples)[:number]
        return self.select(np.sort(chosen))

    @abc.abstractmethod
    def select(self, indices: np.ndarray) -> "Source":
        """The source of these examples alone."""


def check_seed(seed: int) -> int:
    """The seed, if it is a whole number from 0 to 2^63 - 1; otherwise raises a ValueError."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 on (--seed)")
    return int(seed)


def check_labels(labels: np.ndarray, num_classes: int, what: str):
    """Raises a ValueError unless all labels are from 0 to `num_classes` - 1."""
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        raise ValueError(
            f"{what}: example {bad[0]} has the label {labels[bad[0]]}, and labels go from 0 to "
            f"{num_classes - 1} ({num_classes} classes; {len(bad)} labels are out of range). "
            "Correct the labels, or set num_classes"
        )
