"""Sources of a pipeline: their interface, and examples in memory.

A source returns any example by its number. The order of a pipeline is therefore a sequence of
numbers, and it can start at any position without reading the examples before it. Examples in memory
come from NumPy arrays, MNIST's IDX files, and a copy of scikit-learn's digits.
"""

import abc
import contextlib
import gzip
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PARTS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


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


class ArraySource(Source):
    """Images (N, H, W, C) and labels (N,) in memory; created by `from_arrays`."""

    def __init__(self, images, labels, num_classes, class_names=None):
        self.images, self.labels = images, labels
        self.num_examples, self.num_classes = len(labels), num_classes
        self.image_shape = images.shape[1:]
        self.class_names = class_names

    def batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the images (B, H, W, C) and labels (B,) with these numbers."""
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
    """Creates a source from arrays in memory.

    Args:
        images: uint8 or float array (N, H, W, C), or (N, H, W) for one channel.
        labels: integers (N,) or (N, 1), from 0.
        num_classes: number of classes. Defaults to the number of `class_names`, otherwise to the
            largest label plus 1.
        class_names: one name per class. Defaults to none.

    Returns:
        A `kdist.data.Source` for `kdist.data.Pipeline`.

    Raises:
        ValueError: shapes, lengths, or types do not match this description, there are no examples,
            or a label is out of range.

    Example:

        source = kdist.data.from_arrays(np.zeros((100, 28, 28), "uint8"), np.arange(100) % 10)
        train = kdist.data.Pipeline(source, kdist.Batch(10))
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4:
        raise ValueError(
            f"images have the shape {images.shape}; pass (N, H, W, C) or (N, H, W). For data that "
            "are no images, call model.fit on the arrays or on a tf.data.Dataset"
        )
    if labels.shape[1:] == (1,):  # as of keras.datasets.cifar10
        labels = labels[:, 0]
    if not len(images) and not len(labels):
        raise ValueError("there are no examples: images and labels are empty; pass at least one")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels have the shape {labels.shape} and type {labels.dtype}; pass integers (N,), "
            "the class of each image. For other targets, call model.fit on the arrays"
        )
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels; pass one label per image")
    if images.dtype != np.uint8:
        images = _as_float32(images)
    num_classes = num_classes or len(class_names or ()) or int(labels.max()) + 1
    check_labels(labels, num_classes, "from_arrays")
    if class_names and len(class_names) != num_classes:
        raise ValueError(
            f"{len(class_names)} class names for {num_classes} classes; pass one name per class"
        )
    names = tuple(class_names) if class_names else None
    return ArraySource(images, labels.astype("int32"), num_classes, names)


def _as_float32(images):
    # Other integer types are rejected: their value of white (255 or 65,535) is unknown.
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            f"images of type {images.dtype} are not supported; pass uint8 (0 to 255) or floats, "
            "converted by images.astype(…)"
        )
    return images.astype("float32")


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns images (1797, 8, 8), integers from 0 to 16, and labels (1797,) of the digits."""
    with np.load(pathlib.Path(__file__).with_name("digits") / "digits.npz") as arrays:
        return arrays["images"], arrays["labels"]


def load_digits() -> tuple[ArraySource, ArraySource]:
    """Returns scikit-learn's handwritten digits (8×8×1): 1,437 for training and 360 for testing."""
    images, labels = read_digits()
    images = np.round(images * (255 / 16)).astype("uint8")
    names = tuple(str(digit) for digit in range(10))
    source = from_arrays(images, labels, class_names=names)
    order = np.random.default_rng(0).permutation(len(images))
    return source.select(np.sort(order[360:])), source.select(np.sort(order[:360]))


def has_idx_files(directory: str | os.PathLike) -> bool:
    """Returns whether the directory holds MNIST's four files, compressed or not."""
    return all(_find(directory, name) for names in _PARTS.values() for name in names)


def load_idx(directory, class_names=None) -> tuple[ArraySource, ArraySource]:
    """Returns the training and test source of MNIST's four files, compressed (`.gz`) or not.

    Raises FileNotFoundError if a file is missing, and ValueError if it does not match the others.
    """
    parts = [
        (read_idx(_require(directory, images), rank=3), read_idx(_require(directory, labels), 1))
        for images, labels in _PARTS.values()
    ]
    # Over both parts, since a small test part may lack classes.
    largest = max(int(labels.max(initial=0)) for _, labels in parts)
    num_classes = len(class_names or ()) or 1 + largest
    try:
        train, test = (from_arrays(*part, num_classes, class_names) for part in parts)
    except ValueError as error:
        raise ValueError(f"IDX files in {directory}: {error}") from error
    return train, test


def read_idx(path: str | os.PathLike, rank: int | None = None) -> np.ndarray:
    """Returns the array in an IDX file, which is compressed if its name ends in `.gz`.

    Raises ValueError if it is not an IDX file, is damaged, or has other than `rank` axes.
    """
    opener = gzip.open if os.fspath(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            content = file.read()
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); download the file again") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise ValueError(f"{path} is not an IDX file: it begins with {content[:4]!r}")
    dtype, axes = np.dtype(_TYPES[content[2]]), content[3]
    if rank not in (None, axes):
        raise ValueError(f"{path} holds an array of {axes} axes instead of {rank}; check its name")
    start = 4 + 4 * axes
    if len(content) >= start:
        shape = struct.unpack(f">{axes}I", content[4:start])
        if len(content) - start == dtype.itemsize * int(np.prod(shape)):
            return np.frombuffer(content, dtype, offset=start).reshape(shape)
    raise ValueError(f"{path} is damaged ({len(content)} bytes); download it again")


def _find(directory, name):
    for path in (pathlib.Path(directory, name), pathlib.Path(directory, f"{name}.gz")):
        if path.is_file():
            return path
    return None


def _require(directory, name):
    path = _find(directory, name)
    if path is None:
        raise FileNotFoundError(f"{directory} does not contain {name} or {name}.gz")
    return path
