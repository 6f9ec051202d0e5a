"""Image files in a folder for each class: `cats/1.jpg`, `dogs/7.jpg`, the layout of cats-vs-dogs.

train, test = load_image_folder("PetImages", seed=0)
"""

import concurrent.futures
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from kdist.data.source import Source

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_NAMED_AT_MOST = 5
# Looking at every file takes a minute or so for 25,000: how far it is, is told after so many.
_TOLD_EACH = 5000


class ImageFolderSource(Source):
    """Image files, decoded as they are asked for; of sizes of their own, with 3 channels."""

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


def load_image_folder(directory, seed=0, test_share=0.2):
    """Training and test source from `train/` and `test/` folders, or from one folder, split.

    Every file is decoded once to find the broken ones, which are left out, counted and named.

    Args:
        directory: holds a folder for each class, or `train` and `test` that do.
        seed: of the split.
        test_share: of the examples of one folder, drawn by `seed`. Defaults to 0.2.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: it holds no class folders with readable images, or too few to split.
    """
    root = pathlib.Path(directory)
    if (root / "train").is_dir() and (root / "test").is_dir():
        train, test = _folder(root / "train"), _folder(root / "test")
        if train.class_names != test.class_names:
            raise ValueError(
                f"{root}: train holds the classes {train.class_names}, test {test.class_names}; "
                "give both the same folders"
            )
        return train, test
    source = _folder(root)
    number = round(source.num_examples * test_share)
    if not 0 < number < source.num_examples:
        raise ValueError(f"{root}: {source.num_examples} images are too few to split; add more")
    order = np.random.default_rng(seed).permutation(source.num_examples)
    return source.select(np.sort(order[number:])), source.select(np.sort(order[:number]))


def _folder(root):
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no directory; give one with a folder for each class")
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
            f"{root} holds no images in class folders; expected {root}/<class>/*.jpg, with two or "
            f"more classes, found {len(names)} folders and {len(readable)} readable images"
        )
    paths, labels = zip(*readable, strict=True)
    return ImageFolderSource(paths, labels, names)


def _readable(found):
    """The (path, label) pairs whose file TensorFlow's own decoder takes."""

    def is_broken(pair):
        try:
            return _decode(tf.io.read_file(pair[0])).shape[0] == 0
        except tf.errors.OpError:
            return True

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        broken = []
        for is_bad in pool.map(is_broken, found):
            broken.append(is_bad)
            if len(broken) % _TOLD_EACH == 0:
                print(f"kdist: {len(broken)} of {len(found)} images looked at", file=sys.stderr)
    names = [os.path.join(*pathlib.Path(path).parts[-2:]) for path, _ in _where(found, broken)]
    if names:
        more = ", …" if len(names) > _NAMED_AT_MOST else ""
        print(
            f"kdist: {len(names)} of {len(found)} images cannot be read and are left out: "
            f"{', '.join(names[:_NAMED_AT_MOST])}{more}",
            file=sys.stderr,
        )
    return _where(found, [not is_bad for is_bad in broken])


def _where(items, keep):
    return [item for item, kept in zip(items, keep, strict=True) if kept]


def _decode(content):
    """An uint8 image (H, W, 3) from a JPEG, PNG, BMP or GIF file, whatever its name says."""
    # BMP files with 4 channels cannot be asked for 3, so channels are brought to 3 afterwards.
    image = tf.io.decode_image(content, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, None])
    channels = tf.shape(image)[-1]
    image = tf.cond(channels < 3, lambda: tf.repeat(image[..., :1], 3, -1), lambda: image[..., :3])
    return tf.ensure_shape(image, [None, None, 3])
