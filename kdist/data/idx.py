"""IDX files, the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist/).

train, test = load_idx("/usr/share/datasets/fashion-mnist")
"""

import gzip
import os
import pathlib
import struct
import zlib

import numpy as np

from kdist.data.arrays import ArraySource, from_arrays

FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PARTS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def holds_idx(directory: str | os.PathLike) -> bool:
    """Whether MNIST's four files are there, compressed or not."""
    return all(_find(directory, name) for names in _PARTS.values() for name in names)


def load_idx(directory, class_names=None) -> tuple[ArraySource, ArraySource]:
    """Training and test source from MNIST's four files, compressed (`.gz`) or not.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no IDX file, is cut short, or does not fit to the others.
    """
    parts = [
        (read_idx(_require(directory, images), rank=3), read_idx(_require(directory, labels), 1))
        for images, labels in _PARTS.values()
    ]
    # Of both parts: a small test part need not hold every class.
    num_classes = len(class_names or ()) or 1 + max(
        int(labels.max(initial=0)) for _, labels in parts
    )
    try:
        train, test = (from_arrays(*part, num_classes, class_names) for part in parts)
    except ValueError as error:
        raise ValueError(f"IDX files in {directory}: {error}") from error
    return train, test


def read_idx(path: str | os.PathLike, rank: int | None = None) -> np.ndarray:
    """The array in an IDX file, compressed if its name ends in `.gz`.

    Args:
        path: the file.
        rank: how many axes the array must have: 3 for images, 1 for labels. Defaults to any.

    Raises:
        ValueError: it is no IDX file, is cut short or damaged, or has another number of axes.
    """
    opener = gzip.open if os.fspath(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            content = file.read()
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch the file again") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise ValueError(f"{path} is no IDX file: it begins with {content[:4]!r}")
    dtype, axes = np.dtype(_TYPES[content[2]]), content[3]
    if rank not in (None, axes):
        raise ValueError(f"{path} holds an array of {axes} axes instead of {rank}; were two mixed?")
    start = 4 + 4 * axes
    if len(content) >= start:
        shape = struct.unpack(f">{axes}I", content[4:start])
        if len(content) - start == dtype.itemsize * int(np.prod(shape)):
            return np.frombuffer(content, dtype, offset=start).reshape(shape)
    raise ValueError(f"{path} is cut short or damaged: {len(content)} bytes; fetch it again")


def _find(directory, name):
    for path in (pathlib.Path(directory, name), pathlib.Path(directory, f"{name}.gz")):
        if path.is_file():
            return path
    return None


def _require(directory, name):
    path = _find(directory, name)
    if path is None:
        raise FileNotFoundError(f"{directory} holds no {name} or {name}.gz")
    return path
