"""Random access to examples in TFRecord files, for datasets that do not fit in memory.

The position of each record is indexed once, so that an example is read without those before it.
"""

import os
import struct
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from kdist.data.source import Source

# A record: length (uint64), checksum of the length (4 bytes), content, checksum (4 bytes).
_HEADER, _FOOTER = 12, 4


class RecordSource(Source):
    """Records of local files; `from_files` indexes them.

    Python reads the records, so the pipeline must run in the process that created the source. This
    is the case under every strategy whose workers load their own data.
    """

    def __init__(self, paths, locations, parse, image_shape, num_classes, class_names=None):
        self._files = [os.open(path, os.O_RDONLY) for path in paths]
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
        record = tf.ensure_shape(tf.numpy_function(self._read, [index], tf.string), [])
        image, label = self._parse(record)
        in_range = tf.debugging.Assert(
            (label >= 0) & (label < self.num_classes),
            ["example", index, "has the label", label, "of", self.num_classes, "classes"],
        )
        with tf.control_dependencies([in_range]):
            return tf.ensure_shape(image, self.image_shape), tf.identity(label)

    def select(self, indices):
        kind = self._parse, self.image_shape, self.num_classes, self.class_names
        return RecordSource(self._paths, self._locations[indices], *kind)

    def __del__(self):
        for file in getattr(self, "_files", ()):
            os.close(file)

    def _read(self, index):
        number, start, length = (int(n) for n in self._locations[index])
        return os.pread(self._files[number], length, start)


def _locations(path):
    """Returns the offset and length of each record in bytes, int64 (N, 2)."""
    locations, start, size = [], 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        while start < size:
            header = os.pread(file.fileno(), _HEADER, start)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else size
            if start + _HEADER + length + _FOOTER > size:
                raise ValueError(f"{path} is truncated at byte {size}; prepare the dataset again")
            locations.append((start + _HEADER, length))
            start += _HEADER + length + _FOOTER
    return np.array(locations, "int64").reshape(-1, 2)
