"""Image files in one folder per class, such as `cats/1.jpg` and `dogs/7.jpg`."""

import concurrent.futures
import logging
import os
import pathlib

import numpy as np
import tensorflow as tf

from kdist.data.arrays import Source

_logger = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_MAX_NAMES_SHOWN = 5
# Folders next to `train` whose images are for testing: the first of them that exists.
_TEST_PARTS = ("test", "val", "valid", "validation")
# Checking 25,000 files takes about a minute; progress is logged after this many.
_PROGRESS_INTERVAL = 5000


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

    Instead of `test/`, the test images may be in `val/`, `valid/`, or `validation/`. Of one folder,
    `test_fraction` of the examples are for testing. Every file is decoded once; broken files are
    skipped and logged. Raises FileNotFoundError if the directory does not exist, and ValueError if
    it contains no class folders with readable images, too few to split, or parts of a dataset with
    other names.
    """
    root = pathlib.Path(directory)
    part = next((name for name in _TEST_PARTS if (root / name).is_dir()), None)
    if (root / "train").is_dir() and part is not None:
        train, test = _folder(root / "train"), _folder(root / part)
        if train.class_names != test.class_names:
            raise ValueError(
                f"{root}: train has the classes {train.class_names}, {part} {test.class_names}; "
                "create the same folders in both"
            )
        if others := sorted({*_folder_names(root)} - {"train", part}):
            _logger.warning(
                "%s: the folders %s are ignored; images of train are for training, and those of %s "
                "for testing",
                root,
                ", ".join(others[:_MAX_NAMES_SHOWN]),
                part,
            )
        return train, test
    _check_classes(root)
    source = _folder(root)
    number = round(source.num_examples * test_fraction)
    if not 0 < number < source.num_examples:
        raise ValueError(f"{root}: {source.num_examples} images are too few to split; add more")
    order = np.random.default_rng(seed).permutation(source.num_examples)
    return source.select(np.sort(order[number:])), source.select(np.sort(order[:number]))


def _check_classes(root):
    """Raises a ValueError if the folders are parts of a dataset, such as Training and Testing.

    A classifier would learn to tell the parts apart. A class may have the name "train" as well, but
    not the folders of all others.
    """
    names = _folder_names(root)
    if len(names) < 2 or not any(name.lower().startswith("train") for name in names):
        return  # without a look into each folder, which may have many files
    classes = {tuple(_folder_names(root / name)) for name in names}
    if len(classes) == 1 and len(*classes) > 1:
        raise ValueError(
            f"{root}: {', '.join(names[:_MAX_NAMES_SHOWN])} have the same folders, "
            f"{', '.join(min(classes)[:_MAX_NAMES_SHOWN])}, so they are parts of a dataset and no "
            "classes; rename them to train and test"
        )


def _folder_names(root):
    """Returns the sorted names of the folders in a directory, without hidden ones."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a directory; pass one with a folder per class")
    return sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and _is_shown(entry, root)
    )


def _folder(root):
    names = _folder_names(root)
    files = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((root / name).rglob("*"))
        if path.is_file() and _is_shown(path, root)
    ]
    found = [(str(path), label) for path, label in files if path.suffix.lower() in SUFFIXES]
    if len(files) > len(found):
        others = sorted({path.suffix.lower() or path.name for path, _ in files} - {*SUFFIXES})
        _logger.warning(
            "%s: %d files of other types are ignored (%s); images are %s",
            root,
            len(files) - len(found),
            ", ".join(others[:_MAX_NAMES_SHOWN]),
            ", ".join(SUFFIXES),
        )
    readable = _readable(found)
    labels = {label for _, label in readable}
    if empty := [name for label, name in enumerate(names) if label not in labels]:
        _logger.warning("%s: no images of the classes %s", root, ", ".join(empty))
    if len(names) < 2 or not readable:
        if len(names) == 1 and len(inner := _folder_names(root / names[0])) > 1:
            raise ValueError(
                f"{root} contains a single folder, {names[0]}, with {len(inner)} folders; if these "
                f"are the classes, pass {root / names[0]}"
            )
        raise ValueError(
            f"{root} contains no images in class folders; expected {root}/<class>/*.jpg, with two "
            f"or more classes, found {len(names)} folders and {len(readable)} readable images. For "
            f"a directory of text, write text:{root}"
        )
    paths, labels = zip(*readable, strict=True)
    return ImageFolderSource(paths, labels, names)


def _is_shown(path, root):
    """Returns whether a path below `root` is the user's, and not one that a program hides."""
    return not any(part.startswith((".", "__MACOSX")) for part in path.relative_to(root).parts)


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
