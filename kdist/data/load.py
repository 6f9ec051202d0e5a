"""A name or a directory becomes two pipelines.

train, test = load("fashion_mnist", batch=batch)
train, test = load("PetImages", batch=batch, operations="resize(160, 160)|random_flip()")
"""

import os
from collections.abc import Sequence

from kdist.batch import Batch
from kdist.data import arrays, idx, image_folder, tfds
from kdist.data.operations import Operation, check
from kdist.data.pipeline import Pipeline
from kdist.data.source import DatasetUnavailable, Source

# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"


def load(
    name: str | os.PathLike,
    *,
    batch: Batch,
    seed: int = 0,
    examples: int | None = None,
    operations: str | Sequence[Operation] = (),
    eval_operations: str | Sequence[Operation] | None = None,
    splits: tuple[str, str] | None = None,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    cache: bool | str = "auto",
) -> tuple[Pipeline, Pipeline]:
    """The pipelines to train on and to test with.

    Args:
        name: a data set of TFDS (`"fashion_mnist"`, `"cats_vs_dogs"`), `"digits"` (scikit-learn's,
            always there), or a directory: of MNIST's IDX files, or of images in class folders.
            A directory with the name of a data set here is written `"./digits"`.
        batch: a batch of a pipeline is one global batch.
        seed: of the order, of random operations, and of `examples`. Defaults to 0.
        examples: train on so many examples, drawn once; None, the default, is all.
        operations: what is done to each image, as `"resize(160, 160)|random_flip()"` or as
            operations of `kdist.data.operations`; random ones in training only.
        eval_operations: what is done to each test image; by default `operations` without the
            random ones.
        splits: TFDS's split expressions for training and test.
        data_dir: TFDS's directory, or for `fashion_mnist` a directory with the IDX files.
        download: whether TFDS may download. Defaults to True.
        cache: see `Pipeline`.

    Fashion-MNIST is taken from `data_dir`, from TFDS's prepared directory, from Debian's package,
    or downloaded, in this order.

    Raises:
        ValueError: an unknown name, no such examples or operations, a batch larger than the data,
            or training and test images of different shapes.
        DatasetUnavailable: the data set is not here and cannot be downloaded.
        FileNotFoundError: a directory or a file in it is missing.
    """
    train_source, test_source = sources(
        name, seed=seed, splits=splits, data_dir=data_dir, download=download
    )
    if examples is not None:
        train_source = train_source.subset(examples, seed)
    operations = check(operations)
    eval_operations = operations if eval_operations is None else check(eval_operations)
    train = Pipeline(train_source, batch, seed=seed, operations=operations, cache=cache)
    test = Pipeline(
        test_source, batch, training=False, seed=seed, operations=eval_operations, cache=cache
    )
    if train.image_shape != test.image_shape:
        raise ValueError(
            f"training images come out as {train.image_shape}, test images as {test.image_shape}; "
            "set eval_operations to what brings them to the same, such as 'central_crop(…)'"
        )
    return train, test


def sources(name, *, seed=0, splits=None, data_dir=None, download=True) -> tuple[Source, Source]:
    """The sources to train on and to test with; arguments as of `load`."""
    name = os.path.expanduser(os.fspath(name))
    if splits is not None and (name == "digits" or os.path.isdir(name)):
        raise ValueError(f"{name} has a fixed test part; splits={splits!r} is for TFDS's data sets")
    if name == "digits":
        return arrays.digits()
    if name == "fashion_mnist" and splits is None:
        return _fashion_mnist(data_dir, download)
    if os.path.isdir(name):
        return (
            idx.load_idx(name)
            if idx.holds_idx(name)
            else image_folder.load_image_folder(name, seed)
        )
    # TFDS's names may hold a slash, as in cifar10_corrupted/brightness_1.
    if os.path.isabs(name) or name.startswith("."):
        raise FileNotFoundError(f"{name}: no such directory; give one that holds images, or a name")
    return tfds.load_tfds(name, splits, data_dir and os.fspath(data_dir), download)


def _fashion_mnist(data_dir, download):
    if data_dir is not None and idx.holds_idx(data_dir):
        return idx.load_idx(data_dir, idx.FASHION_MNIST_CLASSES)
    data_dir = data_dir and os.fspath(data_dir)
    if not tfds.is_prepared("fashion_mnist", data_dir) and idx.holds_idx(DEBIAN_FASHION_MNIST):
        return idx.load_idx(DEBIAN_FASHION_MNIST, idx.FASHION_MNIST_CLASSES)
    try:
        return tfds.load_tfds("fashion_mnist", None, data_dir, download)
    except DatasetUnavailable as error:
        given = f"IDX files in {data_dir}, " if data_dir else ""
        raise DatasetUnavailable(
            f"{error}. Or install Debian's package: apt-get install dataset-fashion-mnist. Tried: "
            f"{given}TFDS's prepared directory, {DEBIAN_FASHION_MNIST}, TFDS's download"
        ) from error
