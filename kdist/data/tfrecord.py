"""Examples in TFRecord files, read where they lie: for what memory cannot hold.

source = RecordSource.of_files([("train-0.tfrecord", 0, 1000)], parse, (None, None, 3), 10)

Each record's place is looked up once, so that any example is read without those before it.
"""

import os
import struct
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from kdist.data.source import Source

# A record is its length (uint64), a checksum of the length (4), the bytes, their checksum (4).
_HEADER, _FOOTER = 12, 4


class RecordSource(Source):
    """Records of local files; `of_files` finds their places.

    Reads go through Python, so the pipeline has to run in the process that made the source: under
    every strategy whose workers load their own data.
    """

    def __init__(self, paths, places, parse, image_shape, num_classes, class_names=None):
        self._files = [os.open(path, os.O_RDONLY) for path in paths]
        self._paths, self._places, self._parse = paths, places, parse
        self.num_examples, self.num_classes = len(places), num_classes
        self.image_shape, self.class_names = image_shape, class_names

    @classmethod
    def of_files(
        cls,
        files: Sequence[tuple[str | os.PathLike, int, int]],
        parse: Callable,
        image_shape: tuple[int | None, int | None, int],
        num_classes: int,
        class_names: tuple[str, ...] | None = None,
    ) -> "RecordSource":
        """The source of some records of some files.

        Args:
            files: path, how many records to skip, how many to take (-1: the rest), for each file.
            parse: record, a string () -> image (H, W, C) and int32 label (); in graph code.
            image_shape: (H, W, C); None where sizes differ.
            num_classes: labels are whole numbers from 0 to this, exclusive.
            class_names: a name for each class, or None.

        Raises:
            OSError: a file is not there, or not on a local disk.
            ValueError: a file is cut short, or there are no records.
        """
        paths = [os.fspath(path) for path, _, _ in files]
        places = [
            np.insert(_places(path)[skip : None if take < 0 else skip + take], 0, number, axis=1)
            for number, (path, skip, take) in enumerate(files)
        ]
        if not sum(map(len, places)):
            raise ValueError(f"no records in {paths or 'no files'}; take another split")
        return cls(paths, np.concatenate(places), parse, image_shape, num_classes, class_names)

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
        return RecordSource(
            self._paths,
            self._places[indices],
            self._parse,
            self.image_shape,
            self.num_classes,
            self.class_names,
        )

    def __del__(self):
        for file in getattr(self, "_files", ()):
            os.close(file)

    def _read(self, index):
        number, start, length = (int(n) for n in self._places[index])
        return os.pread(self._files[number], length, start)


def _places(path):
    """int64 (N, 2): where each record of the file starts, and its length in bytes."""
    places, start, size = [], 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        while start < size:
            header = os.pread(file.fileno(), _HEADER, start)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else size
            if start + _HEADER + length + _FOOTER > size:
                raise ValueError(f"{path} is cut short at byte {size}; prepare the data set again")
            places.append((start + _HEADER, length))
            start += _HEADER + length + _FOOTER
    return np.array(places, "int64").reshape(-1, 2)
