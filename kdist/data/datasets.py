"""Loads a dataset, given by name or directory, as a training and a test pipeline."""

import os
from collections.abc import Sequence
from typing import Any

from kdist.batch import Batch, check_batch
from kdist.data import image_folder, tfds
from kdist.data.arrays import (
    FASHION_MNIST_CLASSES,
    DatasetUnavailable,
    Source,
    has_idx_files,
    load_digits,
    load_idx,
)
from kdist.data.names import TEXT_PREFIX, dataset_path
from kdist.data.operations import ImageOperation, as_operations
from kdist.data.pipeline import Pipeline
from kdist.data.text import load_text
from kdist.data.worker_addresses import resolve_data_workers
from kdist.mirror.cache import cached
from kdist.mirror.store import is_url

# Directory of Debian's package dataset-fashion-mnist.
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"


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
    data_workers: str | Sequence[str] | None = None,
    sequence_length: int = 128,
    parallel_calls: int | None = None,
) -> tuple[Pipeline, Pipeline]:
    """Loads a dataset as two pipelines, for training and for testing.

    Fashion-MNIST is searched for in `data_dir`, in TFDS's directory, and in Debian's package
    dataset-fashion-mnist, and then downloaded.

    Data at URLs, such as gs://bucket/pets, are copied to a local directory first
    (`kdist.mirror.cached`). Batches are those of the same files in a directory.

    Args:
        name: name of a TFDS dataset (`"fashion_mnist"`, `"cats_vs_dogs"`), `"digits"`
            (a part of kdist, which needs no download), or a directory or URL of MNIST's IDX files
            or of images in class folders. Write `"./digits"` for a directory with a dataset's name.
            `"text:PATH"` is a file or directory of text, whose bytes are tokens (`from_text`).
        batch: sizes of a batch. One element of a pipeline is one global batch.
        seed: seed of the order, of random operations, and of `examples`. Defaults to 0.
        examples: number of training examples to sample. Defaults to all.
        operations: operations on each image, as text (`"resize(160, 160)|random_flip()"`) or as
            operations of `kdist.data.operations`. Random ones apply in training only.
        eval_operations: operations on each test image. Defaults to the non-random `operations`.
        splits: TFDS split expressions for training and testing. Defaults to `train` and `test`.
        data_dir: directory or URL of TFDS, or for `fashion_mnist` of the IDX files.
        download: whether TFDS may download the dataset. Defaults to True.
        cache: whether to keep decoded images in memory, see `Pipeline`. Defaults to `"auto"`.
        data_workers: addresses of processes that prepare the batches, see `Pipeline`. Defaults to
            those of `kdist launch --data_workers`, if any; `()` uses none.
        sequence_length: number of tokens per sequence of text. Defaults to 128.
        parallel_calls: number of examples that are prepared at the same time, see `Pipeline`.
            Defaults to None: tf.data tunes it.

    Returns:
        `(train, test)`, two `kdist.data.Pipeline`s.

    Raises:
        ValueError: the name or an operation is unknown, `examples` or the batch does not fit the
            data, or training and test images differ in shape.
        DatasetUnavailable: the dataset is not on this machine and cannot be downloaded, or its
            URL cannot be read.
        FileNotFoundError: a directory or a file in it is missing.

    Example:

        batch = kdist.Batch(local=64, replicas=2)
        train, test = kdist.data.load("cats_vs_dogs", batch=batch, operations="resize(160, 160)")
        model.fit(train, validation_data=test)
    """
    check_batch(batch)  # before examples are read
    data_workers = resolve_data_workers(data_workers)
    sources = load_sources(
        name,
        seed=seed,
        splits=splits,
        data_dir=data_dir,
        download=download,
        from_disk=bool(data_workers),
        sequence_length=sequence_length,
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
        parallel_calls=parallel_calls,
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
    data_workers: str | Sequence[str] | None = None,
    parallel_calls: int | None = None,
) -> tuple[Pipeline, Pipeline]:
    """Returns the pipelines of a training and a test source; the arguments are those of `load`."""
    train_source, test_source = sources
    if examples is not None:
        train_source = train_source.subset(examples, seed)
    operations = as_operations(operations)
    eval_operations = operations if eval_operations is None else as_operations(eval_operations)
    addresses = resolve_data_workers(data_workers)
    options: dict[str, Any] = {"seed": seed, "cache": cache, "data_workers": addresses}
    options["parallel_calls"] = parallel_calls
    train = Pipeline(train_source, batch, operations=operations, **options)
    test = Pipeline(test_source, batch, training=False, operations=eval_operations, **options)
    if train.image_shape != test.image_shape:
        raise ValueError(
            f"training images have the shape {train.image_shape}, test images {test.image_shape}; "
            "set eval_operations such that they match, for example 'central_crop(…)'"
        )
    return train, test


def load_sources(
    name,
    *,
    seed,
    splits,
    data_dir,
    download,
    from_disk,
    sequence_length,
) -> tuple[Source, Source]:
    """Returns the training and test source; the arguments are those of `load`.

    `from_disk` leaves the examples of a TFDS dataset on the disk, if they fit in memory as well.
    """
    name = dataset_path(name)
    if is_url(name):
        name = _fetched(name)
    is_text = name.startswith(TEXT_PREFIX)
    if splits is not None and (name == "digits" or is_text or os.path.isdir(name)):
        raise ValueError(
            f"{name} has a fixed test part; splits={splits!r} applies to TFDS datasets only"
        )
    if name == "digits":
        return load_digits()
    if is_text:
        return load_text(name, sequence_length, seed)
    if is_url(data_dir) and not os.path.isdir(name):
        data_dir = _fetched_data_dir(os.fspath(data_dir), name)
    if name == "fashion_mnist" and splits is None:
        return _fashion_mnist(data_dir, download)
    if os.path.isdir(name):
        is_idx = has_idx_files(name)
        return load_idx(name) if is_idx else image_folder.load_image_folder(name, seed)
    return tfds.load_tfds(name, splits, data_dir and os.fspath(data_dir), download, from_disk)


def _fetched(url):
    """Returns the local copy of a URL."""
    try:
        return os.fspath(cached(url))
    except OSError as error:
        raise DatasetUnavailable(
            f"{error}. Check the URL, the network, and the credentials of this machine"
        ) from error


def _fetched_data_dir(url, name):
    """Returns the local copy of a `data_dir` at a URL, of which only one dataset is fetched."""
    # TFDS keeps a dataset in NAME/VERSION or NAME/CONFIGURATION/VERSION.
    below = name.replace(":", "/")
    url = url.rstrip("/")
    try:
        return _fetched(f"{url}/{below}").removesuffix(f"/{below}")
    except DatasetUnavailable as error:
        if name != "fashion_mnist" or not isinstance(error.__cause__, FileNotFoundError):
            raise
        return _fetched(url)  # IDX files


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
