"""Datasets of TensorFlow Datasets (TFDS), by name."""

import contextlib
import logging
import os
import struct
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import tensorflow as tf

from kdist.data.arrays import DatasetUnavailable, Source, check_labels, from_arrays
from kdist.data.names import tfds_names, unknown_dataset

_logger = logging.getLogger(__name__)

# Fraction of the free memory that a split may take; its tensors are a second copy.
MAX_MEMORY_FRACTION = 0.25
# Time limit for a host to answer.
_TIMEOUT_SECONDS = 5.0
# A record: length (uint64), checksum of the length (4 bytes), content, checksum (4 bytes).
_HEADER, _FOOTER = 12, 4
_BUFFER_BYTES = 32 * 1024


class EncodedSource(Source):
    """Images of different sizes, in memory as the content of their files."""

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
        kind = self.image_shape[-1], self.num_classes, self.class_names
        return EncodedSource(self._contents[indices], self._labels[indices], *kind)

    def arrays(self):
        return self._contents, self._labels


def is_prepared(name: str, data_dir: str | None = None) -> bool:
    """Returns whether TFDS's directory contains the prepared dataset."""
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
    from_disk: bool = False,
) -> tuple[Source, Source]:
    """Returns the training and test source; downloads and prepares the dataset if needed.

    A dataset that takes more than a quarter of the free memory is read from disk on demand.

    Args:
        name: TFDS name, with an optional configuration and version, such as `"cifar10:3.0.2"`; a
            ValueError if it is unknown, or its examples are not images with labels.
        splits: TFDS split expressions for training and testing. Defaults to `train` and `test`;
            without `test`, to `train` and `validation`; without both, to 80 % and 20 % of `train`.
        data_dir: directory of TFDS. Defaults to its own, `~/tensorflow_datasets`.
        download: whether TFDS may download the dataset; a DatasetUnavailable if it cannot.
        from_disk: whether to read any dataset from disk on demand. Defaults to False.
    """
    import tensorflow_datasets as tfds

    with _without_google_cloud(tfds):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except (tfds.core.DatasetNotFoundError, ValueError) as error:  # not known, or not valid
            raise ValueError(_unknown(name, tfds_names(), error)) from error
        _check_images(tfds, builder)  # before a download
        if not builder.data_path.exists():
            _prepare(builder, download)
        return _sources(tfds, builder, splits, from_disk)


def _prepare(builder, download):
    if not download:
        raise DatasetUnavailable(
            f"{builder.name} is not prepared in {builder.data_dir}, and downloads are "
            "disabled; allow them (--download), or set --data_dir to a prepared directory"
        )
    try:
        _check_reachable(builder)
        builder.download_and_prepare()
    except ImportError:  # a package that this dataset's code needs
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise DatasetUnavailable(
            f"{builder.name} cannot be downloaded ({reason}). Check the network, set --data_dir to "
            "a prepared TFDS directory, or use --dataset=digits, which needs no download"
        ) from error


def _check_reachable(builder):
    """Raises an OSError if no host of the dataset answers; TFDS would retry for minutes."""
    hosts = {urllib.parse.urlsplit(url).netloc: url for url in builder.url_infos}
    failures = []
    for host, url in hosts.items():
        try:
            # Uses the proxy of the environment, as TFDS does.
            urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_SECONDS
            )
            return
        except urllib.error.HTTPError:  # an answer; the download reports its meaning
            return
        except OSError as error:
            failures.append(f"{host}: {getattr(error, 'reason', error)}")
    if failures:
        raise OSError("; ".join(failures))


def _check_images(tfds, builder):
    """Raises a ValueError unless the examples are images with class labels."""
    info = builder.info
    keys = info.supervised_keys
    kinds = tfds.features.Image, tfds.features.ClassLabel
    if not keys or not all(
        isinstance(info.features[key], kind) for key, kind in zip(keys, kinds, strict=False)
    ):
        raise ValueError(
            f"{builder.name} is not a dataset of images with class labels; its features are "
            f"{', '.join(info.features)}. Choose another dataset"
        )


def _sources(tfds, builder, splits, from_disk):
    info = builder.info
    if splits is None:
        held_out = [name for name in ("test", "validation") if name in info.splits]
        splits = ("train", held_out[0]) if held_out else ("train[:80%]", "train[80%:]")
    return tuple(_source(tfds, builder, split, from_disk) for split in splits)


