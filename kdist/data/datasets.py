"""Loads a dataset, given by name or directory, as a training and a test pipeline.

A directory may have image files in one folder per class, such as `cats/1.jpg` and `dogs/7.jpg`.
"""

import concurrent.futures
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.batch import Batch
from kdist.data import tfds
from kdist.data.arrays import FASHION_MNIST_CLASSES, has_idx_files, load_digits, load_idx
from kdist.data.names import dataset_path
from kdist.data.operations import ImageOperation, as_operations
from kdist.data.pipeline import Pipeline
from kdist.data.source import DatasetUnavailable, Source

# Directory of Debian's package dataset-fashion-mnist.
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"

_logger = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_MAX_NAMES_SHOWN = 5
# Checking 25,000 files takes about a minute; progress is logged after this many.
_PROGRESS_INTERVAL = 5000


def load(
    name: str | os.PathLike,
    *,
    batch: Batch,
    seed: int = 0,
    examples: int | None = None,
    operations: str | Sequence[ImageOperation] = (),
    eval_operations: str | Sequence[ImageOperation] | None = None,
    splits: tuple[str, str] | None = None,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    cache: bool | str = "auto",
    data_workers: str | Sequence[str] = (),
) -> tuple[Pipeline, Pipeline]:
    """Loads a dataset as two pipelines, for training and for testing.

    Fashion-MNIST is searched for in `data_dir`, in TFDS's directory, and in Debian's package
    dataset-fashion-mnist, and then downloaded.

    Args:
        name: name of a TFDS dataset (`"fashion_mnist"`, `"cats_vs_dogs"`), `"digits"`
            (a part of kdist, which needs no download), or a directory of MNIST's IDX files or of
            images in class folders. Write `"./digits"` for a directory with a dataset's name.
        batch: sizes of a batch. One element of a pipeline is one global batch.
        seed: seed of the order, of random operations, and of `examples`. Defaults to 0.
        examples: number of training examples to sample. Defaults to all.
        operations: operations on each image, as text (`"resize(160, 160)|random_flip()"`) or as
            operations of `kdist.data.operations`. Random ones apply in training only.
        eval_operations: operations on each test image. Defaults to the non-random `operations`.
        splits: TFDS split expressions for training and testing. Defaults to `train` and `test`.
        data_dir: directory of TFDS, or for `fashion_mnist` of the IDX files.
        download: whether TFDS may download the dataset. Defaults to True.
        cache: whether to keep decoded images in memory, see `Pipeline`. Defaults to `"auto"`.
        data_workers: addresses of processes that prepare the batches, see `Pipeline`.

    Returns:
        `(train, test)`, two `kdist.data.Pipeline`s.

    Raises:
        ValueError: the name or an operation is unknown, `examples` or the batch does not fit the
            data, or training and test images differ in shape.
        DatasetUnavailable: the dataset is not on this machine and cannot be downloaded.
        FileNotFoundError: a directory or a file in it is missing.

    Example:

        batch = kdist.Batch(local=64, replicas=2)
        train, test = kdist.data.load("cats_vs_dogs", batch=batch, operations="resize(160, 160)")
        model.fit(train, validation_data=test)
    """
    sources = load_sources(
        name,
        seed=seed,
        splits=splits,
        data_dir=data_dir,
        download=download,
        from_disk=bool(data_workers),
    )
    return create_pipelines(
        sources,
        batch=batch,
        seed=seed,
        examples=examples,
        operations=operations,
        eval_operations=eval_operations,
        cache=cache,
        data_workers=data_workers,
    )


def create_pipelines(
    sources: tuple[Source, Source],
    *,
    batch: Batch,
    seed: int = 0,
    examples: int | None = None,
    operations: str | Sequence[ImageOperation] = (),
    eval_operations: str | Sequence[ImageOperation] | None = None,
    cache: bool | str = "auto",
    data_workers: str | Sequence[str] = (),
) -> tuple[Pipeline, Pipeline]:
    """Returns the pipelines of a training and a test source; the arguments are those of `load`."""
    train_source, test_source = sources
    if examples is not None:
        train_source = train_source.subset(examples, seed)
    operations = as_operations(operations)
    eval_operations = operations if eval_operations is None else as_operations(eval_operations)
    options: dict[str, Any] = {"seed": seed, "cache": cache, "data_workers": data_workers}
    train = Pipeline(train_source, batch, operations=operations, **options)
    test = Pipeline(test_source, batch, training=False, operations=eval_operations, **options)
    if train.image_shape != test.image_shape:
        raise ValueError(
            f"training images have the shape {train.image_shape}, test images {test.image_shape}; "
            "set eval_operations such that they match, for example 'central_crop(…)'"
        )
    return train, test


