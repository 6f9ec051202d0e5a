"""Data sets of TensorFlow Datasets, by name.

train, test = load_tfds("cats_vs_dogs", splits=("train[:80%]", "train[80%:]"))
"""

import contextlib
import difflib
import os
import socket
import urllib.parse
import urllib.request

import numpy as np
import tensorflow as tf

from kdist.data.arrays import from_arrays
from kdist.data.source import DatasetUnavailable, Source, check_labels


class EncodedSource(Source):
    """Encoded images of different sizes, held in memory as the bytes of their files."""

    def __init__(self, contents, labels, channels, num_classes, class_names):
        self._contents = np.asarray(contents, dtype=object)
        self._labels = np.asarray(labels, "int32")
        self.num_examples, self.num_classes = len(labels), num_classes
        self.image_shape, self.class_names = (None, None, channels), class_names

    def example(self, index):
        contents, labels = self._tensors()
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

    def _tensors(self):
        with tf.init_scope(), tf.device("CPU:0"):
            if not hasattr(self, "_cached_tensors"):
                self._cached_tensors = tf.constant(self._contents), tf.constant(self._labels)
        return self._cached_tensors


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
            where there is no `test`, the first 80 % of `train` and the rest.
        data_dir: TFDS's directory; by default its own choice, `~/tensorflow_datasets`.
        download: whether it may be downloaded.

    Raises:
        ValueError: TFDS knows no such data set or split, or it is not one of images and labels.
        DatasetUnavailable: it is not here and cannot be downloaded.
    """
    import tensorflow_datasets as tfds

    with _without_google_cloud(tfds):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError as error:
            raise ValueError(_unknown(name, tfds.list_builders())) from error
        if not builder.data_path.exists():
            _prepare(builder, download)
        return _sources(tfds, builder, splits)


_CONNECT_SECONDS = 5.0


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
    hosts = {urllib.parse.urlsplit(url).netloc for url in builder.url_infos}
    if urllib.request.getproxies() or not hosts:
        return
    for host in hosts:
        try:
            with socket.create_connection((host.partition(":")[0], 80), _CONNECT_SECONDS):
                return
        except OSError as error:
            last = error
    raise OSError(f"{', '.join(sorted(hosts))}: {last.strerror or last}")


def _sources(tfds, builder, splits):
    info = builder.info
    if not info.supervised_keys or not {"image", "label"} <= set(info.features):
        raise ValueError(
            f"{builder.name} is not a data set of images with labels: its features are "
            f"{', '.join(info.features)}"
        )
    if splits is None:
        splits = ("train", "test") if "test" in info.splits else ("train[:80%]", "train[80%:]")
    sources = []
    for split in splits:
        try:
            sources.append(_source(tfds, builder, split))
        except (ValueError, KeyError) as error:
            if "split" not in str(error).lower():
                raise
            raise ValueError(
                f"{builder.name} has no split {split!r}; it has {', '.join(info.splits)}, and "
                "parts of them such as 'train[:80%]'"
            ) from error
    return tuple(sources)


def _source(tfds, builder, split):
    features = builder.info.features
    shape, label = features["image"].shape, features["label"]
    names = tuple(label.names) if getattr(label, "names", None) else None
    if None not in shape:
        examples = tfds.as_numpy(builder.as_dataset(split, batch_size=-1))
        return from_arrays(examples["image"], examples["label"], label.num_classes, names)
    # Images of different sizes stay as they are in the file; they are decoded when asked for.
    decoders = {"image": tfds.decode.SkipDecoding()}
    examples = list(tfds.as_numpy(builder.as_dataset(split, decoders=decoders)))
    labels = np.array([example["label"] for example in examples])
    check_labels(labels, label.num_classes, builder.name)
    contents = [example["image"] for example in examples]
    return EncodedSource(contents, labels, shape[-1], label.num_classes, names)


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


def _unknown(name, known):
    close = difflib.get_close_matches(name, ["digits", *known], n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else ";"
    return (
        f"unknown data set {name!r}{hint} Give a name of TFDS (tensorflow.org/datasets/catalog), "
        "'digits', or a directory of images or IDX files"
    )
