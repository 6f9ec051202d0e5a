"""Names of datasets, checked without TensorFlow."""

import os


def dataset_path(name: str | os.PathLike) -> str:
    """Returns a dataset's name or directory with `~` expanded; a name may also be a directory.

    Raises:
        FileNotFoundError: the name can only be a path, and there is no such directory.
        ValueError: the name is empty.
    """
    name = os.path.expanduser(os.fspath(name))
    if not name.strip():
        raise ValueError("the name of the dataset is empty; pass a name, such as digits")
    # TFDS names may contain a slash, as in cifar10_corrupted/brightness_1.
    is_path = os.path.isabs(name) or name.startswith(".") or os.path.isfile(name)
    if is_path and not os.path.isdir(name):
        raise FileNotFoundError(
            f"{name}: no such directory; pass a directory of images, or the name of a dataset"
        )
    return name
