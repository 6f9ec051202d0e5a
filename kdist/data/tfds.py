"""Data sets of TensorFlow Datasets, by name.

train, test = load_tfds("cats_vs_dogs", splits=("train[:80%]", "train[80%:]"))
"""

import contextlib
import difflib
import os
import sys
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import psutil
import tensorflow as tf

from kdist.data.arrays import from_arrays
from kdist.data.source import DatasetUnavailable, Source, check_labels
from kdist.data.tfrecord import RecordSource

# What is read into memory may take this share of what is free: its tensor is a second copy.
MEMORY_SHARE = 0.25


class EncodedSource(Source):
    """Encoded images of different sizes, held in memory as the bytes of their files."""

    def __init__(self, contents, labels, channels, num_classes, class_names):
        self._contents = np.asarray(contents, dtype=object)
        self._labels = np.asarray(labels, "int32")
        self.num_examples, self.num_classes = len(labels), num_classes
        self.image_shape, self.class_names = (None, None, channels), class_names

    def example(self, index):
        contents, labels = self.tensors()
        channels = self.image_shape[-1]
        image = tf.io.decode_image(tf.gather(contents, index), channels, expand_animations=False)
        return tf.ensure_shape(image, self.image_shape), tf.gather(labels, index)

    def select(self, indices):
        return EncodedSource(
            self._contents[indices],
            self._labels[indices],
            self.image_shape[-1],
            self.num_classes,
            self.class_names,
        )

    def arrays(self):
        return self._contents, self._labels


def is_prepared(name: str, data_dir: str | None = None) -> bool:
    """Whether the data set lies ready in TFDS's directory."""
    import tensorflow_datasets as tfds

    with _without_google_cloud(tfds):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError:
            return False
        return builder.data_path.exists()


def load_tfds(
    name: str,
    splits: tuple[str, str] | None = None,
    data_dir: str | None = None,
    download: bool = True,
) -> tuple[Source, Source]:
    """Training and test source; downloads and prepares the data set if need be, with progress.

    Args:
        name: TFDS's name, with a configuration and version if wanted: `"mnist"`, `"cifar10:3.0.2"`.
        splits: TFDS's split expressions for training and test; by default `train` and `test`, or
            where there is no `test`, `train` and `validation`; where there is neither, the first
            80 % of `train` and the rest.
        data_dir: TFDS's directory; by default its own choice, `~/tensorflow_datasets`.
        download: whether it may be downloaded.

    Raises:
        ValueError: TFDS knows no such data set or split, or it is not one of images and labels.
        DatasetUnavailable: it is not here and cannot be downloaded.

    A data set that takes more than a quarter of the free memory is read from its files as it is
    asked for, any other once.
    """
    import tensorflow_datasets as tfds

    with _without_google_cloud(tfds):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except (tfds.core.DatasetNotFoundError, ValueError) as error:  # unknown, or no name at all
            raise ValueError(_unknown(name, tfds.list_builders(), error)) from error
        if not builder.data_path.exists():
            _prepare(builder, download)
        return _sources(tfds, builder, splits)


# How long a host may take to answer.
_SECONDS = 5.0


def _prepare(builder, download):
    if not download:
        raise DatasetUnavailable(
            f"{builder.name} is not prepared in {builder.data_dir}, and downloading is switched "
            "off; allow it (--download), or point --data_dir at a prepared directory"
        )
    try:
        _check_reachable(builder)
        builder.download_and_prepare()
    except ImportError:  # a package that this data set's own code needs
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise DatasetUnavailable(
            f"{builder.name} cannot be downloaded ({reason}). Check the network, point --data_dir "
            "at a prepared TFDS directory, or take --dataset=digits, which needs no download"
        ) from error


def _check_reachable(builder):
    """Raises OSError if no host of the data set answers; TFDS itself would retry for minutes."""
    hosts = {urllib.parse.urlsplit(url).netloc: url for url in builder.url_infos}
    failures = []
    for host, url in hosts.items():
        try:
            # Through the proxy, if the environment names one, as TFDS does.
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS)
            return
        except urllib.error.HTTPError:  # an answer; what it means, the download will tell
            return
        except OSError as error:
            failures.append(f"{host}: {getattr(error, 'reason', error)}")
    if failures:
        raise OSError("; ".join(failures))


