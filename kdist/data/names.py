"""Names of datasets, checked without TensorFlow."""

import os


def dataset_path(name: str | os.PathLike) -> str:
    """Returns a dataset's name or directory with `~` expanded; a name may also be a directory.

    Raises:
        FileNotFoundError: the name can only be a path, and there is no such directory.
    """
    name = os.path.expanduser(os.fspath(name))
    # TFDS names may contain a slash, as in cifar10_corrupted/brightness_1.
    if (os.path.isabs(name) or name.startswith(".")) and not os.path.isdir(name):
        raise FileNotFoundError(
            f"{name}: no such directory; pass a directory of images, or the name of a dataset"
        )
    return name
