"""Names of datasets, checked without TensorFlow."""

import difflib
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterable

from kdist.mirror.store import is_url

# Folders of TFDS without datasets, and the definition of a class that may be a dataset.
_NO_DATASETS = ("core", "datasets", "dataset_collections", "scripts", "testing")
_CLASS = re.compile(r"^class (\w+)(?<!Config)(?<!Info)(?<!Builder)(?<!Fn)\(", re.MULTILINE)


# Prefix of a file or directory of text, as in text:docs.
TEXT_PREFIX = "text:"


def dataset_path(name: str | os.PathLike) -> str:
    """Returns a dataset's name or directory with `~` expanded; a name may also be a directory.

    A URL of object storage is returned as it is, and so is `text:PATH`, whose path must exist.

    Raises:
        FileNotFoundError: the name can only be a path, and there is no such directory.
        ValueError: the name is empty.
    """
    name = os.path.expanduser(os.fspath(name))
    if not name.strip():
        raise ValueError("the name of the dataset is empty; pass a name, such as digits")
    if is_url(name):
        return name
    if name.startswith(TEXT_PREFIX):
        path = os.path.expanduser(name.removeprefix(TEXT_PREFIX))
        if not os.path.exists(path):
            raise FileNotFoundError(f"{name}: no such file or directory; pass one with text files")
        return TEXT_PREFIX + path
    # TFDS names may contain a slash, as in cifar10_corrupted/brightness_1.
    is_path = os.path.isabs(name) or name.startswith(".") or os.path.isfile(name)
    if is_path and not os.path.isdir(name):
        raise FileNotFoundError(
            f"{name}: no such directory; pass a directory of images, or the name of a dataset"
        )
    return name


def check_dataset_name(name: str, data_dir: str | os.PathLike | None = None):
    """Checks the name of a TFDS dataset from TFDS's source files, as importing it takes seconds.

    Args:
        name: name, with an optional configuration and version, such as `"cifar10:3.0.2"`.
        data_dir: directory of TFDS, which may hold datasets that TFDS does not define. Defaults to
            its own.

    Raises:
        ValueError: TFDS has no dataset of this name; the message has similar names.
    """
    base = re.split("[/:]", name)[0]
    if is_url(data_dir):  # it may hold any dataset
        return
    where = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    if os.path.isdir(os.path.join(os.path.expanduser(where), base)):
        return
    if (known := tfds_names()) and _snake_case(base) not in known:
        raise ValueError(unknown_dataset(name, known))


def unknown_dataset(name: str, known: Iterable[str]) -> str:
    """Returns the error about a name that is not among the `known` names of TFDS."""
    base = re.split("[/:]", name)[0]
    close = difflib.get_close_matches(base, ["digits", *sorted(known)], n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return (
        f"unknown dataset {name!r}{hint} Pass the name of a TFDS dataset "
        "(tensorflow.org/datasets/catalog), 'digits', or a directory of images or IDX files that "
        "exists"
    )


def tfds_names() -> set[str]:
    """Returns the names of TFDS's datasets, and those of other classes; empty without TFDS."""
    spec = importlib.util.find_spec("tensorflow_datasets")
    if spec is None or spec.origin is None:
        return set()
    root = pathlib.Path(spec.origin).parent
    names = {path.name for path in (root / "datasets").iterdir() if path.is_dir()}
    # TFDS names a dataset after its class, or after the folder of its module.
    for path in root.glob("*/**/*.py"):
        folder = path.relative_to(root).parts[0]
        if folder in _NO_DATASETS or path.name.endswith("_test.py"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        names |= {_snake_case(found) for found in _CLASS.findall(text)}
    return names


def _snake_case(name):
    """Returns the name that TFDS gives to a dataset of a class, such as cats_vs_dogs."""
    name = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
