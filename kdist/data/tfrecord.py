"""Random access to examples in TFRecord files, for datasets that do not fit in memory.

The position of each record is indexed once, so that an example is read without those before it, by
TensorFlow alone: two to three times as many small records per second as through Python.
"""

import os
import struct
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from kdist.data.source import Source

# A record: length (uint64), checksum of the length (4 bytes), content, checksum (4 bytes).
_HEADER, _FOOTER = 12, 4
_BUFFER_BYTES = 32 * 1024


class RecordSource(Source):
    """Records of local files; `from_files` indexes them."""

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