def load_sources(
    name, *, seed=0, splits=None, data_dir=None, download=True, from_disk=False
) -> tuple[Source, Source]:
    """Returns the training and test source; the arguments are those of `load`.

    `from_disk` leaves the examples of a TFDS dataset on the disk, if they fit in memory as well.
    """
    name = dataset_path(name)
    if splits is not None and (name == "digits" or os.path.isdir(name)):
        raise ValueError(
            f"{name} has a fixed test part; splits={splits!r} applies to TFDS datasets only"
        )
    if name == "digits":
        return load_digits()
    if name == "fashion_mnist" and splits is None:
        return _fashion_mnist(data_dir, download)
    if os.path.isdir(name):
        is_idx = has_idx_files(name)
        return load_idx(name) if is_idx else load_image_folder(name, seed)
    return tfds.load_tfds(name, splits, data_dir and os.fspath(data_dir), download, from_disk)


def _fashion_mnist(data_dir, download):
    if data_dir is not None and has_idx_files(data_dir):
        return load_idx(data_dir, FASHION_MNIST_CLASSES)
    data_dir = data_dir and os.fspath(data_dir)
    if not tfds.is_prepared("fashion_mnist", data_dir) and has_idx_files(DEBIAN_FASHION_MNIST):
        return load_idx(DEBIAN_FASHION_MNIST, FASHION_MNIST_CLASSES)
    try:
        return tfds.load_tfds("fashion_mnist", None, data_dir, download)
    except DatasetUnavailable as error:
        given = f"IDX files in {data_dir}, " if data_dir else ""
        raise DatasetUnavailable(
            f"{error}. Or install Debian's package: apt-get install dataset-fashion-mnist. Tried: "
            f"{given}TFDS's directory, {DEBIAN_FASHION_MNIST}, TFDS's download"
        ) from error


class ImageFolderSource(Source):
    """Image files of any size, decoded on demand to 3 channels."""

    image_shape = (None, None, 3)

    def __init__(self, paths, labels, class_names):
        self._paths, self._labels = np.asarray(paths), np.asarray(labels, "int32")
        self.num_examples, self.num_classes = len(paths), len(class_names)
        self.class_names = tuple(class_names)

    def example(self, index):
        path = tf.gather(tf.constant(self._paths), index)
        return _decode(tf.io.read_file(path)), tf.gather(tf.constant(self._labels), index)

    def select(self, indices):
        return ImageFolderSource(self._paths[indices], self._labels[indices], self.class_names)


def load_image_folder(directory, seed=0, test_fraction=0.2):
    """Returns the training and test source of `train/` and `test/`, or of one folder that is split.

    Of one folder, `test_fraction` of the examples are for testing. Every file is decoded once;
    broken files are skipped and logged. Raises FileNotFoundError if the directory does not exist,
    and ValueError if it contains no class folders with readable images, or too few to split.
    """
    root = pathlib.Path(directory)
    if (root / "train").is_dir() and (root / "test").is_dir():
        train, test = _folder(root / "train"), _folder(root / "test")
        if train.class_names != test.class_names:
            raise ValueError(
                f"{root}: train has the classes {train.class_names}, test {test.class_names}; "
                "create the same folders in both"
            )
        return train, test
    source = _folder(root)
    number = round(source.num_examples * test_fraction)
    if not 0 < number < source.num_examples:
        raise ValueError(f"{root}: {source.num_examples} images are too few to split; add more")
    order = np.random.default_rng(seed).permutation(source.num_examples)
    return source.select(np.sort(order[number:])), source.select(np.sort(order[:number]))


def _folder(root):
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a directory; pass one with a folder per class")
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    found = [
        (str(path), label)
        for label, name in enumerate(names)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    readable = _readable(found)
    if len(names) < 2 or not readable:
        raise ValueError(
            f"{root} contains no images in class folders; expected {root}/<class>/*.jpg, with two "
            f"or more classes, found {len(names)} folders and {len(readable)} readable images"
        )
    paths, labels = zip(*readable, strict=True)
    return ImageFolderSource(paths, labels, names)


def _readable(found):
    """Returns the (path, label) pairs whose file TensorFlow can decode."""

    def is_broken(pair):
        try:
            return _decode(tf.io.read_file(pair[0])).shape[0] == 0
        except tf.errors.OpError:
            return True

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        broken = []
        for is_bad in pool.map(is_broken, found):
            broken.append(is_bad)
            if len(broken) % _PROGRESS_INTERVAL == 0:
                _logger.info("checked %d of %d images", len(broken), len(found))
    names = [os.path.join(*pathlib.Path(path).parts[-2:]) for path, _ in _select(found, broken)]
    if names:
        _logger.warning(
            "skipped %d of %d images that cannot be decoded: %s%s",
            len(names),
            len(found),
            ", ".join(names[:_MAX_NAMES_SHOWN]),
            ", …" if len(names) > _MAX_NAMES_SHOWN else "",
        )
    return _select(found, [not is_bad for is_bad in broken])


def _select(items, keep):
    return [item for item, kept in zip(items, keep, strict=True) if kept]


def _decode(content):
    """Returns a uint8 image (H, W, 3) of a JPEG, PNG, BMP, or GIF file, whatever its suffix."""
    # TensorFlow cannot decode BMP files of 4 channels to 3, so channels are converted afterwards.
    image = tf.io.decode_image(content, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, None])
    channels = tf.shape(image)[-1]
    image = tf.cond(channels < 3, lambda: tf.repeat(image[..., :1], 3, -1), lambda: image[..., :3])
    return tf.ensure_shape(image, [None, None, 3])