def _sources(tfds, builder, splits):
    info = builder.info
    keys = info.supervised_keys
    kinds = tfds.features.Image, tfds.features.ClassLabel
    if not keys or not all(
        isinstance(info.features[key], kind) for key, kind in zip(keys, kinds, strict=False)
    ):
        raise ValueError(
            f"{builder.name} is not a data set of images with class labels: its features are "
            f"{', '.join(info.features)}; take another one"
        )
    if splits is None:
        held_out = [name for name in ("test", "validation") if name in info.splits]
        splits = ("train", held_out[0]) if held_out else ("train[:80%]", "train[80%:]")
    return tuple(_source(tfds, builder, split) for split in splits)


def _part(info, split):
    """What a split expression stands for."""
    try:
        part = info.splits[split]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{info.name} has no split {split!r}; it has {', '.join(info.splits)}, and parts of "
            "them such as 'train[:80%]'"
        ) from error
    if not part.num_examples:
        raise ValueError(f"{info.name}: the split {split!r} is empty; take a larger part")
    return part


def _source(tfds, builder, split):
    info = builder.info
    part = _part(info, split)
    image_key, label_key = info.supervised_keys[:2]
    shape, label = info.features[image_key].shape, info.features[label_key]
    names = tuple(label.names) if label.names else None
    if not _fits_in_memory(builder, part, shape):
        return _on_disk(builder, part, names)
    if None not in shape:
        examples = tfds.as_numpy(builder.as_dataset(split, batch_size=-1))
        return from_arrays(examples[image_key], examples[label_key], label.num_classes, names)
    # Images of different sizes stay as they are in the file; they are decoded when asked for.
    decoders = {image_key: tfds.decode.SkipDecoding()}
    examples = list(tfds.as_numpy(builder.as_dataset(split, decoders=decoders)))
    labels = np.array([example[label_key] for example in examples])
    check_labels(labels, label.num_classes, f"{builder.name}, split {split}")
    contents = [example[image_key] for example in examples]
    return EncodedSource(contents, labels, shape[-1], label.num_classes, names)


def _fits_in_memory(builder, part, shape):
    splits = builder.info.splits.values()
    share = part.num_examples / max(1, sum(split.num_examples for split in splits))
    size = builder.info.dataset_size * share
    if None not in shape:
        size = part.num_examples * int(np.prod(shape))
    free = psutil.virtual_memory().available
    fits = size <= MEMORY_SHARE * free
    if not fits:
        print(
            f"kdist: {builder.name} takes {size / 1e9:.1f} GB of {free / 1e9:.1f} GB free memory: "
            "read from disk as it is asked for",
            file=sys.stderr,
        )
    return fits


def _on_disk(builder, part, names):
    features = builder.info.features
    image_key, label_key = builder.info.supervised_keys[:2]

    def parse(record):
        example = features.deserialize_example(record)
        return example[image_key], tf.cast(example[label_key], tf.int32)

    files = [(file.filename, file.skip, file.take) for file in part.file_instructions]
    shape = features[image_key].shape
    return RecordSource.of_files(files, parse, shape, features[label_key].num_classes, names)


@contextlib.contextmanager
def _without_google_cloud(tfds):
    """TFDS asks a public bucket about every data set, which takes long without a network."""
    before = os.environ.get("NO_GCE_CHECK")
    os.environ["NO_GCE_CHECK"] = "true"
    tfds.core.utils.gcs_utils._is_gcs_disabled = True
    try:
        yield
    finally:
        if before is None:
            del os.environ["NO_GCE_CHECK"]
        else:
            os.environ["NO_GCE_CHECK"] = before


def _unknown(name, known, error):
    if name.partition("/")[0].partition(":")[0] in known:  # its configuration or version is not
        return f"{name!r}: {error}"
    close = difflib.get_close_matches(name, ["digits", *known], n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else ";"
    return (
        f"unknown data set {name!r}{hint} Give a name of TFDS (tensorflow.org/datasets/catalog), "
        "'digits', or a directory of images or IDX files"
    )
