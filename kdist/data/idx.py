"""IDX files, the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist/)."""

import gzip
import os
import pathlib
import struct
import zlib

import numpy as np

from kdist.data.arrays import ArraySource, from_arrays

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PARTS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


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