def _part(info, split):
    """Returns the split of an expression such as `train[:80%]`."""
    try:
        part = info.splits[split]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{info.name} has no split {split!r}; use one of {', '.join(info.splits)}, "
            "or a part such as 'train[:80%]'"
        ) from error
    if not part.num_examples:
        raise ValueError(f"{info.name}: the split {split!r} is empty; use a larger part")
    return part


def _source(tfds, builder, split, from_disk):
    info = builder.info
    part = _part(info, split)
    image_key, label_key = info.supervised_keys[:2]
    shape, label = info.features[image_key].shape, info.features[label_key]
    names = tuple(label.names) if label.names else None
    if from_disk or not _fits_in_memory(builder, part, shape):
        return _on_disk(builder, part, names)
    if None not in shape:
        examples = tfds.as_numpy(builder.as_dataset(split, batch_size=-1))
        return from_arrays(examples[image_key], examples[label_key], label.num_classes, names)
    # Images of different sizes stay encoded, and are decoded on demand.
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
    fits = size <= MAX_MEMORY_FRACTION * free
    if not fits:
        _logger.info(
            "%s takes %.1f of %.1f GB free memory: read from disk on demand",
            builder.name,
            size / 1e9,
            free / 1e9,
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
    return RecordSource.from_files(files, parse, shape, features[label_key].num_classes, names)


@contextlib.contextmanager
def _without_google_cloud(tfds):
    """Disables TFDS's lookup in a public bucket, which takes long without a network."""
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
    if name.partition("/")[0].partition(":")[0] in known:  # its configuration or version is unknown
        return f"{name!r}: {error}"
    return unknown_dataset(name, known)


class RecordSource(Source):
    """Records of local files; `from_files` indexes them, so that any of them is read alone."""

    def __init__(self, paths, locations, parse, image_shape, num_classes, class_names=None):
        self._paths, self._locations, self._parse = paths, locations, parse
        self.num_examples, self.num_classes = len(locations), num_classes
        self.image_shape, self.class_names = image_shape, class_names

    @classmethod
    def from_files(
        cls,
        files: Sequence[tuple[str | os.PathLike, int, int]],
        parse: Callable,
        image_shape: tuple[int | None, int | None, int],
        num_classes: int,
        class_names: tuple[str, ...] | None = None,
    ) -> "RecordSource":
        """Returns a source of some records of some files.

        `files` are (path, records to skip, records to take) of each file; -1 takes all others.
        `parse` is a function string () -> image (H, W, C), int32 label (), in graph code; H and W
        of `image_shape` are None if the images differ in size. Raises OSError if a file is missing,
        or not on a local disk, and ValueError if a file is truncated, or there are no records.
        """
        paths = [os.fspath(path) for path, _, _ in files]
        locations = [
            np.insert(_locations(path)[skip : None if take < 0 else skip + take], 0, number, axis=1)
            for number, (path, skip, take) in enumerate(files)
        ]
        if not sum(map(len, locations)):
            raise ValueError(f"no records in {paths or 'no files'}; use another split")
        return cls(paths, np.concatenate(locations), parse, image_shape, num_classes, class_names)

    def example(self, index):
        image, label = self._parse(self._record(index))
        in_range = tf.debugging.Assert(
            (label >= 0) & (label < self.num_classes),
            ["example", index, "has the label", label, "of", self.num_classes, "classes"],
        )
        with tf.control_dependencies([in_range]):
            return tf.ensure_shape(image, self.image_shape), tf.identity(label)

    def select(self, indices):
        kind = self._parse, self.image_shape, self.num_classes, self.class_names
        return RecordSource(self._paths, self._locations[indices], *kind)

    def _record(self, index):
        """Returns the content of a record, and checks it against its checksum."""
        number, start = tf.unstack(tf.gather(tf.constant(self._locations), index))
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=[tf.gather(tf.constant(self._paths), number)],
            compression_type="",
            buffer_size=_BUFFER_BYTES,
            byte_offsets=[start],
        )
        spec = {"output_types": [tf.string], "output_shapes": [[]]}
        first = tf.raw_ops.TakeDataset(input_dataset=records, count=1, **spec)
        return tf.raw_ops.DatasetToSingleElement(dataset=first, **spec)[0]


def _locations(path):
    """Returns the offset of each record in bytes, int64 (N, 1)."""
    locations, start, size = [], 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        while start < size:
            header = os.pread(file.fileno(), _HEADER, start)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else size
            if start + _HEADER + length + _FOOTER > size:
                raise ValueError(f"{path} is truncated at byte {size}; prepare the dataset again")
            locations.append(start)
            start += _HEADER + length + _FOOTER
    return np.array(locations, "int64").reshape(-1, 1)
